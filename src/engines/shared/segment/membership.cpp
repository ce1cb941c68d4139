#include "engines/shared/segment/membership.hpp"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <lockstep/error.hpp>
#include <span>
#include <thread>

#include "base/boot_clock.hpp"
#include "base/cpus.hpp"
#include "base/membarrier.hpp"
#include "base/text.hpp"
#include "base/ticks.hpp"
#include "base/truncated_text.hpp"

namespace lockstep::shared {
std::string describe_wait_status(int status) {
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    const char* name = ::sigabbrev_np(signal);
    return fmt::format("was killed by signal {} (SIG{})", signal, name != nullptr ? name : "?");
  }
  return fmt::format("exited with code {}", WEXITSTATUS(status));
}

void FirstEnded::add(int rank, const Ending& ending) {
  if (!ranks_.empty() && ending.order > order_) return;
  if (ending.order != order_) {
    ranks_.clear();
    text_.clear();
  }
  order_ = ending.order;
  failed_ = ending.failed;
  text_ += fmt::format("{}rank {} {}{}", ranks_.empty() ? "" : "; ", rank,
                       failed_ ? "failed: " : "", ending.text);
  ranks_.push_back(rank);
}

internal::Failure FirstEnded::failure() const {
  using Kind = internal::Failure::Kind;
  return {.kind = failed_ ? Kind::peer_failed : Kind::peer_lost,
          .text = text_ + (ranks_.size() > 1 ? "; which of them ended first is not known" : ""),
          .peers = internal::PeerList::of(ranks_)};
}

std::optional<bool> is_pid_of(std::uint64_t here, const RankBlock& rank) noexcept {
  const std::uint64_t there = rank.pid_namespace.load(std::memory_order_relaxed);
  return here != 0 && there != 0 ? std::optional(here == there) : std::nullopt;
}

bool take_rank(RankBlock& block) noexcept {
  const pid_t pid = ::getpid();
  std::int32_t holder = 0;
  const bool has_joined = block.state.load(std::memory_order_relaxed) != RankState::absent;
  // A process that joined a world over another engine has the block, and may join this one too.
  if (!block.pid.compare_exchange_strong(holder, pid) && (holder != pid || has_joined))
    return false;
  block.start_time.store(base::process_start_time(pid), std::memory_order_relaxed);
  block.pidfd_inode.store(base::pidfd_inode(pid), std::memory_order_relaxed);
  block.pid_namespace.store(base::namespace_of("pid"), std::memory_order_relaxed);
  block.time_namespace.store(base::namespace_of("time"), std::memory_order_relaxed);
  return true;
}

void claim_rank(RankBlock& block, int rank) {
  if (take_rank(block)) return;
  throw UsageError({.operation = "init_dist"},
                   fmt::format("rank {} is taken by process {}; each rank joins once, and a "
                               "program started by a rank is not a rank (unset LOCKSTEP_SEGMENT)",
                               rank, block.pid.load(std::memory_order_relaxed)));
}

bool has_left(const RankBlock& block) noexcept {
  const RankState state = block.state.load(std::memory_order_relaxed);
  return block.pid.load(std::memory_order_relaxed) == ::getpid() &&
         (state == RankState::left || state == RankState::failed);
}

void note_ended(SegmentHeader& header, RankBlock& block, bool is_found) noexcept {
  if (block.ended_as.load(std::memory_order_relaxed) != 0) return;
  std::uint32_t none = 0;
  const std::uint32_t number = is_found
                                   ? header.n_ended.load(std::memory_order_relaxed) + 1
                                   : header.n_ended.fetch_add(2, std::memory_order_relaxed) + 2;
  block.ended_as.compare_exchange_strong(none, number, std::memory_order_relaxed);
}

