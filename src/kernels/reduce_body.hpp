// The one body of reduce(), included once per instruction set with LOCKSTEP_ISA naming its
// namespace. Everything here has internal linkage and nothing of the standard library is called:
// the linker could otherwise keep a copy that holds instructions the CPU does not have.

#include <cstddef>
#include <cstdint>

#include "kernels/reduce_isa.hpp"

#if defined(__clang__)
#define LOCKSTEP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define LOCKSTEP_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace lockstep::kernels::LOCKSTEP_ISA {
namespace {

// --- elements: how they lie in memory (Storage), and what they are folded in (Value) ------------

template <class T>
struct Plain {
  using Storage = T;
  using Value = T;
  static Value widen(Storage x) { return x; }
  static Storage narrow(Value x) { return x; }
};

/// Integers fold as unsigned, where wrapping is defined.
template <class Signed, class Unsigned>
struct Wrapping {
  using Storage = Signed;
  using Value = Unsigned;
  static Value widen(Storage x) { return static_cast<Unsigned>(x); }
  static Storage narrow(Value x) { return static_cast<Signed>(x); }
};

/// The sum of a mean: 64 bits.
template <class T>
struct Summed {
  using Storage = T;
  using Value = std::uint64_t;
  static Value widen(Storage x) { return static_cast<Value>(static_cast<std::int64_t>(x)); }
  static Storage narrow(Value x) { return static_cast<T>(static_cast<std::int64_t>(x)); }
};

// The conversions are those of types.hpp, without branches, so that they vectorise.
struct Brain16 {
  using Storage = std::uint16_t;
  using Value = float;
  static Value widen(Storage x) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(x) << 16);
  }
  static Storage narrow(Value x) {
    const std::uint32_t word = __builtin_bit_cast(std::uint32_t, x);
    const std::uint32_t rounded = (word + 0x7fffU + ((word >> 16) & 1U)) >> 16;
    const std::uint32_t nan = (word >> 16) | 0x40U;
    return static_cast<Storage>((word & 0x7fffffffU) > 0x7f800000U ? nan : rounded);
  }
};

struct Half16 {
  using Storage = std::uint16_t;
  using Value = float;
  static Value widen(Storage x) {
    const std::uint32_t sign = (static_cast<std::uint32_t>(x) & 0x8000U) << 16;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(x) & 0x7fffU;
    const std::uint32_t normal = (magnitude << 13) + 0x38000000U;
    const std::uint32_t special = (magnitude << 13) | 0x7f800000U;
    const std::uint32_t subnormal = __builtin_bit_cast(
        std::uint32_t, static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24F);
    const std::uint32_t finite = magnitude < 0x400U ? subnormal : normal;
    return __builtin_bit_cast(float, sign | (magnitude < 0x7c00U ? finite : special));
  }
  static Storage narrow(Value x) {
    const std::uint32_t word = __builtin_bit_cast(std::uint32_t, x);
    const std::uint32_t sign = (word >> 16) & 0x8000U;
    const std::uint32_t magnitude = word & 0x7fffffffU;
    const std::uint32_t normal =
        (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
    // 0.5's last bit weighs what f16's least subnormal does: the addition rounds in the right
    // place.
    const std::uint32_t subnormal =
        __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, magnitude) + 0.5F) -
        0x3f000000U;
    const std::uint32_t nan = 0x7e00U | ((magnitude >> 13) & 0x1ffU);
    const std::uint32_t finite = magnitude < 0x38800000U ? subnormal : normal;
    const std::uint32_t or_infinity = magnitude < 0x477ff000U ? finite : 0x7c00U;
    return static_cast<Storage>(sign | (magnitude > 0x7f800000U ? nan : or_infinity));
  }
};

template <class E>
typename E::Value load(const void* base, std::size_t i) {
  typename E::Storage x;
  __builtin_memcpy(&x, static_cast<const char*>(base) + i * sizeof(x), sizeof(x));
  return E::widen(x);
}

template <class E>
void store(void* base, std::size_t i, typename E::Value value) {
  const typename E::Storage x = E::narrow(value);
  __builtin_memcpy(static_cast<char*>(base) + i * sizeof(x), &x, sizeof(x));
}

// --- operations ---------------------------------------------------------------------------------

/// Most operations leave the folded value as it is.
struct NoFinish {
  template <class V>
  static V finish(V x, int) {
    return x;
  }
};

struct Sum : NoFinish {
  template <class V>
  static V apply(V a, V b) {
    return static_cast<V>(a + b);
  }
};

