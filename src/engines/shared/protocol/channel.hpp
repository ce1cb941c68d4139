#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/engine.hpp>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "engines/shared/protocol/waiter.hpp"
#include "engines/shared/segment/layout.hpp"
#include "engines/shared/segment/membership.hpp"
#include "engines/shared/segment/segment.hpp"
#include "group/check.hpp"

namespace lockstep::shared {

/// The memory through which the ranks of one group communicate, in phases that all ranks execute.
///
/// The protocol. Every collective is a sequence of phases, numbered from 1 for the life of the
/// channel. In phase s a rank
///   (1) may write its own slot and flag payload of s (they rotate over kPhases = 3),
///   (2) may read what its peers wrote in phases s - 1 and s - 2,
///   (3) may rewrite, in its own slot of s - 1, data that no peer reads before phase s + 1,
/// and completes the phase with end_phase(): it raises its flag of s and waits for all flags of s.
/// A call may return in the middle of a phase, after reading; the next call continues that phase.
///
/// Proof that no data is overwritten while a peer reads it. Rank A writes its slot of s in phase s.
/// That slot held the data of s - 3, which a peer B may read only in phases s - 2 and s - 1 (2). A
/// is in phase s, so it has seen B's flag of s - 1, which B raised after its last read in s - 1.
/// Proof that no data is read before it is written. B reads A's data of s - 1 in phase s, so B has
/// seen A's flag of s - 1 (acquire), which A raised (release) after writing. The same holds for
/// s - 2, and for (3) between s and s + 1. The flags themselves follow (1) and (2): B, polling A's
/// flag in phase s, reads the number s - 3 or s and nothing else.
///
/// In a group of two, the ranks swap their slots at each rotation: a rank writes the slot that its
/// peer wrote three phases ago. Lines that it prefetched for write (base::prefetch_to_write) while
/// reading are in its cache by then, so each line moves between cores once per phase, not twice.
/// The proof still holds: A writes in s the slot that B wrote in s - 3. A itself reads it only in
/// phases s - 2 and s - 1 (2), before it reaches s; B may access it until the end of s - 2 (3) and
/// raised its flag of s - 2 after that, and A has seen that flag.
///
/// Sleeping. A waiter polls, registers in n_sleepers, reads wake_counter, polls once more and
/// sleeps while wake_counter keeps its value. A rank that makes something ready reads n_sleepers
/// afterwards. All these accesses are sequentially consistent, so either the waiter's last poll
/// succeeds, or the other rank sees the sleeper and increments wake_counter. If the machine is
/// oversubscribed, only a rank that sees all flags of its phase raised increments it: the last one
/// to raise its own does. So there is one wake-up per phase, not one per rank.
///
/// Every call raises flags, but few calls sleep. So if the kernel can fence all ranks at once
/// (base/membarrier.hpp), the sleeper does so between registering and its last poll, and a flag
/// is raised with a plain release store. The store may then be reordered after the load of
/// n_sleepers; but the fence takes effect between two instructions of the raising rank. If both the
/// store and the load precede the fence, the last poll sees the flag. Otherwise the load follows
/// the fence and sees the sleeper. If the kernel refuses a fence, a lost wake-up lasts until the
/// sleeper's next liveness check (kLivenessInterval).
///
/// A flag carries the call's fingerprint, so ranks that make different calls detect it in the first
/// phase, at no cost. The first rank that finds a failure writes it into the channel; every rank
/// that waits there throws it.
///
/// Threads: one at a time.
class Channel {
 public:
  /// Reserves a channel for `members` (world ranks); each member then attaches to it. A world rank
  /// that is there several times attaches as often, for a thread each: these members share its
  /// Membership, and are lost with it.
  static std::uint64_t make(Segment& segment, std::span<const int> members);

