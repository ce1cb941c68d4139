#include "engines/shared/job.hpp"

#include <fmt/format.h>

#include "engines/shared/world.hpp"

namespace lockstep::shared {

Job::Job(int n_ranks) : segment_(make_world(Segment::for_processes(n_ranks))) {}

Job::~Job() = default;

int Job::fd() const noexcept { return segment_->fd(); }

std::string Job::environment() const {
  return fmt::format("{}:{:016x}", segment_->fd(), segment_->header().nonce);
}

void Job::rank_ended(int rank, int wait_status) noexcept {
  segment_->rank(rank).wait_status_plus_one.store(wait_status + 1, std::memory_order_release);
}

}  // namespace lockstep::shared