struct Product : NoFinish {
  template <class V>
  static V apply(V a, V b) {
    return static_cast<V>(a * b);
  }
};

// The first NaN stays: it compares unequal to itself; a later one is not on the wanted side.
struct Min : NoFinish {
  template <class V>
  static V apply(V a, V b) {
    return (a == a) & !(a <= b) ? b : a;
  }
};

struct Max : NoFinish {
  template <class V>
  static V apply(V a, V b) {
    return (a == a) & !(a >= b) ? b : a;
  }
};

struct And : NoFinish {
  template <class V>
  static V apply(V a, V b) {
    return static_cast<V>(a & b);
  }
};

struct Or : NoFinish {
  template <class V>
  static V apply(V a, V b) {
    return static_cast<V>(a | b);
  }
};

struct Xor : NoFinish {
  template <class V>
  static V apply(V a, V b) {
    return static_cast<V>(a ^ b);
  }
};

struct Mean {
  template <class V>
  static V apply(V a, V b) {
    return a + b;
  }
  static float finish(float x, int n) { return x / static_cast<float>(n); }
  static double finish(double x, int n) { return x / static_cast<double>(n); }
  static std::uint64_t finish(std::uint64_t x, int n) {
    return static_cast<std::uint64_t>(static_cast<std::int64_t>(x) / n);
  }
};

// --- the fold -----------------------------------------------------------------------------------

template <class E, class Op>
void fold(const void* const* in, int n, void* out, std::size_t count) {
  using Value = typename E::Value;
  if (n == 2) {
    const void* a = in[0];
    const void* b = in[1];
    LOCKSTEP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
      store<E>(out, i, Op::finish(Op::apply(load<E>(a, i), load<E>(b, i)), n));
    }
    return;
  }
  // Blocks whose folded values stay in L1, so that inputs and output are touched once.
  constexpr std::size_t kBlock = 2048 / sizeof(Value);
  alignas(64) Value folded[kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t length = count - begin < kBlock ? count - begin : kBlock;
    const void* a = in[0];
    const void* b = in[1];
    for (std::size_t i = 0; i < length; ++i) {
      folded[i] = Op::apply(load<E>(a, begin + i), load<E>(b, begin + i));
    }
    for (int r = 2; r < n - 1; ++r) {
      const void* next = in[r];
      for (std::size_t i = 0; i < length; ++i) {
        folded[i] = Op::apply(folded[i], load<E>(next, begin + i));
      }
    }
    const void* last = in[n - 1];
    LOCKSTEP_INDEPENDENT
    for (std::size_t i = 0; i < length; ++i) {
      store<E>(out, begin + i, Op::finish(Op::apply(folded[i], load<E>(last, begin + i)), n));
    }
  }
}

}  // namespace

// Rows in DType's order, columns in ReduceOp's.
#define LOCKSTEP_INTEGER_ROW(Signed, Unsigned)                                                     \
  {                                                                                                \
    fold<Wrapping<Signed, Unsigned>, Sum>, fold<Wrapping<Signed, Unsigned>, Product>,              \
        fold<Plain<Signed>, Min>, fold<Plain<Signed>, Max>, fold<Wrapping<Signed, Unsigned>, And>, \
        fold<Wrapping<Signed, Unsigned>, Or>, fold<Wrapping<Signed, Unsigned>, Xor>,               \
        fold<Summed<Signed>, Mean>                                                                 \
  }
#define LOCKSTEP_FLOATING_ROW(E)                                                           \
  {                                                                                        \
    fold<E, Sum>, fold<E, Product>, fold<E, Min>, fold<E, Max>, nullptr, nullptr, nullptr, \
        fold<E, Mean>                                                                      \
  }

const ReduceTable kReduceTable = {{
    LOCKSTEP_INTEGER_ROW(std::uint8_t, std::uint8_t),
    LOCKSTEP_INTEGER_ROW(std::int8_t, std::uint8_t),
    LOCKSTEP_INTEGER_ROW(std::int32_t, std::uint32_t),
    LOCKSTEP_INTEGER_ROW(std::int64_t, std::uint64_t),
    LOCKSTEP_FLOATING_ROW(Half16),
    LOCKSTEP_FLOATING_ROW(Brain16),
    LOCKSTEP_FLOATING_ROW(Plain<float>),
    LOCKSTEP_FLOATING_ROW(Plain<double>),
}};

#undef LOCKSTEP_INTEGER_ROW
#undef LOCKSTEP_FLOATING_ROW
#undef LOCKSTEP_INDEPENDENT

}  // namespace lockstep::kernels::LOCKSTEP_ISA