  Channel(std::shared_ptr<Membership> membership, std::uint64_t offset, int rank, int n_ranks);

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return header_->n_ranks; }
  int world_rank(int rank) const noexcept {
    return header_->members[static_cast<std::size_t>(rank)];
  }
  const std::shared_ptr<Membership>& membership() const noexcept { return membership_; }
  const Waiter& waiter() const noexcept { return waiter_; }
  /// Whether a rank later writes to the slot in which it now reads a peer's data.
  bool swaps_slots() const noexcept { return swaps_slots_; }
  /// Up to this size the data of a phase is in the flags' own lines, above it in slots.
  std::size_t inline_bytes() const noexcept { return inline_bytes_; }
  std::size_t slot_bytes() const noexcept { return header_->slot_bytes; }
  const Tuning& tuning() const noexcept { return header_->tuning; }
  std::size_t flat_bytes() const noexcept {
    return waiter_.is_oversubscribed() ? tuning().flat_bytes_oversubscribed : tuning().flat_bytes;
  }
  /// Size of one phase in a pipeline of n_bytes: at most what stays in the core's cache. Two ranks
  /// copy and reduce at the same time only from the second chunk on, so they have at least four if
  /// those are not below 64 KiB. A message larger than the caches uses small chunks, which leave
  /// more of the caches to it. All ranks must divide alike, so a change here is also a change of
  /// kProtocol.
  std::size_t chunk_bytes(std::size_t n_bytes) const noexcept {
    constexpr std::size_t kSmall = 64 << 10, kPage = 4096, kMaxCached = 4 << 20;
    const std::size_t most = std::min<std::size_t>(tuning().chunk_bytes, slot_bytes());
    if (size() > 2) return most;
    if (n_bytes > kMaxCached) return std::min(most, kSmall);
    return std::min(most, std::max(kSmall, n_bytes / 4 / kPage * kPage));
  }

  /// Chooses how to wait, based on the cores that all ranks of the world may use. Every member
  /// calls it at the same place in the sequence of calls, after the whole world has joined.
  void choose_waiting();

  /// Enclose the phases of one call: peers can see the call during and after it.
  void begin(const Call& call);
  void end() noexcept;
  /// Replaces begin for a call over another engine, between hosts.
  void begin_between_hosts(const Call& call);

  /// The memory this rank writes in this phase: n_bytes, at most slot_bytes(). Throws SystemError
  /// if there is none, on all members.
  std::byte* write_slot(const Call& call, std::size_t n_bytes) {
    if (n_bytes > inline_bytes_ && n_bytes > n_backed_slot_bytes_) back_slots(call, n_bytes);
    return place(rank_, /*phases_ago=*/0, n_bytes);
  }
  /// What `rank` wrote `phases_ago` (1 or 2) phases ago, with the same n_bytes.
  std::byte* read_slot(int rank, int phases_ago, std::size_t n_bytes) noexcept {
    return place(rank, phases_ago, n_bytes);
  }
  /// A control value for all other ranks, in place of data: in the flag's lines, which have memory
  /// before any slot has.
  template <class T>
  void announce(const T& value) noexcept {
    static_assert(sizeof(T) <= kInlineBytes && std::is_trivially_copyable_v<T>);
    std::memcpy(payload(rank_, slot_index_), &value, sizeof value);
  }
  /// What `rank` announced in the phase before.
  template <class T>
  T announced_by(int rank) const noexcept {
    T value;
    std::memcpy(&value, payload(rank, index_of(/*phases_ago=*/1)), sizeof value);
    return value;
  }
  /// Whether all ranks are threads of this process, which can access each other's memory.
  bool is_in_one_process() const noexcept { return is_in_one_process_; }
  /// Enclose the time in which this rank accesses memory that its peers published for this call.
  ///
  /// A call that fails on one rank returns there, and its memory may be freed, while another rank
  /// has seen all flags and accesses it. So a rank whose call fails calls wait_for_peers_to_leave()
  /// before it returns. Proof that no rank then accesses its memory: all accesses to the mark and
  /// to the failure are sequentially consistent. The failing rank finds the failure recorded, then
  /// reads the peer's mark; the peer sets its mark, then looks for a failure. So either the mark is
  /// seen, and waited for (a copy of bounded length, by a thread that cannot end in between), or
  /// the peer sees the failure and throws before it accesses anything.
  void enter_peers_memory(const Call& call);
  void leave_peers_memory() noexcept;
  void wait_for_peers_to_leave() const noexcept;
  /// A collective that this rank refused: see Engine::refuse. Between end_phase of one call and
  /// begin of the next.
  ///
  /// Proof that a rank A which waits in phase s, in a call with n_refused = a, may report a
  /// mismatch once it reads that a peer B has refused b > a and after that finds B's flag of s not
  /// raised. B stores its number with release after the calls before it, so A would see the flag of
  /// s, had B raised it: B has not begun a call that includes phase s, and its next one includes
  /// it. That call carries b or more, so its fingerprint differs from A's. If b < a, B may still
  /// refuse as many calls as A, so A waits; the call that B then makes is compared.
  void refuse(const Refusal& refusal) noexcept;
  /// Ends the phase. Throws MismatchError, TimeoutError, PeerLost, PeerFailed, SystemError.
  void end_phase(const Call& call);

