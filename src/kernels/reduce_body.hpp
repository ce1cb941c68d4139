// The body of reduce(), included once per instruction set with LOCKSTEP_ISA naming its namespace.
// Everything here has internal linkage and calls no external inline function: the linker could
// otherwise keep a copy with instructions that the CPU does not support.
//
// A few registers at a time are reduced over all inputs: values stay in registers, inputs and
// output are accessed once. The remainder goes through the same code as shorter vectors.
//
// What rounds is combined in the order of the tree: neighbours, then pairs of these; an odd one out
// is passed to the next level unchanged. So 2^k inputs that begin at a multiple of 2^k are a
// subtree of the tree over all, whoever computes it. What is exact goes in rank order.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels/reduce_isa.hpp"

#if defined(__clang__)
#define LOCKSTEP_UNROLL _Pragma("unroll")
#else
#define LOCKSTEP_UNROLL _Pragma("GCC unroll 8")
#endif
#define LOCKSTEP_INLINE_MEMBER [[gnu::always_inline]] inline
#define LOCKSTEP_INLINE [[gnu::always_inline]] static inline

namespace lockstep::kernels::LOCKSTEP_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

#include "kernels/floats.inc"
#include "kernels/moments.inc"
#include "kernels/tree.inc"

// --- elements: type in memory (Storage) and of the reduction (Value) ----------------------------

/// The sum for a mean of integers of at most 32 bits. A double is exact up to 2^53, that is for
/// 2^21 inputs; below 2^53 the rounded quotient truncates to the same integer as the exact one.
/// Via: the 32-bit type used for the conversions.
template <class T, class Via = std::int32_t>
struct SummedInDouble {
  using Storage = T;
  using Value = double;
  template <int kLanes>
  LOCKSTEP_INLINE Vector<double, kLanes> widen(Vector<T, kLanes> x) {
    return __builtin_convertvector(__builtin_convertvector(x, Vector<Via, kLanes>),
                                   Vector<double, kLanes>);
  }
  template <int kLanes>
  LOCKSTEP_INLINE Vector<T, kLanes> narrow(Vector<double, kLanes> x) {
    return __builtin_convertvector(__builtin_convertvector(x, Vector<Via, kLanes>),
                                   Vector<T, kLanes>);
  }
};

/// Whether sums and products of E's values are exact, or wrap.
template <class E>
constexpr bool kIsExact = std::is_integral_v<typename E::Value>;
template <class T, class Via>
constexpr bool kIsExact<SummedInDouble<T, Via>> = true;

// --- operations on vectors ----------------------------------------------------------------------

/// Most operations do not change the reduced value.
struct NoFinish {
  static constexpr bool kRounds = false;
  template <class V>
  LOCKSTEP_INLINE V finish(V x, int) {
    return x;
  }
};

struct Sum : NoFinish {
  static constexpr bool kRounds = true;
  template <class V>
  LOCKSTEP_INLINE V apply(V a, V b) {
    return a + b;
  }
};

struct Product : NoFinish {
  static constexpr bool kRounds = true;
  template <class V>
  LOCKSTEP_INLINE V apply(V a, V b) {
    return a * b;
  }
};

template <class V>
constexpr bool kIntegers = std::is_integral_v<std::remove_reference_t<decltype(V{}[0])>>;

// A NaN in `a` stays, because it came first; one in `b` is neither <= nor >=, and is taken. GCC
// makes one instruction of the form without NaN.
struct Min : NoFinish {
  template <class V>
  LOCKSTEP_INLINE V apply(V a, V b) {
    if constexpr (kIntegers<V>) {
      return a <= b ? a : b;
    } else {
      return ((a <= b) | (a != a)) ? a : b;
    }
  }
};

struct Max : NoFinish {
  template <class V>
  LOCKSTEP_INLINE V apply(V a, V b) {
    if constexpr (kIntegers<V>) {
      return a >= b ? a : b;
    } else {
      return ((a >= b) | (a != a)) ? a : b;
    }
  }
};

