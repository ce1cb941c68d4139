// The one body of reduce(), included once per instruction set with LOCKSTEP_ISA naming its
// namespace. Everything here has internal linkage, and no inline function from elsewhere is called:
// the linker could otherwise keep a copy that holds instructions the CPU does not have.
//
// Elements are folded a few registers at a time, over all inputs, before the next few: values stay
// in registers, inputs and output are touched once. What remains at the end goes through the same
// code as vectors of one lane.

#include <cstddef>
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
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

template <class T, int kLanes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kLanes * sizeof(T))));
};
template <class T, int kLanes>
using Vector = typename VectorOf<T, kLanes>::Type;

// --- elements: how they lie in memory (Storage), and what they are folded in (Value) ------------

template <class T>
struct Plain {
  using Storage = T;
  using Value = T;
  template <int kLanes>
  LOCKSTEP_INLINE Vector<T, kLanes> widen(Vector<T, kLanes> x) {
    return x;
  }
  template <int kLanes>
  LOCKSTEP_INLINE Vector<T, kLanes> narrow(Vector<T, kLanes> x) {
    return x;
  }
};

/// The sum of a mean of integers. A double holds it exactly up to 2^53, that is for 2^21 inputs;
/// and below 2^53 the rounded quotient truncates as the exact one does.
template <class T>
struct SummedInDouble {
  using Storage = T;
  using Value = double;
  template <int kLanes>
  LOCKSTEP_INLINE Vector<double, kLanes> widen(Vector<T, kLanes> x) {
    return __builtin_convertvector(__builtin_convertvector(x, Vector<std::int32_t, kLanes>),
                                   Vector<double, kLanes>);
  }
  template <int kLanes>
  LOCKSTEP_INLINE Vector<T, kLanes> narrow(Vector<double, kLanes> x) {
    return __builtin_convertvector(__builtin_convertvector(x, Vector<std::int32_t, kLanes>),
                                   Vector<T, kLanes>);
  }
};

// The conversions of the 16-bit floats are those of types.hpp, without branches.

template <int kLanes>
LOCKSTEP_INLINE Vector<std::uint32_t, kLanes> words_of(Vector<std::uint16_t, kLanes> x) {
// By name: GCC 12 makes three instructions of __builtin_convertvector here. And masked: it warns
// of the other forms, whose unused operand is undefined.
#if defined(__AVX512F__)
  if constexpr (kLanes == 16) {
    return (Vector<std::uint32_t, 16>)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x);
  }
#elif defined(__AVX2__)
  if constexpr (kLanes == 8) return (Vector<std::uint32_t, 8>)_mm256_cvtepu16_epi32((__m128i)x);
#endif
  return __builtin_convertvector(x, Vector<std::uint32_t, kLanes>);
}

/// The lower halves.
template <int kLanes>
LOCKSTEP_INLINE Vector<std::uint16_t, kLanes> halves_of(Vector<std::uint32_t, kLanes> x) {
#if defined(__AVX512F__)
  if constexpr (kLanes == 16) {
    return (Vector<std::uint16_t, 16>)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)x);
  }
#elif defined(__AVX2__)
  if constexpr (kLanes == 8) {
    const __m256i wide = (__m256i)(x & 0xffffU);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(wide, wide), 0x08);
    return (Vector<std::uint16_t, 8>)_mm256_castsi256_si128(packed);
  }
#endif
  return __builtin_convertvector(x, Vector<std::uint16_t, kLanes>);
}

struct Brain16 {
  using Storage = std::uint16_t;
  using Value = float;
  template <int kLanes>
  LOCKSTEP_INLINE Vector<float, kLanes> widen(Vector<std::uint16_t, kLanes> x) {
    return (Vector<float, kLanes>)(words_of<kLanes>(x) << 16);
  }
  template <int kLanes>
  LOCKSTEP_INLINE Vector<std::uint16_t, kLanes> narrow(Vector<float, kLanes> x) {
    using Words = Vector<std::uint32_t, kLanes>;
    const Words word = (Words)x;
    const Words rounded = (word + 0x7fffU + ((word >> 16) & 1U)) >> 16;
    const Words nan = (word >> 16) | 0x40U;
    return halves_of<kLanes>(x == x ? rounded : nan);
  }
};

struct Half16 {
  using Storage = std::uint16_t;
  using Value = float;

