#pragma once

#include <vector>

#include "kernels/isa.hpp"

namespace lockstep::kernels {

/// Those that this machine has.
inline std::vector<Isa> supported_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    if (is_supported(isa)) isas.push_back(isa);
  }
  return isas;
}

}  // namespace lockstep::kernels