struct And : NoFinish {
  template <class V>
  LOCKSTEP_INLINE V apply(V a, V b) {
    return a & b;
  }
};

struct Or : NoFinish {
  template <class V>
  LOCKSTEP_INLINE V apply(V a, V b) {
    return a | b;
  }
};

struct Xor : NoFinish {
  template <class V>
  LOCKSTEP_INLINE V apply(V a, V b) {
    return a ^ b;
  }
};

template <class T>
struct Mean : Sum {
  template <class V>
  LOCKSTEP_INLINE V finish(V x, int n) {
    return x / static_cast<T>(n);
  }
};

// --- the reduction ------------------------------------------------------------------------------

struct Call {
  const void* const* in;
  int n;
  void* out;
  std::size_t count;
};

/// How many inputs there are, if the code is made for that.
enum class Inputs { two, few, many };
constexpr int kFew = 8;

/// Some elements of the inputs, from the byte `at` of each on.
template <class E, class Op, int kLanes, int kRegisters>
struct Slice {
  using Lanes = Vector<typename E::Value, kLanes>;
  struct Values {
    Lanes of[kRegisters];
  };
  const Call& call;
  std::size_t at;

  LOCKSTEP_INLINE_MEMBER Values leaf(int r) const {
    Values values;
    load_registers<E, kLanes>(static_cast<const char*>(call.in[r]) + at, values.of);
    return values;
  }
  LOCKSTEP_INLINE Values apply(const Values& a, const Values& b) {
    Values values;
    LOCKSTEP_UNROLL
    for (int k = 0; k < kRegisters; ++k) {
      values.of[k] = Op::template apply<Lanes>(a.of[k], b.of[k]);
    }
    return values;
  }
  LOCKSTEP_INLINE_MEMBER Values in_order(int n) const {
    Values values = leaf(0);
    for (int r = 1; r < n; ++r) values = apply(values, leaf(r));
    return values;
  }
  /// The tree over kLeaves inputs, a power of two.
  template <int kLeaves>
  LOCKSTEP_INLINE_MEMBER Values tree(int first) const {
    if constexpr (kLeaves == 1) {
      return leaf(first);
    } else {
      return apply(tree<kLeaves / 2>(first), tree<kLeaves / 2>(first + kLeaves / 2));
    }
  }
  /// The tree over 1 to 7 inputs. The smallest of the trees that it consists of is the last.
  LOCKSTEP_INLINE_MEMBER Values small_tree(int first, int n) const {
    if (n < 4) {
      if (n == 1) return leaf(first);
      const Values two = tree<2>(first);
      return n == 2 ? two : apply(two, leaf(first + 2));
    }
    const Values four = tree<4>(first);
    switch (n) {
      case 4: return four;
      case 5: return apply(four, leaf(first + 4));
      case 6: return apply(four, tree<2>(first + 4));
      default: return apply(four, apply(tree<2>(first + 4), leaf(first + 6)));
    }
  }
  /// The tree over more than kFew.
  LOCKSTEP_INLINE_MEMBER Values large_tree(int n) const {
    const auto node = [&](int i) {
      const int first = i * kFew;
      return n - first >= kFew ? tree<kFew>(first) : small_tree(first, n - first);
    };
    return fold_tree<Values>((n + kFew - 1) / kFew, node,
                             [](const Values& a, const Values& b) { return apply(a, b); });
  }
};

