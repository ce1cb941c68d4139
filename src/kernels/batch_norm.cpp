#include "kernels/batch_norm.hpp"

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

void batch_norm_merge(int n_parts, const double* count, const double* mean, const double* m2,
                      std::size_t stride, std::size_t channels, double* out_mean, double* out_m2) {
  // Until the end out_mean holds the mean's distance from that of the first part: the distance is
  // small, so the mean is rounded only once.
  const double* base = nullptr;
  double total = 0;
  for (std::size_t c = 0; c < channels; ++c) out_mean[c] = out_m2[c] = 0;
  for (int p = 0; p < n_parts; ++p) {
    if (count[p] == 0) continue;
    const double* part_mean = mean + static_cast<std::size_t>(p) * stride;
    const double* part_m2 = m2 + static_cast<std::size_t>(p) * stride;
    if (base == nullptr) base = part_mean;
    const double share = count[p] / (total + count[p]);
    const double spread = total * share;
    total += count[p];
    for (std::size_t c = 0; c < channels; ++c) {
      const double delta = (part_mean[c] - base[c]) - out_mean[c];
      out_mean[c] += delta * share;
      out_m2[c] += part_m2[c] + delta * delta * spread;
    }
  }
  if (base == nullptr) return;
  for (std::size_t c = 0; c < channels; ++c) out_mean[c] += base[c];
}

}  // namespace lockstep::kernels