  template <int kLanes>
  LOCKSTEP_INLINE Vector<float, kLanes> widen(Vector<std::uint16_t, kLanes> x) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) return (Vector<float, 16>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
#elif defined(__F16C__)
    if constexpr (kLanes == 8) return (Vector<float, 8>)_mm256_cvtph_ps((__m128i)x);
#endif
    using Ints = Vector<std::int32_t, kLanes>;
    using Floats = Vector<float, kLanes>;
    const Ints word = (Ints)words_of<kLanes>(x);
    const Ints magnitude = word & 0x7fff;
    const Ints normal = (magnitude << 13) + 0x38000000;
    const Ints special = (magnitude << 13) | 0x7f800000;
    const Ints subnormal = (Ints)(__builtin_convertvector(magnitude, Floats) * 0x1p-24F);
    const Ints finite = magnitude < 0x400 ? subnormal : normal;
    const Ints sign = (Ints)(words_of<kLanes>(x) >> 15 << 31);
    return (Floats)((magnitude < 0x7c00 ? finite : special) | sign);
  }

  template <int kLanes>
  LOCKSTEP_INLINE Vector<std::uint16_t, kLanes> narrow(Vector<float, kLanes> x) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) {
      return (Vector<std::uint16_t, 16>)_mm512_maskz_cvtps_ph(0xffff, (__m512)x,
                                                              _MM_FROUND_TO_NEAREST_INT);
    }
#elif defined(__F16C__)
    if constexpr (kLanes == 8) {
      return (Vector<std::uint16_t, 8>)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
    }
#endif
    using Ints = Vector<std::int32_t, kLanes>;
    using Floats = Vector<float, kLanes>;
    const Ints word = (Ints)x;
    const Ints magnitude = word & 0x7fffffff;
    const Ints normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // 0.5's last bit weighs what f16's least subnormal does: the sum rounds in the right place.
    const Ints subnormal = (Ints)((Floats)magnitude + 0.5F) - 0x3f000000;
    const Ints nan = ((magnitude >> 13) & 0x1ff) | 0x7e00;
    const Ints finite = magnitude < 0x38800000 ? subnormal : normal;
    const Ints number = magnitude < 0x477ff000 ? finite : Ints{} + 0x7c00;
    const Ints sign = (word >> 16) & 0x8000;
    return halves_of<kLanes>((Vector<std::uint32_t, kLanes>)((x == x ? number : nan) | sign));
  }
};

// --- operations on vectors ----------------------------------------------------------------------

/// Most operations leave the folded value as it is.
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

// A NaN in `a` stays, for it came first; one in `b` is neither <= nor >=, and is taken.
struct Min : NoFinish {
  template <class V>
  LOCKSTEP_INLINE V apply(V a, V b) {
    return ((a <= b) | (a != a)) ? a : b;
  }
};

