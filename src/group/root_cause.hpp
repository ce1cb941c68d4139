#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <lockstep/error.hpp>
#include <span>

namespace lockstep::internal {

/// Whether an error only reports the failure of another rank. A PeerFailed with a nested exception
/// does not: it is the caller's report of its own failed replica.
inline bool is_of_peer(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::nested_exception&) {
    return false;
  } catch (const PeerFailed&) {
    return true;
  } catch (const PeerLost&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// Whether all ranks throw it, or have it from their group: an Error other than UsageError.
inline bool is_collective_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const UsageError&) {
    return false;
  } catch (const Error&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// The index of the first error that reports a failure of its own rank, otherwise of the first
/// error; errors.size() if all are null.
inline std::size_t root_cause_of(std::span<const std::exception_ptr> errors) {
  auto found = std::ranges::find_if(errors, [](const auto& e) { return e && !is_of_peer(e); });
  if (found == errors.end()) {
    found = std::ranges::find_if(errors, [](const auto& e) { return e != nullptr; });
  }
  return static_cast<std::size_t>(found - errors.begin());
}

}  // namespace lockstep::internal