void mark_ended(Segment& segment, int world_rank, std::string_view failure) noexcept {
  RankBlock& block = segment.rank(world_rank);
  note_ended(segment.header(), block, /*is_found=*/false);
  if (!failure.empty()) base::copy_truncated(block.failure, failure);
  // Release: a peer that sees the state also sees the text and all that the rank published before.
  block.state.store(failure.empty() ? RankState::left : RankState::failed,
                    std::memory_order_release);
}

Membership::Membership(std::shared_ptr<Segment> segment, int world_rank)
    : segment_(std::move(segment)), world_rank_(world_rank), pid_(::getpid()) {
  RankBlock& mine = block(world_rank_);
  claim_rank(mine, world_rank_);
  mine.cpu_quota.store(base::cpu_quota(), std::memory_order_relaxed);
  const base::CpuMask mask = base::allowed_cpus();
  for (std::size_t i = 0; i < mask.size(); ++i) {
    mine.cpus[i].store(mask[i], std::memory_order_relaxed);
  }
  mine.receives_fences.store(base::register_for_fences(), std::memory_order_relaxed);
  recorder_ = std::make_shared<internal::Recorder>(
      std::shared_ptr<internal::FlightRecord>(segment_, &mine.flight));
  // Release: a peer that sees this rank alive also sees its pid and cores.
  mine.state.store(RankState::alive, std::memory_order_release);
}

Membership::~Membership() { leave({}); }

void Membership::leave(std::string_view failure) noexcept {
  // A fork of this process inherits the object but is not the rank.
  if (left_ || ::getpid() != pid_) return;
  left_ = true;
  has_regrouped_.store(segment_->header().is_elastic, std::memory_order_relaxed);
  mark_ended(*segment_, world_rank_, failure);
}

bool has_lease_run_out(const SegmentHeader& header) noexcept {
  const std::int64_t until = header.lease_until.load(std::memory_order_relaxed);
  return until != 0 && base::BootClock::now().time_since_epoch().count() >= until;
}

bool is_over(const SegmentHeader& header) noexcept {
  return header.is_over.load(std::memory_order_seq_cst) || has_lease_run_out(header);
}

internal::Failure why_over(const SegmentHeader& header) {
  internal::Failure failure{.kind = internal::Failure::Kind::peer_lost};
  const bool is_ended = header.is_over.load(std::memory_order_acquire);
  const std::string_view why = is_ended ? base::text_in(header.ending)
                               : has_lease_run_out(header)
                                   ? "the launcher of this host hears nothing from node 0"
                                   : std::string_view();
  if (header.is_elastic) {
    failure.text =
        fmt::format("generation {} of the world is over{}{}; call regroup() for the next one",
                    header.generation, why.empty() ? "" : ": ", why);
  } else {
    failure.text = why;
    if (header.lost_rank_plus_one > 0) failure.culprit = header.lost_rank_plus_one - 1;
  }
  return failure;
}

std::atomic<std::uint64_t>* Membership::begin_sleep(std::uint64_t offset) noexcept {
  for (std::atomic<std::uint64_t>& entry : block(world_rank_).sleeps_at) {
    std::uint64_t none = 0;
    if (entry.compare_exchange_strong(none, offset, std::memory_order_seq_cst)) return &entry;
  }
  return nullptr;
}

