#include "engines/shared/protocol/channel.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <lockstep/error.hpp>

#include "engines/shared/protocol/refusals.hpp"
#include "group/failure.hpp"
#include "record/progress.hpp"
#include "record/signature.hpp"

namespace lockstep::shared {
namespace {

/// bench/peers/unchecked.cpp measures the cost of a call without comparison and recording.
#ifdef LOCKSTEP_UNCHECKED
constexpr bool kRecordsCalls = false;
#else
constexpr bool kRecordsCalls = true;
#endif

constexpr std::uint32_t kOutboxBytes = 64 << 10;

/// Bounds the memory of programs with many groups that exchange large messages: slots and outboxes
/// of a channel take about 3 MiB to 16 ranks and 192 KiB for each rank above, once such messages
/// use them. With smaller ones a call of many ranks would have as many more phases, each a barrier.
std::uint32_t slot_bytes_for(int n_ranks) {
  constexpr std::uint32_t kTogether = 1U << 20U;
  constexpr std::uint32_t kPage = 4096, kMin = 64 << 10, kMax = 256 << 10;
  const std::uint32_t share = kTogether / static_cast<std::uint32_t>(n_ranks) / kPage * kPage;
  return std::clamp(share, kMin, kMax);
}

/// Offsets of a channel's parts behind its header.
struct Parts {
  std::size_t lanes;
  std::size_t refusals;  ///< one Refusals for each rank
  std::size_t slots;
  std::size_t outboxes;
  std::size_t end;
};

Parts parts_of(int n_ranks) {
  constexpr std::size_t kPage = 4096, kBefore = sizeof(RangeHeader);
  const auto n = static_cast<std::size_t>(n_ranks);
  Parts parts{};
  parts.lanes = sizeof(ChannelHeader);
  parts.refusals = parts.lanes + n * sizeof(Lane);
  // Slots and outboxes begin with a page of the segment, since they get memory in pages.
  const std::size_t end = kBefore + parts.refusals + n * sizeof(Refusals);
  parts.slots = (end + kPage - 1) / kPage * kPage - kBefore;
  parts.outboxes = parts.slots + n * kPhases * slot_bytes_for(n_ranks);
  parts.end = parts.outboxes + n * kOutboxDepth * kOutboxBytes;
  return parts;
}

/// What has memory before the first refused call, and the first message that does not fit into a
/// flag: the lanes.
Range::Size size_of_channel(int n_ranks) {
  const Parts parts = parts_of(n_ranks);
  return {parts.end, /*backed=*/parts.refusals};
}

void mix(std::uint64_t& hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
  hash ^= hash >> 29U;
}

std::uint64_t hash_of(std::span<const std::size_t> counts) {
  std::uint64_t hash = counts.size();
  for (const std::size_t count : counts) mix(hash, count);
  return hash >> 16U;
}

/// Adds a call, encoded as `signature`. The multiplications are independent of each other. (A
/// signature XOR a count would be the same for different calls.)
void mix(std::uint64_t& hash, const Call& call, std::uint64_t signature) {
  const std::size_t count = call.counts.empty() ? call.count : 0;
  hash = hash * 0x27d4eb2f165667c5ULL ^
         (signature * 0xc2b2ae3d27d4eb4fULL + count * 0x9e3779b97f4a7c15ULL);
  hash ^= hash >> 29U;
  for (const std::size_t each : call.counts) mix(hash, each);
}

}  // namespace

std::uint64_t Channel::make(Segment& segment, std::span<const int> members) {
  const int n_ranks = static_cast<int>(members.size());
  return Range::make(segment, size_of_channel(n_ranks), n_ranks, [&](std::byte* data) {
    auto* header = reinterpret_cast<ChannelHeader*>(data);
    header->n_ranks = n_ranks;
    header->slot_bytes = slot_bytes_for(n_ranks);
    header->outbox_bytes = kOutboxBytes;
    header->tuning = tuning_for(n_ranks, segment.header().tuning);
    std::copy(members.begin(), members.end(), header->members.begin());
  });
}

Channel::Channel(std::shared_ptr<Membership> membership, std::uint64_t offset, int rank,
                 int n_ranks)
    : membership_(std::move(membership)),
      range_(membership_->shared_segment(), offset, size_of_channel(n_ranks)),
      header_(reinterpret_cast<ChannelHeader*>(range_.data())),
      lanes_(reinterpret_cast<Lane*>(range_.data() + parts_of(n_ranks).lanes)),
      refusals_(reinterpret_cast<Refusals*>(range_.data() + parts_of(n_ranks).refusals)),
      slots_(range_.data() + parts_of(n_ranks).slots),
      outboxes_(range_.data() + parts_of(n_ranks).outboxes),
      wake_counter_at_(offset + sizeof(RangeHeader) + offsetof(ChannelHeader, wake_counter)),
      rank_(rank),
      swaps_slots_(n_ranks == 2),
      inline_bytes_(header_->tuning.inline_bytes),
      is_in_one_process_(!membership_->segment().is_between_processes()) {
  for (int r = 0; r < n_ranks; ++r) {
    if (r != rank_) peers_.push_back(r);
  }
  absent_.reserve(static_cast<std::size_t>(n_ranks));
}

void Channel::back_slots(const Call& call, std::size_t n_bytes) {
  const int first = swaps_slots_ ? 0 : rank_;
  const int n_owners = swaps_slots_ ? 2 : 1;
  n_backed_slot_bytes_ =
      back(call, slots_ + static_cast<std::size_t>(first * kPhases) * slot_bytes(),
           static_cast<std::size_t>(n_owners * kPhases), slot_bytes(), n_bytes);
}

void Channel::back_outbox(const Call& call, std::size_t n_bytes) {
  n_backed_outbox_bytes_ =
      back(call, outbox(rank_, 0), kOutboxDepth, header_->outbox_bytes, n_bytes);
}

/// Returns how much of each piece has memory: doubled each time, so that this rarely runs.
std::size_t Channel::back(const Call& call, std::byte* first, std::size_t n_pieces,
                          std::size_t n_piece_bytes, std::size_t n_bytes) {
  constexpr std::size_t kMin = 4096;
  n_bytes = std::min(std::bit_ceil(std::max(n_bytes, kMin)), n_piece_bytes);
  try {
    range_.back(first, n_bytes, n_pieces, /*stride=*/n_piece_bytes);
  } catch (const SystemError& error) {
    fail_system(call, error.error_number(),
                fmt::format("rank {} could not reserve shared memory: {}", call.number_of(rank_),
                            internal::failure_of(error).text));
  }
  return n_bytes;
}

void Channel::choose_waiting() {
  // More members than ranks of the world: each rank is several, see NativeEngine::divide.
  waiter_ = Waiter(membership_->wait_policy(std::max(membership_->segment().n_ranks(), size())));
  sleepers_fence_ = !waiter_.is_oversubscribed() && membership_->all_receive_fences();
}

void Channel::begin(const Call& call) {
  if (has_failed()) throw_failure(call);  // found by peers while this rank was not in a call
  if (membership_->has_regrouped()) fail_over(call);
  limit_ = detail::TimeLimit(call.timeout);
  if (!kRecordsCalls) return;
  // The fingerprint: 32 bits of a hash of all that the ranks must agree on.
  const Call* recorded = &call;
  std::uint64_t signature = internal::encode_call(call);
  std::uint64_t hash = call.n_refused * 0x9e3779b97f4a7c15ULL;
  if (call.check == Check::full) hash ^= internal::hash_of(call.where);
  mix(hash, call, signature);
  for (const Call* part = call.parent_call; part != nullptr; part = part->parent_call) {
    recorded = part;
    signature = internal::encode_call(*part);
    mix(hash, *part, signature);
  }
  fingerprint_ = static_cast<std::uint32_t>(hash >> 16U);
  CallRecord& record = lane(rank_).record;
  record.check.store(call.check, std::memory_order_relaxed);
  record.sequence.store(call.sequence, std::memory_order_relaxed);
  const bool is_by_rank = !recorded->counts.empty();  // then counts may differ between ranks
  record.signature.store(signature | (is_by_rank ? kByRank : 0), std::memory_order_relaxed);
  record.count.store(is_by_rank ? hash_of(recorded->counts) : recorded->count,
                     std::memory_order_relaxed);
  // Release: a peer that reads the number also sees the text of the source line.
  record.site.store(membership_->site(call.where), std::memory_order_release);
}

void Channel::refuse(const Refusal& refusal) noexcept {
  CallRecord& record = lane(rank_).record;
  if (!record.has_refusals.load(std::memory_order_relaxed)) {
    try {
      range_.back(reinterpret_cast<std::byte*>(refusals_ + rank_), sizeof(Refusals));
    } catch (const std::exception& error) {
      return abandon(error.what());
    }
    record.has_refusals.store(true, std::memory_order_release);
  }
  add_refusal(refusals_[rank_], /*peer=*/-1, refusal.text);
  // Release: a peer that reads the number also sees the text, and the flags that this rank set
  // in the calls before.
  record.n_refused.store(refusal.n_refused, std::memory_order_release);
}

void Channel::begin_between_hosts(const Call& call) {
  begin(call);
  if (!kRecordsCalls) return;
  auto& signature = lane(rank_).record.signature;
  signature.store(signature.load(std::memory_order_relaxed) | kBetweenHosts,
                  std::memory_order_relaxed);
}

void Channel::end() noexcept {
  if (!kRecordsCalls) return;
  auto& signature = lane(rank_).record.signature;
  signature.store(signature.load(std::memory_order_relaxed) | kFinished, std::memory_order_relaxed);
}

void Channel::end_phase(const Call& call) {
  const std::uint64_t word = phase_ << 32U | fingerprint_;
  std::atomic<std::uint64_t>& flag = lane(rank_).flags[static_cast<std::size_t>(slot_index_)].word;
  // model: raise
  if (sleepers_fence_) {
    flag.store(word, std::memory_order_release);
    std::atomic_signal_fence(std::memory_order_seq_cst);  // prevents reordering by the compiler
  } else {
    flag.store(word, std::memory_order_seq_cst);
  }
  if (waiter_.is_oversubscribed()) {
    auto next = peers_.begin();  // the first whose flag may not be set
    const auto all_are_raised = [this, &next] {
      while (next != peers_.end() && is_raised(flag_of(*next))) ++next;
      return next == peers_.end();
    };
    // model: scan, wake_all
    if (all_are_raised()) wake_sleepers();
    if (call.progress != nullptr) call.progress->arrived(call);
    wait(call, kAllRanks, all_are_raised);
  } else {
    wake_sleepers();
    // Recorded while the peers' cache lines are in flight from other cores.
    if (call.progress != nullptr) call.progress->arrived(call);
    for (const int peer : peers_) {
      wait(call, kAllRanks, [this, peer] { return is_raised(flag_of(peer)); });
    }
  }
  for (const int peer : peers_) {
    if (flag_of(peer) != word) fail_mismatch(call);
  }
  ++phase_;
  if (++slot_index_ == kPhases) {
    slot_index_ = 0;
    rotation_ ^= 1;
  }
}

}  // namespace lockstep::shared
