#pragma once

#include <cstddef>
#include <lockstep/types.hpp>
#include <type_traits>

namespace lockstep::kernels {

/// From this `inner` on, a channel's values are processed in runs instead of row by row, and its
/// results do not depend on which other channels are requested. Not below the values that kernels
/// process together.
inline constexpr std::size_t kLongRun = 32;

/// Type of weight and bias for an activation of T, and of the calculation.
template <class T>
using ParameterOf = std::conditional_t<sizeof(T) == 2, float, T>;

/// How an output is written. `streaming` bypasses the caches: for an activation that would not stay
/// in them anyway until its next use.
enum class Stores { cached, streaming };

/// An activation seen as x[outer][channels][inner]: NCHW is (N, C, H*W); channels-last and (N, C)
/// are (N*H*W, C, 1). Every size may be 0.
struct BatchNormShape {
  std::size_t outer = 0;
  std::size_t channels = 0;
  std::size_t inner = 0;
  /// Channels between x[n] and x[n + 1] if these are a subset of an activation's; 0: `channels`.
  std::size_t channels_in_memory = 0;

  std::size_t n_per_channel() const { return outer * inner; }
};

/// mean[c] <- mean of the channel's values; m2[c] <- sum of their squared deviations from it.
/// One pass in blocks around the mean so far, merged in double (Chan, Golub, LeVeque 1979). double:
/// for mean/std = 1e4 the mean is rounded once and m2 has 13 digits. Other types, whose blocks are
/// summed in float: the mean is right to 1e-6 of the deviation and m2 to 2e-6, up to mean/std =
/// 1e6; the square of a deviation must not exceed float's range. 0 for no values. A NaN or an
/// infinity makes only its own channel's mean non-finite and m2 NaN.
template <class T>
void batch_norm_stats(const T* x, BatchNormShape shape, double* mean, double* m2);

/// Merges the statistics of n_parts parts, in the order of the tree over parts (reduce.hpp): part p
/// has count[p] values and its mean[p * stride + c], m2[p * stride + c]. Parts of count 0 count as
/// absent. 0 if all are.
void batch_norm_merge(int n_parts, const double* count, const double* mean, const double* m2,
                      std::size_t stride, std::size_t channels, double* out_mean, double* out_m2);

/// y = (x - mean[c]) * invstd[c] * weight[c] + bias[c]. weight null: 1; bias null: 0. y may be x.
/// Computed in ParameterOf<T>, with the mean split into two of them, so that float keeps its
/// precision even if mean/std is large.
template <class T>
void batch_norm_normalize(const T* x, BatchNormShape shape, const double* mean,
                          const double* invstd, const ParameterOf<T>* weight,
                          const ParameterOf<T>* bias, T* y, Stores stores = Stores::cached);

/// sum_dy[c] <- sum dy; sum_dy_xmu[c] <- sum dy * (x - mean[c]). Unless T is double, blocks are
/// summed in float, with the mean split into two: right to 1e-6 of the sum of the magnitudes.
template <class T>
void batch_norm_backward_reduce(const T* dy, const T* x, BatchNormShape shape, const double* mean,
                                double* sum_dy, double* sum_dy_xmu);

/// dx = (dy - mean_dy[c] - (x - mean[c]) * invstd[c]^2 * mean_dy_xmu[c]) * invstd[c] * weight[c],
/// the means being sums over all ranks divided by their count. dx may be dy.
template <class T>
void batch_norm_backward_elementwise(const T* dy, const T* x, BatchNormShape shape,
                                     const double* mean, const double* invstd,
                                     const ParameterOf<T>* weight, const double* mean_dy,
                                     const double* mean_dy_xmu, T* dx,
                                     Stores stores = Stores::cached);

// T is float, double, Float16 or BFloat16. Bitwise equal on every instruction set. Outputs may
// overlap inputs only if stated. Threads: any number at once on different outputs; each call is
// serial.

}  // namespace lockstep::kernels
