#pragma once

#include <atomic>
#include <cstdint>

namespace lockstep::base {

/// Identifies the process that created it. A fork of a rank inherits the rank's objects but is not
/// a rank: it has only one thread, and peers would take its writes to shared memory and its
/// messages for the rank's. Costs one load and one comparison; no system call.
class ForkGuard {
 public:
  ForkGuard() noexcept;
  bool is_forked_child() const noexcept {
    return made_in_ != n_forks.load(std::memory_order_relaxed);
  }

 private:
  /// Number of forks between the process that created the first tag and this process.
  static std::atomic<std::uint32_t> n_forks;

  std::uint32_t made_in_;
};

}  // namespace lockstep::base
