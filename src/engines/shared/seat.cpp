#include "engines/shared/seat.hpp"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <lockstep/error.hpp>
#include <span>
#include <thread>

#include "base/membarrier.hpp"
#include "base/process.hpp"
#include "base/text.hpp"
#include "base/ticks.hpp"

namespace lockstep::shared {
std::string describe_wait_status(int status) {
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    const char* name = ::sigabbrev_np(signal);
    return fmt::format("was killed by signal {} (SIG{})", signal, name != nullptr ? name : "?");
  }
  return fmt::format("left the program with exit code {}", WEXITSTATUS(status));
}

void mark_ended(RankBlock& block, std::string_view failure) noexcept {
  if (!failure.empty()) base::copy_text(block.failure, failure);
  // Release: a peer that sees the state sees the text, and all that the rank published before.
  block.state.store(failure.empty() ? RankState::left : RankState::failed,
                    std::memory_order_release);
}

Seat::Seat(std::shared_ptr<Segment> segment, int world_rank)
    : segment_(std::move(segment)), world_rank_(world_rank), pid_(::getpid()) {
  RankBlock& mine = block(world_rank_);
  std::int32_t nobody = 0;
  if (!mine.pid.compare_exchange_strong(nobody, pid_)) {
    throw UsageError({.operation = "init_dist"},
                     fmt::format("rank {} is taken by process {}; each rank joins once, and a "
                                 "program started by a rank is no rank (unset LOCKSTEP_SEGMENT)",
                                 world_rank_, nobody));
  }
  mine.start_time.store(base::process_start_time(pid_), std::memory_order_relaxed);
  mine.cpu_quota.store(base::cpu_quota(), std::memory_order_relaxed);
  const base::CpuMask mask = base::allowed_cpus();
  for (std::size_t i = 0; i < mask.size(); ++i) {
    mine.cpus[i].store(mask[i], std::memory_order_relaxed);
  }
  mine.takes_fences.store(base::register_for_fences(), std::memory_order_relaxed);
  recorder_ =
      std::make_shared<comm::Recorder>(std::shared_ptr<comm::FlightRecord>(segment_, &mine.flight));
  // Release: who sees this rank alive sees its pid and cores too.
  mine.state.store(RankState::alive, std::memory_order_release);
}

Seat::~Seat() { leave({}); }

void Seat::leave(std::string_view failure) noexcept {
  // A fork of this process inherits the object but is not the rank.
  if (left_ || ::getpid() != pid_) return;
  left_ = true;
  mark_ended(block(world_rank_), failure);
}

std::optional<Ending> Seat::ending_of(int world_rank, bool look_closely) const {
  const RankBlock& peer = block(world_rank);
  // Acquire: see the text of a failure, and everything published before leaving.
  const RankState state = peer.state.load(std::memory_order_acquire);
  if (state == RankState::failed) {
    return Ending{.failed = true, .text = std::string(base::text_in(peer.failure))};
  }
  const int status = peer.wait_status_plus_one.load(std::memory_order_acquire);
  if (state == RankState::left || status != 0) {
    std::string text = state == RankState::left ? "left the world (destroy_dist, or its end)" : "";
    if (status != 0) text += (text.empty() ? "" : " and ") + describe_wait_status(status - 1);
    return Ending{.failed = false, .text = text};
  }
  if (state != RankState::alive || !look_closely || segment_->fd() < 0) return std::nullopt;

  const pid_t pid = peer.pid.load(std::memory_order_relaxed);
  const auto start_time = peer.start_time.load(std::memory_order_relaxed);
  if (base::process_state(pid, start_time) != base::ProcessState::dead) return std::nullopt;
  // A launcher knows the signal or the code as soon as it has reaped the process.
  for (int i = 0; i < 25; ++i) {
    if (peer.wait_status_plus_one.load(std::memory_order_acquire) != 0 ||
        peer.state.load(std::memory_order_acquire) != RankState::alive) {
      return ending_of(world_rank, /*look_closely=*/false);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return Ending{.failed = false, .text = fmt::format("died (its process {} is gone)", pid)};
}

bool Seat::is_stopped(int world_rank) const {
  if (segment_->fd() < 0) return false;  // threads
  const RankBlock& peer = block(world_rank);
  return base::process_state(peer.pid.load(std::memory_order_relaxed),
                             peer.start_time.load(std::memory_order_relaxed)) ==
         base::ProcessState::stopped;
}

std::string Seat::condition_of(int world_rank) const {
  const RankBlock& peer = block(world_rank);
  if (peer.state.load(std::memory_order_acquire) == RankState::absent) {
    return "has not joined the world yet (init_dist)";
  }
  if (segment_->fd() < 0) return "is alive";
  const pid_t pid = peer.pid.load(std::memory_order_relaxed);
  switch (base::process_state(pid, peer.start_time.load(std::memory_order_relaxed))) {
    case base::ProcessState::running: return fmt::format("is running (pid {})", pid);
    case base::ProcessState::sleeping: return fmt::format("is sleeping (pid {})", pid);
    case base::ProcessState::stopped:
      return fmt::format("is stopped by a signal or a debugger (pid {0}; kill -CONT {0})", pid);
    case base::ProcessState::dead: return fmt::format("is dead (pid {})", pid);
  }
  return {};
}

std::string Seat::doing_of(int world_rank) const {
  // Acquire: the record's clock is set before the rank is alive.
  const bool has_joined =
      block(world_rank).state.load(std::memory_order_acquire) != RankState::absent;
  if (!has_joined) return "it has made no call yet";
  const comm::FlightRecord& record = block(world_rank).flight;
  const auto operations = comm::operations_of(record);
  if (operations.empty()) return "its record is elsewhere";  // a level of another engine
  const comm::Operation& last = operations.back();
  const std::string call =
      fmt::format("{} #{} on group '{}' at {}", name_of(last.op), last.sequence,
                  comm::name_of(record.groups[last.group]), last.where);
  const auto since = [now = base::now().ns](std::int64_t ns) {
    return static_cast<double>(std::max<std::int64_t>(now - ns, 0)) * 1e-9;
  };
  switch (last.state) {
    case comm::Operation::State::under_way:
      return fmt::format("it is in {} since {:.1f} s", call, since(last.start_ns));
    case comm::Operation::State::finished:
      return fmt::format("it is in no lockstep call since {:.1f} s (its last: {})",
                         since(last.end_ns), call);
    case comm::Operation::State::failed: return fmt::format("its last call, {}, failed", call);
  }
  return {};
}

bool Seat::all_take_fences() const {
  for (int r = 0; r < segment_->n_ranks(); ++r) {
    if (!block(r).takes_fences.load(std::memory_order_relaxed)) return false;
  }
  return true;
}

bool Seat::is_oversubscribed() const {
  base::CpuMask together{};
  int quota = INT32_MAX;
  for (int r = 0; r < segment_->n_ranks(); ++r) {
    const RankBlock& peer = block(r);
    quota = std::min(quota, peer.cpu_quota.load(std::memory_order_relaxed));
    for (std::size_t i = 0; i < together.size(); ++i) {
      together[i] |= peer.cpus[i].load(std::memory_order_relaxed);
    }
  }
  int n_cpus = 0;
  for (const std::uint64_t word : together) n_cpus += std::popcount(word);
  return segment_->n_ranks() > std::min(n_cpus, quota);
}

}  // namespace lockstep::shared