  /// Point-to-point, in chunks through the sender's outbox. The sender may be kOutboxDepth chunks
  /// ahead; the receiver named in the oldest chunk takes it. n_sent is stored (release) after a
  /// chunk is written and n_taken after it is read, and each side loads the other's counter
  /// (acquire) before it accesses an outbox entry.
  void send(const Call& call);
  void receive(const Call& call);

  /// This rank communicates with other hosts for all members, for `at_most` from now: until then
  /// no peer counts it as late, unless its process is stopped.
  void extend_deadline(std::chrono::nanoseconds at_most) noexcept;

  /// Throws if the channel is dead. Threads: any.
  void throw_if_failed(const Call& call) {
    if (has_failed()) throw_failure(call);
  }
  /// Makes the channel dead for all members with a system call's error, and throws it.
  [[noreturn]] void fail_system(const Call& call, int error_number, const std::string& text);
  /// Makes the channel dead for all members because this one cannot continue. Threads: any.
  void abandon(std::string_view reason) noexcept;
  /// The same, with the type and text of an error found elsewhere.
  void end_with(const Error& error) noexcept;

 private:
  static constexpr int kAllRanks = -1;

  Lane& lane(int rank) const noexcept { return lanes_[rank]; }
  int index_of(int phases_ago) const noexcept {
    return slot_index_ - phases_ago < 0 ? slot_index_ - phases_ago + kPhases
                                        : slot_index_ - phases_ago;
  }
  std::byte* payload(int rank, int index) const noexcept {
    return lane(rank).flags[static_cast<std::size_t>(index)].payload.data();
  }
  std::byte* place(int rank, int phases_ago, std::size_t n_bytes) const noexcept {
    const int index = index_of(phases_ago);
    if (n_bytes <= inline_bytes_) return payload(rank, index);
    const int rotation = slot_index_ - phases_ago < 0 ? rotation_ - 1 : rotation_;
    const int owner = swaps_slots_ ? rank ^ (rotation & 1) : rank;
    return slots_ + static_cast<std::size_t>(owner * kPhases + index) * header_->slot_bytes;
  }
  std::byte* outbox(int rank, std::uint64_t chunk) const noexcept;
  /// Give memory to the first n_bytes, or more, of each slot and outbox entry that this rank
  /// writes: many groups only ever exchange messages that fit into flags.
  void back_slots(const Call& call, std::size_t n_bytes);
  void back_outbox(const Call& call, std::size_t n_bytes);
  std::size_t back(const Call& call, std::byte* first, std::size_t n_pieces,
                   std::size_t n_piece_bytes, std::size_t n_bytes);
  /// Waits until the oldest chunk in call.root's outbox is for this rank; returns its number.
  std::uint64_t wait_for_chunk(const Call& call);
  std::uint64_t flag_of(int rank) const noexcept {
    return lane(rank).flags[static_cast<std::size_t>(slot_index_)].word.load(
        std::memory_order_seq_cst);
  }
  bool is_raised(std::uint64_t word) const noexcept { return word >> 32 == (phase_ & 0xffffffffU); }

