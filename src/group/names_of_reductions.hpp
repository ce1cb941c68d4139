#pragma once

#include <lockstep/types.hpp>
#include <string>

namespace lockstep::internal {

/// "sum, product, ... or mean".
inline std::string names_of_reductions() {
  std::string names;
  for (const ReduceOpTraits& known : kReduceOps) {
    if (&known == &kReduceOps.back()) {
      names += " or ";
    } else if (&known != &kReduceOps.front()) {
      names += ", ";
    }
    names += known.name;
  }
  return names;
}

}  // namespace lockstep::internal
