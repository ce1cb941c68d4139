#pragma once

#include <exception>
#include <lockstep/engine.hpp>

#include "base/exception.hpp"

namespace lockstep::internal {

/// For work between an engine's first call and the caller's own first one, which may fail on this
/// rank only: the peers, which may wait for its next call, get the exception's text as PeerFailed.
template <class Body>
auto leave_on_exception(Engine& engine, const Body& body) {
  try {
    return body();
  } catch (...) {
    engine.leave(base::text_of(std::current_exception()));
    throw;
  }
}

}  // namespace lockstep::internal
