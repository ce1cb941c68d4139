#pragma once

#include <atomic>
#include <cstdint>

namespace lockstep::base {

/// Remembers the process that made it. A fork of a rank inherits the rank's objects but is no rank:
/// it has no thread but one, and what it wrote into shared memory or sent would be taken for the
/// rank's. One load and one comparison; no system call.
class ProcessTag {
 public:
  ProcessTag() noexcept;
  bool is_copy() const noexcept { return made_in_ != n_forks.load(std::memory_order_relaxed); }

 private:
  /// How many forks lie between this process and the one that made the first tag.
  static std::atomic<std::uint32_t> n_forks;

  std::uint32_t made_in_;
};

}  // namespace lockstep::base
