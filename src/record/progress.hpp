#pragma once

#include <lockstep/engine.hpp>

namespace lockstep::internal {

/// Where an engine reports how far a call is, for the flight recorder.
class Progress {
 public:
  /// This rank's part has been sent to the peers. May be called again.
  virtual void arrived(const Call& call) = 0;
  /// The call waits longer than the thread polls: from now on it may yield or sleep. May be called
  /// again.
  virtual void slept(const Call& call) = 0;

 protected:
  ~Progress() = default;
};

}  // namespace lockstep::internal
