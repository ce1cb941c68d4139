#pragma once

#include <atomic>
#include <exception>
#include <source_location>
#include <string>
#include <utility>

#include <lockstep/error.hpp>
#include <lockstep/group.hpp>

#include "group/no_rank_text.hpp"

namespace lockstep::nn {

inline ErrorContext context_of(std::string operation, const Group& group,
                               std::source_location where) {
  return {std::move(operation), group.name(), group.rank(), /*sequence=*/0, where};
}

/// Why the group has no such rank; empty if it has.
inline std::string why_no_rank(const char* parameter, int rank, const Group& group) {
  if (rank >= 0 && rank < group.size()) return {};
  return internal::no_rank_text(parameter, rank, group.size());
}

namespace detail {

/// Converts a lockstep::Error that will propagate through libtorch's C++ (autograd, a future) into
/// an exception for which torch raises the right Python class: for those that it does not know it
/// raises RuntimeError. Set by the Python package; null: none.
using ErrorForTorch = std::exception_ptr (*)(std::exception_ptr thrown);
inline constinit std::atomic<ErrorForTorch> error_converter{nullptr};

inline std::exception_ptr error_for_torch(std::exception_ptr thrown) {
  const ErrorForTorch convert = error_converter;
  return convert == nullptr ? thrown : convert(std::move(thrown));
}

/// Runs the body of an operator or backward that torch calls.
template <class F>
auto translate_errors_for_torch(const F& f) {
  try {
    return f();
  } catch (const Error&) {
    std::rethrow_exception(error_for_torch(std::current_exception()));
  }
}

}  // namespace detail
}  // namespace lockstep::nn
