#pragma once

#include <cstddef>
#include <lockstep/types.hpp>
#include <type_traits>

namespace lockstep::kernels {

/// `inner` from which the values of a channel are taken run by run, and no longer row by row: from
/// there on a channel's results do not depend on which others are asked for.
inline constexpr std::size_t kLongRun = 16;

/// What weight and bias of an activation of T are, and what its values are calculated in.
template <class T>
using ParameterOf = std::conditional_t<sizeof(T) == 2, float, T>;

/// An activation seen as x[outer][channels][inner]: NCHW is (N, C, H*W); channels-last and (N, C)
/// are (N*H*W, C, 1). Every size may be 0.
struct BatchNormShape {
  std::size_t outer = 0;
  std::size_t channels = 0;
  std::size_t inner = 0;
  /// Channels between one x[n] and the next where these are some of an activation's; 0: `channels`.
  std::size_t channels_in_memory = 0;

  std::size_t n_per_channel() const { return outer * inner; }
};

/// mean[c] <- mean of the channel's values; m2[c] <- sum of their squared deviations from it.
/// One pass in blocks about the mean so far, merged (Chan, Golub, LeVeque 1979): with
/// mean/std = 1e4 the mean is rounded once and m2 has 13 digits. 0 for no values. A NaN or an
/// infinity leaves its channel's mean not finite and its m2 NaN, and no other channel's.
template <class T>
void batch_norm_stats(const T* x, BatchNormShape shape, double* mean, double* m2);

/// Merges the statistics of n_parts parts, in part order: part p has count[p] values and its
/// mean[p * stride + c], m2[p * stride + c]. Parts of count 0 are passed over.
void batch_norm_merge(int n_parts, const double* count, const double* mean, const double* m2,
                      std::size_t stride, std::size_t channels, double* out_mean, double* out_m2);

/// y = (x - mean[c]) * invstd[c] * weight[c] + bias[c]. weight null: 1; bias null: 0. y may be x.
/// In ParameterOf<T>, with the mean as two of them, so that float loses nothing where mean/std is
/// large.
template <class T>
void batch_norm_normalize(const T* x, BatchNormShape shape, const double* mean,
                          const double* invstd, const ParameterOf<T>* weight,
                          const ParameterOf<T>* bias, T* y);

/// sum_dy[c] <- sum dy; sum_dy_xmu[c] <- sum dy * (x - mean[c]).
template <class T>
void batch_norm_backward_reduce(const T* dy, const T* x, BatchNormShape shape, const double* mean,
                                double* sum_dy, double* sum_dy_xmu);

/// dx = (dy - mean_dy[c] - (x - mean[c]) * invstd[c]^2 * mean_dy_xmu[c]) * invstd[c] * weight[c],
/// the means being sums over all ranks divided by their count. dx may be dy.
template <class T>
void batch_norm_backward_elementwise(const T* dy, const T* x, BatchNormShape shape,
                                     const double* mean, const double* invstd,
                                     const ParameterOf<T>* weight, const double* mean_dy,
                                     const double* mean_dy_xmu, T* dx);

// T is float, double, Float16 or BFloat16. Same bits on every instruction set. Outputs may overlap
// inputs only where it says so. Threads: any number at once on different outputs; each call is
// serial.

}  // namespace lockstep::kernels
