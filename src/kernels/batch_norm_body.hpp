// The body of batch_norm.hpp, included once per instruction set with LOCKSTEP_ISA naming its
// namespace. As in reduce_body.hpp: internal linkage, no calls to external inline functions.
//
// Two traversals of x[outer][channels][inner]:
// - runs, for inner >= kLongRun: along the runs of `inner` values of a few adjacent channels, with
//   sums in kLanes lanes, independent of the register width.
// - rows, for shorter inner: positions of a row side by side, each with its own sums. k short rows
//   are treated as one; several positions then belong to one channel.
// Both give bitwise equal results on every instruction set.
//
// Statistics are sums of d and d^2 with d = x - pivot, in the type of the calculation (double for
// double, else float), over blocks. The pivot is the mean so far (at first, of a few values: a
// single value may be an outlier), so the sums of a block lose nothing to cancellation; a float
// adds at most 256 values. Blocks are merged in double as in Chan, Golub, LeVeque 1979. The mean is
// kept as its offset from the channel's first value and rounded once, at the end.

#include <cstddef>
#include <cstdint>
#include <lockstep/types.hpp>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels/batch_norm_isa.hpp"

#if defined(__clang__)
#define LOCKSTEP_UNROLL _Pragma("unroll")
#else
#define LOCKSTEP_UNROLL _Pragma("GCC unroll 16")
#endif

#define LOCKSTEP_INLINE [[gnu::always_inline]] static inline
// For lambdas: a call would cost more than the few vector instructions in it.
#define LOCKSTEP_INLINE_LAMBDA __attribute__((always_inline))

namespace lockstep::kernels::LOCKSTEP_ISA {
namespace {

using Index = std::size_t;
using Offset = std::ptrdiff_t;  // between elements, either way

constexpr Index kRunBlock = 4096;        // values between two merges
constexpr Index kRunTile = 64;           // channels per tile, at most: their lanes stay in L1
constexpr Index kRunTileValues = 65536;  // adjacent values per tile: few jumps between pages
constexpr Index kRowBlock = 128;         // rows between two merges
constexpr Index kRowStart = 8;           // rows for the first estimate of the mean
constexpr Index kWidth = 512;            // positions per tile: their sums stay in L1

constexpr Index min_of(Index a, Index b) { return a < b ? a : b; }
constexpr Index max_of(Index a, Index b) { return a > b ? a : b; }

/// Values from one x[n] to the next.
Index stride_of(BatchNormShape shape) {
  return (shape.channels_in_memory == 0 ? shape.channels : shape.channels_in_memory) * shape.inner;
}

template <class T>
T finite_or_zero(T x) {
  return x - x == 0 ? x : 0;
}
double not_negative(double x) { return x < 0 ? 0 : x; }  // preserves a NaN

struct TwoSums {
  double first = 0;
  double second = 0;
};

#include "kernels/floats.inc"
#include "kernels/moments.inc"

#include "kernels/batch_norm_formulas.inc"
#include "kernels/batch_norm_vectors.inc"

#include "kernels/batch_norm_rows.inc"
#include "kernels/batch_norm_runs.inc"

/// A channel with contiguous values is one run.
BatchNormShape simplified(BatchNormShape shape) {
  if (stride_of(shape) == shape.inner) return {1, 1, shape.outer * shape.inner};
  return shape;
}

template <class T>
void stats(const T* x, BatchNormShape shape, double* mean, double* m2) {
  if (shape.outer * shape.inner == 0) {
    for (Index c = 0; c < shape.channels; ++c) mean[c] = m2[c] = 0;
    return;
  }
  shape = simplified(shape);
  shape.inner >= kLongRun ? stats_runs(x, shape, mean, m2) : stats_rows(x, shape, mean, m2);
}

template <class T>
void backward_reduce(const T* dy, const T* x, BatchNormShape shape, const double* mean,
                     double* sum_dy, double* sum_dy_xmu) {
  if (shape.outer * shape.inner == 0) {
    for (Index c = 0; c < shape.channels; ++c) sum_dy[c] = sum_dy_xmu[c] = 0;
    return;
  }
  shape = simplified(shape);
  shape.inner >= kLongRun ? backward_reduce_runs(dy, x, shape, mean, sum_dy, sum_dy_xmu)
                          : backward_reduce_rows(dy, x, shape, mean, sum_dy, sum_dy_xmu);
}

/// Whether each stretch of the output that is written at once, a run or a tile's part of a row,
/// begins a cache line, as streaming stores require. A stretch that also ends with a line is not
/// written with both kinds of stores, which is slow.
template <class T>
bool can_stream(BatchNormShape shape, const T* out) {
  const auto is_whole_lines = [](Index n) { return n * sizeof(T) % kLineBytes == 0; };
  const Index most = shape.inner >= kLongRun ? 1 : channels_of_tile(shape);
  return (shape.channels <= most || is_whole_lines(most * shape.inner)) &&
         (shape.outer == 1 || is_whole_lines(stride_of(shape))) &&
         reinterpret_cast<std::uintptr_t>(out) % kLineBytes == 0;
}

template <class T, class F>
void elementwise(const T* x, const T* dy, BatchNormShape shape, const F& f, T* out, Stores stores) {
  if (shape.outer * shape.inner == 0) return;
  shape = simplified(shape);
  if (!can_stream(shape, out)) stores = Stores::cached;
  shape.inner >= kLongRun ? elementwise_runs(x, dy, shape, f, out, stores)
                          : elementwise_rows(x, dy, shape, f, out, stores);
  if (stores == Stores::streaming) order_streamed();
}

template <class T>
void normalize(const T* x, BatchNormShape shape, const double* mean, const double* invstd,
               const ValueOf<T>* weight, const ValueOf<T>* bias, T* y, Stores stores) {
  elementwise(x, /*dy=*/x, shape, Normalize<ValueOf<T>>{mean, invstd, weight, bias}, y, stores);
}

template <class T>
void backward_elementwise(const T* dy, const T* x, BatchNormShape shape, const double* mean,
                          const double* invstd, const ValueOf<T>* weight, const double* mean_dy,
                          const double* mean_dy_xmu, T* dx, Stores stores) {
  const BackwardElementwise<ValueOf<T>> f{mean, invstd, weight, mean_dy, mean_dy_xmu};
  elementwise(x, dy, shape, f, dx, stores);
}

}  // namespace

#define LOCKSTEP_TABLE(T) \
  { stats<T>, normalize<T>, backward_reduce<T>, backward_elementwise<T> }
const BatchNormTable<float> kBatchNormFloat = LOCKSTEP_TABLE(float);
const BatchNormTable<double> kBatchNormDouble = LOCKSTEP_TABLE(double);
const BatchNormTable<Float16> kBatchNormFloat16 = LOCKSTEP_TABLE(Float16);
const BatchNormTable<BFloat16> kBatchNormBFloat16 = LOCKSTEP_TABLE(BFloat16);
#undef LOCKSTEP_TABLE

#undef LOCKSTEP_UNROLL
#undef LOCKSTEP_INLINE
#undef LOCKSTEP_INLINE_LAMBDA

}  // namespace lockstep::kernels::LOCKSTEP_ISA
