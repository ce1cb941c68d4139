#pragma once

#include <cstddef>

#include "kernels/batch_norm.hpp"
#include "kernels/isa.hpp"

namespace lockstep::kernels {

/// The functions of batch_norm.hpp for one instruction set.
template <class T>
struct BatchNormTable {
  void (*stats)(const T*, BatchNormShape, double*, double*);
  void (*normalize)(const T*, BatchNormShape, const double*, const double*, const ParameterOf<T>*,
                    const ParameterOf<T>*, T*, Stores);
  void (*backward_reduce)(const T*, const T*, BatchNormShape, const double*, double*, double*);
  void (*backward_elementwise)(const T*, const T*, BatchNormShape, const double*, const double*,
                               const ParameterOf<T>*, const double*, const double*, T*, Stores);
};

#define LOCKSTEP_DECLARE(isa)                               \
  namespace isa {                                           \
  extern const BatchNormTable<float> kBatchNormFloat;       \
  extern const BatchNormTable<double> kBatchNormDouble;     \
  extern const BatchNormTable<Float16> kBatchNormFloat16;   \
  extern const BatchNormTable<BFloat16> kBatchNormBFloat16; \
  }
LOCKSTEP_DECLARE(scalar)
LOCKSTEP_DECLARE(avx2)
LOCKSTEP_DECLARE(avx512)
#undef LOCKSTEP_DECLARE

/// `isa` must be supported.
template <class T>
const BatchNormTable<T>& batch_norm_table(Isa isa);

}  // namespace lockstep::kernels
