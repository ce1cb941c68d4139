// The body of reduce(), included once per instruction set with LOCKSTEP_ISA naming its namespace.
// Everything here has internal linkage and calls no external inline function: the linker could
// otherwise keep a copy with instructions that the CPU does not support.
//
// A few registers at a time are reduced over all inputs: values stay in registers, inputs and
// output are accessed once. The remainder goes through the same code as vectors of one lane.

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

// --- operations on vectors ----------------------------------------------------------------------

/// Most operations do not change the reduced value.
struct NoFinish {
  template <class V>
  LOCKSTEP_INLINE V finish(V x, int) {
    return x;
  }
};

struct Sum : NoFinish {
  template <class V>
  LOCKSTEP_INLINE V apply(V a, V b) {
    return a + b;
  }
};

struct Product : NoFinish {
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

/// Reduces kRegisters vectors of kLanes at a time, from element `at` on while they fit; returns
/// the start of the remainder. kN: the number of inputs if known at compile time, else 0.
template <class E, class Op, int kLanes, int kRegisters, int kN>
LOCKSTEP_INLINE std::size_t reduce_while_fits(const Call& call, std::size_t at) {
  using Storage = typename E::Storage;
  using Values = Vector<typename E::Value, kLanes>;
  const int n = kN != 0 ? kN : call.n;
  const auto input = [&](int r) {
    return static_cast<const char*>(call.in[r]) + at * sizeof(Storage);
  };
  for (; call.count - at >= kLanes * kRegisters; at += kLanes * kRegisters) {
    Values reduced[kRegisters];
    load_registers<E, kLanes>(input(0), reduced);
    for (int r = 1; r < n; ++r) {
      Values next[kRegisters];
      load_registers<E, kLanes>(input(r), next);
      LOCKSTEP_UNROLL
      for (int k = 0; k < kRegisters; ++k) {
        reduced[k] = Op::template apply<Values>(reduced[k], next[k]);
      }
    }
    LOCKSTEP_UNROLL
    for (int k = 0; k < kRegisters; ++k) reduced[k] = Op::template finish<Values>(reduced[k], n);
    char* const out = static_cast<char*>(call.out) + at * sizeof(Storage);
    store_registers<E, kLanes>(reduced, [out](std::size_t offset, auto stored) {
      __builtin_memcpy(out + offset, &stored, sizeof(stored));
    });
  }
  return at;
}

template <class E, class Op, int kN>
LOCKSTEP_INLINE void reduce_n(const Call& call) {
  constexpr int kLanes = kRegisterBytes / static_cast<int>(sizeof(typename E::Value));
  std::size_t at = reduce_while_fits<E, Op, kLanes, 4, kN>(call, 0);
  at = reduce_while_fits<E, Op, kLanes, 1, kN>(call, at);
  reduce_while_fits<E, Op, 1, 1, kN>(call, at);
}

template <class E, class Op>
void reduce_all(const void* const* in, int n, void* out, std::size_t count) {
  const Call call{in, n, out, count};
  if (n == 2) {
    reduce_n<E, Op, 2>(call);
  } else {
    reduce_n<E, Op, 0>(call);
  }
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

/// The base of each mean is that of the first sample.
void merge_moments(const void* const* in, int n, void* out, std::size_t count) {
  struct Element {
    double count, mean, m2, unused;
  };
  for (std::size_t i = 0; i < count; ++i) {
    Moments sum;
    double base = 0;
    for (int r = 0; r < n; ++r) {
      Element part;
      __builtin_memcpy(&part, static_cast<const char*>(in[r]) + i * sizeof(part), sizeof(part));
      if (part.count == 0) continue;
      if (sum.count == 0) base = part.mean;
      sum.merge(part.count, part.mean - base, part.m2);
    }
    const Element merged{sum.count, base + sum.offset, sum.m2, 0};
    __builtin_memcpy(static_cast<char*>(out) + i * sizeof(merged), &merged, sizeof(merged));
  }
}

}  // namespace

// Rows in DType's order, columns in ReduceOp's. Sums and products of integers use unsigned types,
// whose wrapping is defined.
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

}  // namespace lockstep::kernels::LOCKSTEP_ISA
