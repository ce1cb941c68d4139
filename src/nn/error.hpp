#pragma once

#include <source_location>
#include <string>

#include <lockstep/error.hpp>
#include <lockstep/group.hpp>

namespace lockstep::nn {

inline ErrorContext context_of(std::string operation, const Group& group,
                               std::source_location where) {
  return {std::move(operation), group.name(), group.rank(), /*sequence=*/0, where};
}

}  // namespace lockstep::nn