/// Reduces kRegisters vectors of kLanes at a time, from element `at` on while they fit; returns
/// the start of the remainder.
template <class E, class Op, int kLanes, int kRegisters, Inputs kInputs>
LOCKSTEP_INLINE std::size_t reduce_while_fits(const Call& call, std::size_t at) {
  using Storage = typename E::Storage;
  using Elements = Slice<E, Op, kLanes, kRegisters>;
  const int n = kInputs == Inputs::two ? 2 : call.n;
  for (; call.count - at >= kLanes * kRegisters; at += kLanes * kRegisters) {
    const Elements elements{call, at * sizeof(Storage)};
    typename Elements::Values reduced;
    if constexpr (kInputs == Inputs::two) {
      reduced = elements.template tree<2>(0);
    } else if constexpr (!Op::kRounds || kIsExact<E>) {
      reduced = elements.in_order(n);
    } else if constexpr (kInputs == Inputs::few) {
      reduced = n == kFew ? elements.template tree<kFew>(0) : elements.small_tree(0, n);
    } else {
      reduced = elements.large_tree(n);
    }
    LOCKSTEP_UNROLL
    for (auto& lanes : reduced.of) {
      lanes = Op::template finish<typename Elements::Lanes>(lanes, n);
    }
    char* const out = static_cast<char*>(call.out) + at * sizeof(Storage);
    store_registers<E, kLanes>(reduced.of, [out](std::size_t offset, auto stored) {
      __builtin_memcpy(out + offset, &stored, sizeof(stored));
    });
  }
  return at;
}

// Each in a frame of its own: that of many inputs has a stack of partial results.
template <class E, class Op, Inputs kInputs>
[[gnu::noinline]] void reduce_inputs(const void* const* in, int n, void* out, std::size_t count) {
  const Call call{in, n, out, count};
  constexpr int kLanes = kRegisterBytes / static_cast<int>(sizeof(typename E::Value));
  constexpr int kAtOnce = kInPairs<E> && kInputs == Inputs::few ? 2 : 4;
  std::size_t at = reduce_while_fits<E, Op, kLanes, kAtOnce, kInputs>(call, 0);
  at = reduce_while_fits<E, Op, kLanes, 1, kInputs>(call, at);
  if (at == count) return;
  // A CPU cannot forward several short stores to one wide load: the next call's copy of a few
  // elements stored one by one would wait until they are in the cache.
  if constexpr (sizeof(typename E::Storage) == sizeof(typename E::Value)) {
    constexpr int kBytes = static_cast<int>(sizeof(typename E::Value));
    if constexpr (kRegisterBytes > 16) {
      at = reduce_while_fits<E, Op, 16 / kBytes, 1, kInputs>(call, at);
    }
    if constexpr (kBytes < 8) at = reduce_while_fits<E, Op, 8 / kBytes, 1, kInputs>(call, at);
  }
  reduce_while_fits<E, Op, 1, 1, kInputs>(call, at);
}

template <class E, class Op>
void reduce_all(const void* const* in, int n, void* out, std::size_t count) {
  if (n == 2) return reduce_inputs<E, Op, Inputs::two>(in, n, out, count);
  if constexpr (Op::kRounds && !kIsExact<E>) {
    if (n > kFew) return reduce_inputs<E, Op, Inputs::many>(in, n, out, count);
  }
  reduce_inputs<E, Op, Inputs::few>(in, n, out, count);
}

__extension__ typedef __int128 Int128;
__extension__ typedef unsigned __int128 UInt128;

/// The sum needs up to 85 bits, more than any vector element.
template <class T, class Wide>
void mean_of_64_bits(const void* const* in, int n, void* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Wide sum = 0;
    for (int r = 0; r < n; ++r) {
      T value;
      __builtin_memcpy(&value, static_cast<const char*>(in[r]) + i * sizeof(T), sizeof(T));
      sum += value;
    }
    const T narrow = static_cast<T>(sum);  // 128-bit division is several times slower
    const T mean =
        narrow == sum ? narrow / static_cast<T>(n) : static_cast<T>(sum / static_cast<Wide>(n));
    __builtin_memcpy(static_cast<char*>(out) + i * sizeof(T), &mean, sizeof(T));
  }
}