struct Max : NoFinish {
  template <class V>
  LOCKSTEP_INLINE V apply(V a, V b) {
    return ((a >= b) | (a != a)) ? a : b;
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

/// Summed as unsigned, where wrapping is defined.
struct MeanOfInt64 : Sum {
  template <class V>
  LOCKSTEP_INLINE V finish(V x, int n) {
    V quotient;
    std::uint64_t lane[sizeof(V) / sizeof(std::uint64_t)];
    __builtin_memcpy(lane, &x, sizeof(V));
    for (std::uint64_t& value : lane) {
      value = static_cast<std::uint64_t>(static_cast<std::int64_t>(value) / n);
    }
    __builtin_memcpy(&quotient, lane, sizeof(V));
    return quotient;
  }
};

// --- the fold -----------------------------------------------------------------------------------

struct Call {
  const void* const* in;
  int n;
  void* out;
  std::size_t count;
};

/// Folds kRegisters vectors of kLanes at a time, from element `at` on while they fit; returns
/// where the rest begins. kN: the number of inputs where known, else 0.
template <class E, class Op, int kLanes, int kRegisters, int kN>
LOCKSTEP_INLINE std::size_t fold_while_fits(const Call& call, std::size_t at) {
  using Storage = typename E::Storage;
  using Stored = Vector<Storage, kLanes>;
  using Values = Vector<typename E::Value, kLanes>;
  const int n = kN != 0 ? kN : call.n;
  char* out = static_cast<char*>(call.out);
  for (; call.count - at >= kLanes * kRegisters; at += kLanes * kRegisters) {
    Values folded[kRegisters];
    const char* first = static_cast<const char*>(call.in[0]) + at * sizeof(Storage);
    LOCKSTEP_UNROLL
    for (int k = 0; k < kRegisters; ++k) {
      Stored stored;
      __builtin_memcpy(&stored, first + static_cast<std::size_t>(k) * sizeof(Stored),
                       sizeof(Stored));
      folded[k] = E::template widen<kLanes>(stored);
    }
    for (int r = 1; r < n; ++r) {
      const char* next = static_cast<const char*>(call.in[r]) + at * sizeof(Storage);
      LOCKSTEP_UNROLL
      for (int k = 0; k < kRegisters; ++k) {
        Stored stored;
        __builtin_memcpy(&stored, next + static_cast<std::size_t>(k) * sizeof(Stored),
                         sizeof(Stored));
        folded[k] = Op::template apply<Values>(folded[k], E::template widen<kLanes>(stored));
      }
    }
    LOCKSTEP_UNROLL
    for (int k = 0; k < kRegisters; ++k) {
      const Stored stored = E::template narrow<kLanes>(Op::template finish<Values>(folded[k], n));
      __builtin_memcpy(out + at * sizeof(Storage) + static_cast<std::size_t>(k) * sizeof(Stored),
                       &stored, sizeof(Stored));
    }
  }
  return at;
}

template <class E, class Op, int kN>
LOCKSTEP_INLINE void fold_n(const Call& call) {
  constexpr int kLanes = kRegisterBytes / static_cast<int>(sizeof(typename E::Value));
  std::size_t at = fold_while_fits<E, Op, kLanes, 4, kN>(call, 0);
  at = fold_while_fits<E, Op, kLanes, 1, kN>(call, at);
  fold_while_fits<E, Op, 1, 1, kN>(call, at);
}

template <class E, class Op>
void fold(const void* const* in, int n, void* out, std::size_t count) {
  const Call call{in, n, out, count};
  if (n == 2) {
    fold_n<E, Op, 2>(call);
  } else {
    fold_n<E, Op, 0>(call);
  }
}

}  // namespace

// Rows in DType's order, columns in ReduceOp's. Sums and products of integers fold as unsigned,
// where wrapping is defined.
#define LOCKSTEP_INTEGER_ROW(Signed, Unsigned, MeanElement, MeanOp)                       \
  {                                                                                       \
    fold<Plain<Unsigned>, Sum>, fold<Plain<Unsigned>, Product>, fold<Plain<Signed>, Min>, \
        fold<Plain<Signed>, Max>, fold<Plain<Unsigned>, And>, fold<Plain<Unsigned>, Or>,  \
        fold<Plain<Unsigned>, Xor>, fold<MeanElement, MeanOp>                             \
  }
#define LOCKSTEP_FLOATING_ROW(E, T)                                                        \
  {                                                                                        \
    fold<E, Sum>, fold<E, Product>, fold<E, Min>, fold<E, Max>, nullptr, nullptr, nullptr, \
        fold<E, Mean<T>>                                                                   \
  }

const ReduceTable kReduceTable = {{
    LOCKSTEP_INTEGER_ROW(std::uint8_t, std::uint8_t, SummedInDouble<std::uint8_t>, Mean<double>),
    LOCKSTEP_INTEGER_ROW(std::int8_t, std::uint8_t, SummedInDouble<std::int8_t>, Mean<double>),
    LOCKSTEP_INTEGER_ROW(std::int32_t, std::uint32_t, SummedInDouble<std::int32_t>, Mean<double>),
    LOCKSTEP_INTEGER_ROW(std::int64_t, std::uint64_t, Plain<std::uint64_t>, MeanOfInt64),
    LOCKSTEP_FLOATING_ROW(Half16, float),
    LOCKSTEP_FLOATING_ROW(Brain16, float),
    LOCKSTEP_FLOATING_ROW(Plain<float>, float),
    LOCKSTEP_FLOATING_ROW(Plain<double>, double),
}};

#undef LOCKSTEP_INTEGER_ROW
#undef LOCKSTEP_FLOATING_ROW
#undef LOCKSTEP_UNROLL
#undef LOCKSTEP_INLINE

}  // namespace lockstep::kernels::LOCKSTEP_ISA
