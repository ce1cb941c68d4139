#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <lockstep/error.hpp>
#include <new>
#include <thread>

#include "base/patience.hpp"
#include "base/text.hpp"
#include "base/truncated_text.hpp"
#include "engines/shared/protocol/channel.hpp"
#include "engines/shared/protocol/refusals.hpp"
#include "group/mismatch.hpp"
#include "group/wait_chain.hpp"
#include "record/signature.hpp"

namespace lockstep::shared {
namespace {

using internal::dtype_of;
using internal::Failure;
using internal::op_of;
using internal::reduce_of;
using internal::root_of;
using Kind = Failure::Kind;
using std::chrono::milliseconds;
using Clock = detail::JobClock;

}  // namespace

void Channel::record_failure(Kind kind, std::string_view text, int error_number,
                             std::span<const int> peers) noexcept {
  FailureRecord& failure = header_->failure;
  auto none = FailureState::none;
  if (!failure.state.compare_exchange_strong(none, FailureState::writing)) return;
  failure.kind = kind;
  failure.error_number = error_number;
  failure.peers = internal::PeerList::of(peers);
  base::copy_truncated(failure.text, text);
  failure.state.store(FailureState::ready, std::memory_order_seq_cst);
  header_->wake_counter.fetch_add(1, std::memory_order_seq_cst);
  base::futex_wake_all(header_->wake_counter, membership_->segment().scope());
}

void Channel::fail(const Call& call, Kind kind, const std::string& text, std::span<const int> peers,
                   int error_number) {
  record_failure(kind, text, error_number, internal::numbers_of(call, peers));
  throw_failure(call);
}

void Channel::abandon(std::string_view reason) noexcept {
  try {
    record_failure(Kind::peer_failed, fmt::format("rank {} failed: {}", rank_, reason),
                   /*error_number=*/0, std::span(&rank_, 1));
  } catch (const std::bad_alloc&) {
    record_failure(Kind::peer_failed, reason, /*error_number=*/0, std::span(&rank_, 1));
  }
}

void Channel::end_with(const Error& error) noexcept {
  try {
    const Failure failure = internal::failure_for_peers(error, rank_);
    record_failure(failure.kind, internal::text_of(failure), /*error_number=*/0,
                   failure.culprit == Failure::kNoCulprit
                       ? failure.peers.get()
                       : std::span<const int>(&failure.culprit, 1));
  } catch (const std::bad_alloc&) {
    record_failure(Kind::peer_failed, "a rank failed; no memory was left to describe the failure",
                   /*error_number=*/0, std::span(&rank_, 1));
  }
}

void Channel::enter_peers_memory(const Call& call) {
  lane(rank_).record.is_in_peers_memory.store(true, std::memory_order_seq_cst);
  if (!has_failed()) return;
  leave_peers_memory();
  throw_failure(call);
}

void Channel::leave_peers_memory() noexcept {
  lane(rank_).record.is_in_peers_memory.store(false, std::memory_order_seq_cst);
}

void Channel::wait_for_peers_to_leave() const noexcept {
  for (const int peer : peers_) {
    while (lane(peer).record.is_in_peers_memory.load(std::memory_order_seq_cst)) {
      std::this_thread::yield();
    }
  }
}

void Channel::throw_failure(const Call& call) {
  FailureRecord& failure = header_->failure;
  const auto give_up = Clock::now() + base::patience::kReport;
  while (failure.state.load(std::memory_order_acquire) != FailureState::ready) {
    if (Clock::now() > give_up) {
      throw PeerLost(context_of(call, rank_),
                     "a rank died or was stopped while it recorded why the group failed");
    }
    std::this_thread::yield();
  }
  internal::throw_failure({.kind = failure.kind,
                           .error_number = failure.error_number,
                           .text = std::string(base::text_in(failure.text)),
                           .peers = failure.peers},
                          context_of(call, rank_));
}

void Channel::fail_ended(const Call& call, int awaited) {
  FirstEnded first;
  for (const int r : absent(awaited)) {
    auto ending = membership_->ending_of(world_rank(r), /*ask_system=*/true);
    // A rank that is not absent any more has completed its part before it ended.
    if (!ending || (awaited == kAllRanks && is_raised(flag_of(r)))) continue;
    ending->text += ". Its last call here: " + call_of(r);
    first.add(call.number_of(r), *ending);
  }
  const Failure failure = first.failure();
  record_failure(failure.kind, failure.text, /*error_number=*/0, failure.peers.get());
  throw_failure(call);
}

void Channel::fail_over(const Call& call) {
  const Failure why = membership_->why_over();
  record_failure(why.kind, internal::text_of(why), /*error_number=*/0,
                 std::span(&why.culprit, why.culprit == Failure::kNoCulprit ? 0 : 1));
  throw_failure(call);
}

void Channel::fail_system(const Call& call, int error_number, const std::string& text) {
  fail(call, Kind::system, text, /*peers=*/{}, error_number);
}

std::string Channel::call_of(int rank) const {
  const CallRecord& record = lane(rank).record;
  const std::uint32_t site = record.site.load(std::memory_order_acquire);
  const std::uint64_t signature = record.signature.load(std::memory_order_relaxed);
  const std::uint64_t sequence = record.sequence.load(std::memory_order_relaxed);
  if (sequence == 0) return "none";
  const std::string peer =
      (signature & kBetweenHosts) == 0
          ? ""
          : fmt::format(" {} rank {} on another host", op_of(signature) == Op::recv ? "from" : "to",
                        root_of(signature));
  return fmt::format("{}{} #{} at {} ({})", name_of(op_of(signature)), peer, sequence,
                     membership_->site_name(world_rank(rank), site),
                     (signature & kFinished) != 0 ? "finished" : "under way");
}

bool Channel::is_in_call_between_hosts(int rank) const {
  const std::uint64_t signature = lane(rank).record.signature.load(std::memory_order_relaxed);
  return (signature & kBetweenHosts) != 0 && (signature & kFinished) == 0;
}

/// Peers read no page without memory: that would allocate it.
std::vector<std::string> Channel::refused_by(int rank, std::uint32_t n) const {
  if (!lane(rank).record.has_refusals.load(std::memory_order_acquire)) return {};
  return last_refusals(refusals_[rank], /*peer=*/-1, n);
}

void Channel::fail_mismatch(const Call& call) {
  const auto give_up = Clock::now() + std::min(base::patience::kReport, call.timeout);
  while (!absent(kAllRanks).empty() && Clock::now() < give_up && !has_failed()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  if (has_failed()) throw_failure(call);

  for (const int peer : peers_) {
    const Check theirs = lane(peer).record.check.load(std::memory_order_relaxed);
    // `off` and `light` compare the same in this engine; `full` compares the call site too.
    if (!is_raised(flag_of(peer)) || (theirs == Check::full) == (call.check == Check::full)) {
      continue;
    }
    const internal::RankCheck levels[] = {{rank_, call.check}, {peer, theirs}};
    fail(call, Kind::mismatch, internal::text_of_checks(call, levels), /*peers=*/{});
  }

  internal::MismatchTable table;
  std::vector<std::uint32_t> n_refused_by_rank;
  for (int r = 0; r < size(); ++r) {
    n_refused_by_rank.push_back(n_refused_by(r));
  }
  const std::uint32_t least = std::ranges::min(n_refused_by_rank);
  for (int r = 0; r < size(); ++r) {
    const std::uint32_t n_more = n_refused_by_rank[static_cast<std::size_t>(r)] - least;
    for (const auto& text : refused_by(r, n_more)) table.add_refused(r, text);
    if (r != rank_ && !is_raised(flag_of(r))) {
      table.add_absent(r, call_of(r));
      continue;
    }
    const CallRecord& record = lane(r).record;
    const std::uint32_t site = record.site.load(std::memory_order_acquire);
    const std::uint64_t signature = record.signature.load(std::memory_order_relaxed);
    const std::uint64_t count = record.count.load(std::memory_order_relaxed);
    table.add({.rank = r,
               .op = op_of(signature),
               .dtype = dtype_of(signature),
               .reduce = reduce_of(signature),
               .root = root_of(signature),
               .count = (signature & kByRank) != 0 ? internal::count_by_rank(count)
                                                   : std::to_string(count),
               .where = std::string(membership_->site_name(world_rank(r), site)),
               .fingerprint = r == rank_ ? fingerprint_ : static_cast<std::uint32_t>(flag_of(r))});
  }
  fail(call, Kind::mismatch, table.text(call), table.minority());
}

int Channel::awaited_by(int rank) const {
  const auto signature_of = [this](int r) {
    return lane(r).record.signature.load(std::memory_order_relaxed);
  };
  const auto waits_for_one = [](std::uint64_t signature) {
    const bool is_pairwise = op_of(signature) == Op::send || op_of(signature) == Op::recv;
    return is_pairwise && (signature & (kFinished | kBetweenHosts)) == 0;
  };
  const std::uint64_t signature = signature_of(rank);
  const int peer = root_of(signature);
  // The chain ends at a stopped rank: it is the cause, even if it was waiting when it was stopped.
  if (!waits_for_one(signature) || peer >= size() || membership_->is_stopped(world_rank(rank))) {
    return rank;
  }
  // A send and its recv are matched: neither waits for the other to arrive.
  const std::uint64_t theirs = signature_of(peer);
  const bool are_matched =
      waits_for_one(theirs) && root_of(theirs) == rank && op_of(theirs) != op_of(signature);
  return are_matched ? rank : peer;
}

void Channel::fail_timeout_of_pair(const Call& call, int awaited) {
  internal::WaitChain chain =
      internal::chain_of(call, rank_, awaited, [this](int rank) { return awaited_by(rank); });
  std::ranges::reverse(chain.ranks);
  fail(call, Kind::timeout,
       internal::text_of_wait(call, rank_, std::span(&awaited, 1), size()) + chain.text +
           describe_ranks(call, chain.ranks),
       chain.late);
}

void Channel::fail_timeout(const Call& call, std::vector<int> absent) {
  std::vector<int> present;
  for (int r = 0; r < size(); ++r) {
    if (std::ranges::find(absent, r) == absent.end()) present.push_back(r);
  }
  // A late rank throws this text too when it arrives, so the text names the ranks that waited.
  const std::string text = internal::text_of_wait(call, rank_, absent, size()) +
                           "; arrived: " + internal::list_of(internal::numbers_of(call, present));
  // A rank in another call most likely waits too, for a rank that is in none.
  std::ranges::stable_partition(absent, [this](int r) {
    return !membership_->is_in_call(world_rank(r)) && !is_in_call_between_hosts(r);
  });
  fail(call, Kind::timeout, text + describe_ranks(call, absent), absent);
}

std::string Channel::describe_ranks(const Call& call, std::span<const int> ranks) const {
  std::string text;
  for (const int r : ranks) {
    const std::string doing = membership_->last_call_text(world_rank(r));
    fmt::format_to(std::back_inserter(text), "\n  rank {} {}; its last call here: {}{}{}",
                   call.number_of(r), membership_->liveness_text(world_rank(r)), call_of(r),
                   doing.empty() ? "" : "; ", doing);
  }
  return text;
}

}  // namespace lockstep::shared