std::optional<Ending> Membership::ending_of(int world_rank, bool ask_system) const {
  RankBlock& peer = block(world_rank);
  // Acquire: makes the text of a failure visible, and all that the peer published before leaving.
  const RankState state = peer.state.load(std::memory_order_acquire);
  if (state == RankState::failed) {
    return Ending{.failed = true,
                  .is_orderly = false,
                  .order = peer.ended_as.load(std::memory_order_relaxed),
                  .text = std::string(base::text_in(peer.failure))};
  }
  const int status = peer.wait_status_plus_one.load(std::memory_order_acquire);
  if (state == RankState::left || status != 0) {
    std::string text =
        state == RankState::left ? "left the world (destroy_dist or program exit)" : "";
    if (status != 0) text += (text.empty() ? "" : " and ") + describe_wait_status(status - 1);
    return Ending{.failed = false,
                  .is_orderly = state == RankState::left && status <= 1,
                  .order = peer.ended_as.load(std::memory_order_relaxed),
                  .text = std::move(text)};
  }
  if (state != RankState::alive || !ask_system || !is_gone(world_rank)) return std::nullopt;
  // A launcher knows the signal or the code as soon as it has reaped the process. The segment of a
  // torch process group has none, also under `lockstep run`.
  const auto is_known = [&peer] {
    return peer.wait_status_plus_one.load(std::memory_order_acquire) != 0 ||
           peer.state.load(std::memory_order_acquire) != RankState::alive;
  };
  const bool is_awaited = segment_->header().has_launcher && !is_launcher_late_;
  for (int i = 0; i < 250 && is_awaited && !is_known(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // One that is stopped delays the error once, however many ranks have died.
  is_launcher_late_ = is_launcher_late_ || (is_awaited && !is_known());
  if (is_known()) return ending_of(world_rank, /*ask_system=*/false);
  note_ended(segment_->header(), peer, /*is_found=*/true);
  return Ending{.failed = false,
                .is_orderly = false,
                .order = peer.ended_as.load(std::memory_order_relaxed),
                .text = fmt::format("died (its process {} is gone)",
                                    peer.pid.load(std::memory_order_relaxed))};
}

/// Without /proc, the namespaces are known to be the same only if the bootstrap verified it; the
/// ranks of `lockstep run` have a launcher that sees all.
bool Membership::sees_pids_of(const RankBlock& peer) const noexcept {
  const std::uint64_t here = block(world_rank_).pid_namespace.load(std::memory_order_relaxed);
  return is_pid_of(here, peer)
      .value_or(segment_->header().has_one_pid_namespace.load(std::memory_order_relaxed));
}

/// Under mutex_.
base::WatchedProcess& Membership::watched(int world_rank) const {
  const auto n_ranks = static_cast<std::size_t>(segment_->n_ranks());
  if (watched_.empty()) {
    watched_.resize(n_ranks);
    spare_ = base::ReservedFd(segment_->guarded_fd());
    // Leave most descriptors to the program.
    constexpr rlim_t kShare = 8;
    rlimit limit{};
    keeps_pidfds_ = ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur / kShare >= n_ranks;
  }
  base::WatchedProcess& process = watched_[static_cast<std::size_t>(world_rank)];
  const RankBlock& peer = block(world_rank);
  const bool has_joined = peer.state.load(std::memory_order_acquire) != RankState::absent;
  if (process.is_known() || !has_joined || !sees_pids_of(peer)) return process;
  process = base::WatchedProcess({.pid = peer.pid.load(std::memory_order_relaxed),
                                  .start_time = peer.start_time.load(std::memory_order_relaxed),
                                  .pidfd_inode = peer.pidfd_inode.load(std::memory_order_relaxed)},
                                 keeps_pidfds_);
  return process;
}

void Membership::watch_peers() {
  if (!segment_->is_between_processes()) return;
  const std::lock_guard lock(mutex_);
  for (int r = 0; r < segment_->n_ranks(); ++r) {
    if (r != world_rank_) watched(r);
  }
}

base::ProcessState Membership::state_of(int world_rank) const {
  if (!segment_->is_between_processes()) return base::ProcessState::alive;  // threads
  const std::lock_guard lock(mutex_);
  const base::WatchedProcess& process = watched(world_rank);
  return process.is_known() ? process.state(spare_) : base::ProcessState::unknown;
}

bool Membership::is_gone(int world_rank) const {
  if (!segment_->is_between_processes()) return false;
  const std::lock_guard lock(mutex_);
  const base::WatchedProcess& process = watched(world_rank);
  return process.is_known() && process.is_gone(spare_);
}

bool Membership::is_stopped(int world_rank) const {
  return state_of(world_rank) == base::ProcessState::stopped;
}

std::string Membership::liveness_text(int world_rank) const {
  const RankBlock& peer = block(world_rank);
  if (peer.state.load(std::memory_order_acquire) == RankState::absent) {
    return "has not joined the world yet (init_dist)";
  }
  if (!segment_->is_between_processes()) return "is alive";
  const pid_t pid = peer.pid.load(std::memory_order_relaxed);
  switch (state_of(world_rank)) {
    case base::ProcessState::running: return fmt::format("is running (pid {})", pid);
    case base::ProcessState::sleeping: return fmt::format("is sleeping (pid {})", pid);
    case base::ProcessState::stopped:
      return fmt::format("is stopped by a signal or a debugger (pid {0}; kill -CONT {0})", pid);
    case base::ProcessState::alive: return fmt::format("is alive (pid {})", pid);
    case base::ProcessState::gone: return fmt::format("is dead (pid {})", pid);
    case base::ProcessState::unknown:
      return fmt::format(
          "may be alive or dead (its pid {} cannot be seen from here: another PID "
          "namespace, or no /proc)",
          pid);
  }
  return {};
}

base::TickAnchor Membership::joined() const noexcept {
  const internal::FlightRecord& record = block(world_rank_).flight;
  return {.ticks = record.anchor_ticks, .ns = record.anchor_ns};
}

std::optional<internal::Operation> Membership::last_operation_of(int world_rank) const {
  // Acquire: the record's clock is set before the state becomes alive.
  if (block(world_rank).state.load(std::memory_order_acquire) == RankState::absent) {
    return std::nullopt;
  }
  const auto operations = internal::operations_of(block(world_rank).flight, joined());
  return operations.empty() ? std::nullopt : std::optional(operations.back());
}

bool Membership::is_in_call(int world_rank) const {
  const auto last = last_operation_of(world_rank);
  return last && last->state == internal::Operation::State::under_way;
}

std::string Membership::last_call_text(int world_rank) const {
  const RankBlock& peer = block(world_rank);
  const internal::FlightRecord& record = peer.flight;
  const auto last = last_operation_of(world_rank);
  if (!last) return {};
  const std::string call =
      fmt::format("{} #{} on group '{}' at {}", name_of(last->op), last->sequence,
                  internal::name_of(record.groups[last->group]), last->where);
  // Without a machine-wide tick counter, times of another time namespace are not comparable.
  const bool has_same_clock = base::kTickSource.is_counter ||
                              peer.time_namespace.load(std::memory_order_relaxed) ==
                                  block(world_rank_).time_namespace.load(std::memory_order_relaxed);
  const auto since = [&](std::int64_t ns) {
    return has_same_clock
               ? fmt::format(
                     " for {:.1f} s",
                     static_cast<double>(std::max<std::int64_t>(base::now().ns - ns, 0)) * 1e-9)
               : std::string();
  };
  switch (last->state) {
    case internal::Operation::State::under_way:
      return fmt::format("now in {}{}", call, since(last->start_ns));
    case internal::Operation::State::finished:
      return fmt::format("outside lockstep{} (last call: {})", since(last->end_ns), call);
    case internal::Operation::State::failed: return fmt::format("last call failed: {}", call);
  }
  return {};
}

bool Membership::all_receive_fences() const {
  for (int r = 0; r < segment_->n_ranks(); ++r) {
    if (!block(r).receives_fences.load(std::memory_order_relaxed)) return false;
  }
  return true;
}

base::WaitPolicy Membership::wait_policy(int n_threads) const {
  base::CpuMask together{};
  int quota = INT32_MAX;
  for (int r = 0; r < segment_->n_ranks(); ++r) {
    const RankBlock& peer = block(r);
    quota = std::min(quota, peer.cpu_quota.load(std::memory_order_relaxed));
    for (std::size_t i = 0; i < together.size(); ++i) {
      together[i] |= peer.cpus[i].load(std::memory_order_relaxed);
    }
  }
  return base::WaitPolicy::of_flags(n_threads, base::n_usable_cores(together, quota));
}

}  // namespace lockstep::shared
