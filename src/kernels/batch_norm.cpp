#include "kernels/batch_norm.hpp"

#include <algorithm>
#include <bit>

#include "kernels/batch_norm_isa.hpp"

namespace lockstep::kernels {

#if defined(__x86_64__)
#define LOCKSTEP_WIDER_TABLES(name)  \
  case Isa::avx2: return avx2::name; \
  case Isa::avx512:                  \
    return avx512::name;
#else
#define LOCKSTEP_WIDER_TABLES(name) \
  case Isa::avx2:                   \
  case Isa::avx512:                 \
    break;
#endif
#define LOCKSTEP_TABLE(T, name)                            \
  template <>                                              \
  const BatchNormTable<T>& batch_norm_table(Isa isa) {     \
    switch (isa) {                                         \
      case Isa::scalar: break; LOCKSTEP_WIDER_TABLES(name) \
    }                                                      \
    return scalar::name;                                   \
  }
LOCKSTEP_TABLE(float, kBatchNormFloat)
LOCKSTEP_TABLE(double, kBatchNormDouble)
LOCKSTEP_TABLE(Float16, kBatchNormFloat16)
LOCKSTEP_TABLE(BFloat16, kBatchNormBFloat16)
#undef LOCKSTEP_TABLE
#undef LOCKSTEP_WIDER_TABLES

namespace {

template <class T>
const BatchNormTable<T>& table() {
  static const BatchNormTable<T>& chosen = batch_norm_table<T>(chosen_isa());
  return chosen;
}

}  // namespace

template <class T>
void batch_norm_stats(const T* x, BatchNormShape shape, double* mean, double* m2) {
  table<T>().stats(x, shape, mean, m2);
}

template <class T>
void batch_norm_normalize(const T* x, BatchNormShape shape, const double* mean,
                          const double* invstd, const ParameterOf<T>* weight,
                          const ParameterOf<T>* bias, T* y, Stores stores) {
  table<T>().normalize(x, shape, mean, invstd, weight, bias, y, stores);
}

template <class T>
void batch_norm_backward_reduce(const T* dy, const T* x, BatchNormShape shape, const double* mean,
                                double* sum_dy, double* sum_dy_xmu) {
  table<T>().backward_reduce(dy, x, shape, mean, sum_dy, sum_dy_xmu);
}

template <class T>
void batch_norm_backward_elementwise(const T* dy, const T* x, BatchNormShape shape,
                                     const double* mean, const double* invstd,
                                     const ParameterOf<T>* weight, const double* mean_dy,
                                     const double* mean_dy_xmu, T* dx, Stores stores) {
  table<T>().backward_elementwise(dy, x, shape, mean, invstd, weight, mean_dy, mean_dy_xmu, dx,
                                  stores);
}

#define LOCKSTEP_INSTANTIATE(T)                                                                    \
  template void batch_norm_stats(const T*, BatchNormShape, double*, double*);                      \
  template void batch_norm_normalize(const T*, BatchNormShape, const double*, const double*,       \
                                     const ParameterOf<T>*, const ParameterOf<T>*, T*, Stores);    \
  template void batch_norm_backward_reduce(const T*, const T*, BatchNormShape, const double*,      \
                                           double*, double*);                                      \
  template void batch_norm_backward_elementwise(const T*, const T*, BatchNormShape, const double*, \
                                                const double*, const ParameterOf<T>*,              \
                                                const double*, const double*, T*, Stores);
LOCKSTEP_INSTANTIATE(float)
LOCKSTEP_INSTANTIATE(double)
LOCKSTEP_INSTANTIATE(Float16)
LOCKSTEP_INSTANTIATE(BFloat16)
#undef LOCKSTEP_INSTANTIATE

namespace {

#include "kernels/moments.inc"

/// Merges parts in the order of the tree (kernels/reduce.hpp), some channels at a time.
struct Tree {
  static constexpr std::size_t kChannels = 64;
  /// Of one part or of several: in their memory, or in that of the caller.
  struct Node {
    double count;
    const double* mean;
    const double* m2;
  };

  const double* count;
  const double* mean;
  const double* m2;
  std::size_t stride;
  std::size_t n_channels;

  Node over(int first, int n, double* into_mean, double* into_m2) const {
    if (n == 1) {
      const std::size_t at = static_cast<std::size_t>(first) * stride;
      return {count[first], mean + at, m2 + at};
    }
    double other_mean[kChannels], other_m2[kChannels];
    const int n_left = static_cast<int>(std::bit_floor(static_cast<unsigned>(n - 1)));
    const Node left = over(first, n_left, into_mean, into_m2);
    const Node right = over(first + n_left, n - n_left, other_mean, other_m2);
    if (right.count == 0) return left;
    if (left.count == 0) return copied(right, into_mean, into_m2);
    if (left.mean != into_mean) copied(left, into_mean, into_m2);
    const MergeMoments merge(left.count, right.count);
    for (std::size_t c = 0; c < n_channels; ++c) {
      merge(into_mean[c], into_m2[c], right.mean[c], right.m2[c]);
    }
    return {left.count + right.count, into_mean, into_m2};
  }
  Node copied(const Node& node, double* into_mean, double* into_m2) const {
    std::copy_n(node.mean, n_channels, into_mean);
    std::copy_n(node.m2, n_channels, into_m2);
    return {node.count, into_mean, into_m2};
  }
};

}  // namespace

void batch_norm_merge(int n_parts, const double* count, const double* mean, const double* m2,
                      std::size_t stride, std::size_t channels, double* out_mean, double* out_m2) {
  for (std::size_t c = 0; c < channels; c += Tree::kChannels) {
    const Tree tree{count, mean + c, m2 + c, stride, std::min(Tree::kChannels, channels - c)};
    const Tree::Node all = tree.over(0, n_parts, out_mean + c, out_m2 + c);
    if (all.count == 0) {
      std::fill_n(out_mean + c, tree.n_channels, 0);
      std::fill_n(out_m2 + c, tree.n_channels, 0);
    } else if (all.mean != out_mean + c) {
      tree.copied(all, out_mean + c, out_m2 + c);
    }
  }
}

}  // namespace lockstep::kernels