void merge_moments(const void* const* in, int n, void* out, std::size_t count) {
  struct Element {
    Moments moments;
    double unused;
  };
  for (std::size_t i = 0; i < count; ++i) {
    const auto part = [&](int r) {
      Element element;
      __builtin_memcpy(&element, static_cast<const char*>(in[r]) + i * sizeof(element),
                       sizeof(element));
      return element.moments;
    };
    Element merged{fold_tree<Moments>(n, part, merged_moments), 0};
    if (merged.moments.count == 0) merged.moments = {};
    __builtin_memcpy(static_cast<char*>(out) + i * sizeof(merged), &merged, sizeof(merged));
  }
}

}  // namespace

// Rows in DType's order, columns in that of kReduceOps. Sums and products of integers use unsigned
// types, whose wrapping is defined.
#define LOCKSTEP_INTEGER_ROW(T, Unsigned, ...)                                                  \
  {                                                                                             \
    reduce_all<Plain<Unsigned>, Sum>, reduce_all<Plain<Unsigned>, Product>,                     \
        reduce_all<Plain<T>, Min>, reduce_all<Plain<T>, Max>, reduce_all<Plain<Unsigned>, And>, \
        reduce_all<Plain<Unsigned>, Or>, reduce_all<Plain<Unsigned>, Xor>, __VA_ARGS__          \
  }
#define LOCKSTEP_MEAN(...) reduce_all<SummedInDouble<__VA_ARGS__>, Mean<double>>
#define LOCKSTEP_FLOATING_ROW(E, T)                                                              \
  {                                                                                              \
    reduce_all<E, Sum>, reduce_all<E, Product>, reduce_all<E, Min>, reduce_all<E, Max>, nullptr, \
        nullptr, nullptr, reduce_all<E, Mean<T>>                                                 \
  }

const ReduceTable kReduceTable = {{
    LOCKSTEP_INTEGER_ROW(std::uint8_t, std::uint8_t, LOCKSTEP_MEAN(std::uint8_t)),
    LOCKSTEP_INTEGER_ROW(std::int8_t, std::uint8_t, LOCKSTEP_MEAN(std::int8_t)),
    LOCKSTEP_INTEGER_ROW(std::int32_t, std::uint32_t, LOCKSTEP_MEAN(std::int32_t)),
    LOCKSTEP_INTEGER_ROW(std::int64_t, std::uint64_t, mean_of_64_bits<std::int64_t, Int128>),
    LOCKSTEP_FLOATING_ROW(Half16, float),
    LOCKSTEP_FLOATING_ROW(Brain16, float),
    LOCKSTEP_FLOATING_ROW(Plain<float>, float),
    LOCKSTEP_FLOATING_ROW(Plain<double>, double),
    {nullptr, nullptr, reduce_all<Plain<std::uint8_t>, Min>, reduce_all<Plain<std::uint8_t>, Max>,
     reduce_all<Plain<std::uint8_t>, And>, reduce_all<Plain<std::uint8_t>, Or>,
     reduce_all<Plain<std::uint8_t>, Xor>, nullptr},
    LOCKSTEP_INTEGER_ROW(std::int16_t, std::uint16_t, LOCKSTEP_MEAN(std::int16_t)),
    LOCKSTEP_INTEGER_ROW(std::uint16_t, std::uint16_t, LOCKSTEP_MEAN(std::uint16_t)),
    LOCKSTEP_INTEGER_ROW(std::uint32_t, std::uint32_t, LOCKSTEP_MEAN(std::uint32_t, std::uint32_t)),
    LOCKSTEP_INTEGER_ROW(std::uint64_t, std::uint64_t, mean_of_64_bits<std::uint64_t, UInt128>),
    {merge_moments},
}};

#undef LOCKSTEP_INTEGER_ROW
#undef LOCKSTEP_MEAN
#undef LOCKSTEP_FLOATING_ROW
#undef LOCKSTEP_UNROLL
#undef LOCKSTEP_INLINE
#undef LOCKSTEP_INLINE_MEMBER

}  // namespace lockstep::kernels::LOCKSTEP_ISA