  /// How many calls the rank has refused.
  std::uint32_t n_refused_by(int rank) const noexcept {
    return lane(rank).record.n_refused.load(std::memory_order_acquire);
  }
  /// The texts of the last n of them.
  std::vector<std::string> refused_by(int rank, std::uint32_t n) const;

  // channel_wait.cpp
  template <class Ready>
  void wait(const Call& call, int awaited, const Ready& ready);
  void wait_asleep(const Call& call, int awaited, Condition ready);
  void sleep(Condition ready, std::chrono::nanoseconds at_most);
  void check_peer_liveness(const Call& call, int awaited, Condition ready, unsigned round);
  /// The awaited ranks that have not arrived. Valid until the next call; does not allocate.
  const std::vector<int>& absent(int awaited);
  /// The absent ranks without a valid deadline extension; valid as long.
  const std::vector<int>& late(int awaited);
  void wake_sleepers() noexcept {
    if (header_->n_sleepers.load(std::memory_order_seq_cst) != 0)
      increment_wake_counter();  // model: look
  }
  void increment_wake_counter() noexcept;

  // channel_failure.cpp
  /// Records the channel's failure, unless one is recorded already.
  void record_failure(internal::Failure::Kind kind, std::string_view text, int error_number,
                      std::span<const int> peers) noexcept;
  [[noreturn]] void fail(const Call& call, internal::Failure::Kind kind, const std::string& text,
                         std::span<const int> peers, int error_number = 0);
  /// Of the awaited ranks, names the one that ended first. At least one has ended.
  [[noreturn]] void fail_ended(const Call& call, int awaited);
  [[noreturn]] void fail_mismatch(const Call& call);
  [[noreturn]] void fail_timeout(const Call& call, std::vector<int> absent);
  /// For a send or recv, whose peer may itself wait for another rank in one.
  [[noreturn]] void fail_timeout_of_pair(const Call& call, int awaited);
  [[noreturn]] void throw_failure(const Call& call);
  /// Of a group whose generation of the world is over.
  [[noreturn]] void fail_over(const Call& call);
  bool has_failed() const noexcept {
    return header_->failure.state.load(std::memory_order_seq_cst) != FailureState::none;
  }
  std::string call_of(int rank) const;
  /// The rank that `rank` waits for in a send or recv; itself, if it waits in none.
  int awaited_by(int rank) const;
  /// One line for each rank: its liveness and its last call.
  std::string describe_ranks(const Call& call, std::span<const int> ranks) const;
  /// Whether the rank waits for a rank of another host, which may be the late one.
  bool is_in_call_between_hosts(int rank) const;

  std::shared_ptr<Membership> membership_;
  Range range_;
  ChannelHeader* header_;
  Lane* lanes_;
  Refusals* refusals_;
  std::byte* slots_;
  std::byte* outboxes_;
  std::uint64_t wake_counter_at_;  ///< its offset in the segment
  int rank_;
  bool swaps_slots_;
  std::size_t inline_bytes_;
  bool is_in_one_process_;
  std::vector<int> peers_;
  std::vector<int> absent_;
  std::size_t n_backed_slot_bytes_ = 0;    ///< of each slot that this rank writes
  std::size_t n_backed_outbox_bytes_ = 0;  ///< of each entry of its outbox

  std::uint64_t phase_ = 1;  ///< the current phase
  int slot_index_ = 1;       ///< phase_ % kPhases
  int rotation_ = 0;         ///< phase_ / kPhases, its last bit
  std::uint32_t fingerprint_ = 0;
  /// As if oversubscribed, until choose_waiting.
  Waiter waiter_{base::WaitPolicy::of_flags(/*n=*/1, /*n_cores=*/0)};
  bool sleepers_fence_ = false;  ///< so raising a flag needs no fence

  detail::TimeLimit limit_;  ///< of the current call
};

template <class Ready>
void Channel::wait(const Call& call, int awaited, const Ready& ready) {
  if (!waiter_.poll(ready)) wait_asleep(call, awaited, Condition(ready));
}

}  // namespace lockstep::shared
