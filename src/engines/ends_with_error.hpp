#pragma once

#include <lockstep/engine.hpp>
#include <lockstep/error.hpp>

namespace lockstep::engines {

/// An engine that can end its group, on every rank, with an error found elsewhere: with the same
/// type and text. Errors other than those of peers become PeerFailed.
class EndsWithError {
 public:
  virtual ~EndsWithError() = default;
  /// Threads: any, as Engine::abandon.
  virtual void end_with(const Error& error) noexcept = 0;
};

inline void end_with(Engine& engine, const Error& error) noexcept {
  if (auto* const ends = dynamic_cast<EndsWithError*>(&engine); ends != nullptr) {
    ends->end_with(error);
  } else {
    engine.abandon(error.text());
  }
}

}  // namespace lockstep::engines
