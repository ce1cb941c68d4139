#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <lockstep/engine.hpp>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engines/shared/bootstrap/layout.hpp"
#include "engines/shared/bootstrap/membership.hpp"
#include "engines/shared/bootstrap/segment.hpp"
#include "group/check.hpp"

namespace lockstep::shared {

/// The memory through which the ranks of one group talk: one phase after another, all together.
///
/// The protocol. Every collective is a sequence of phases, numbered from 1 for the life of the
/// channel. In phase s a rank
///   (1) may write its own slot and flag payload of s (they rotate over kPhases = 3),
///   (2) may read what its peers wrote in phases s - 1 and s - 2,
///   (3) may rewrite, in its own slot of s - 1, what no peer reads before phase s + 1,
/// and ends the phase by end_phase(): it raises its flag of s and waits for all flags of s. A call
/// may end in the middle of a phase, after reading; the next call goes on in that phase.
///
/// Proof that nobody reads what is being overwritten. Rank A writes its slot of s in phase s. That
/// slot held the data of s - 3, which a peer B may read in phases s - 2 and s - 1 only (2). A is in
/// phase s, so it has seen B's flag of s - 1, which B raised after its last read in phase s - 1.
/// Proof that nobody reads what is not yet written. B reads A's data of s - 1 in phase s, so B has
/// seen A's flag of s - 1 (acquire), which A raised (release) after writing. The same holds for
/// s - 2, and for (3) between s and s + 1. The flag itself follows (1) and (2), and B, polling it
/// in phase s, finds there the number s - 3 or s and nothing else.
///
/// Two ranks swap their slots from one turn of the rotation to the next: a rank writes where it
/// read three phases ago. Lines that it read for writing (base::prefetch_to_write) are its own by
/// then, so each line goes from core to core once a phase and not twice. The proof stays: A writes
/// in s the slot that B wrote in s - 3. A itself reads there in phases s - 2 and s - 1 only (2),
/// before it comes to s; and B, who may touch it until the end of s - 2 (3), raised its flag of s -
/// 2 after that, which A has seen.
///
/// Sleeping. A waiter polls, then counts itself among the sleepers, reads the wake_counter, polls
/// once more and sleeps while the wake_counter keeps its value. Who makes something ready looks at
/// the number of sleepers afterwards. All of these are sequentially consistent, so either the
/// waiter's last poll sees what is ready, or the other side sees the sleeper and rings. Where ranks
/// exceed cores, flags are counted as well and only the last of a phase rings: one wake-up per
/// phase, not one per rank.
///
/// Raising a flag is on every call's way and sleeping is not, so where the kernel can fence all
/// ranks at once (base::fence_registered) the sleeper does so between counting itself and its last
/// poll, and a flag is raised by a plain release store. The store may then pass the look at the
/// sleepers; but the fence stands somewhere between two instructions of the raiser. If both the
/// store and the look stand before it, the last poll sees the flag. Else the look stands after it,
/// and sees the sleeper. Should the kernel refuse a fence, a lost wake-up lasts until the sleeper
/// looks around (kLivenessInterval).
///
/// A flag carries the call's fingerprint, so ranks that call different things find out in the
/// first phase, at no cost. The rank that finds a failure first writes it into the channel;
/// everyone who waits there throws it.
///
/// Threads: one at a time.
class Channel {
 public:
  /// Reserves a channel for `members` (world ranks), each of whom then attaches to it.
  static std::uint64_t make(Segment& segment, std::span<const int> members);

  Channel(std::shared_ptr<Membership> membership, std::uint64_t offset, int rank, int n_ranks);

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return header_->n_ranks; }
  int world_rank(int rank) const noexcept {
    return header_->members[static_cast<std::size_t>(rank)];
  }
  const std::shared_ptr<Membership>& membership() const noexcept { return membership_; }
  bool is_oversubscribed() const noexcept { return is_oversubscribed_; }
  /// Whether a rank will write where it now reads what a peer put in its slot.
  bool swaps_slots() const noexcept { return swaps_slots_; }
  std::size_t slot_bytes() const noexcept { return header_->slot_bytes; }
  const Tuning& tuning() const noexcept { return header_->tuning; }
  /// Of one phase in a pipeline: what stays in the core's cache.
  std::size_t chunk_bytes() const noexcept {
    return std::min<std::size_t>(tuning().chunk_bytes, slot_bytes());
  }

  /// Chooses how to wait, by the cores that all ranks of the world may use. For every member at
  /// the same place in the sequence of calls, after the whole world has joined.
  void choose_waiting();

  /// Around the phases of one call: peers see it while it lasts, and after.
  void begin(const Call& call);
  void end() noexcept;
  /// In place of begin, for a call over another engine, between hosts.
  void begin_elsewhere(const Call& call);

  /// Where this rank writes in this phase: n_bytes, up to slot_bytes().
  std::byte* write_slot(std::size_t n_bytes) noexcept {
    return place(rank_, /*phases_ago=*/0, n_bytes);
  }
  /// What `rank` wrote `phases_ago` (1 or 2) phases ago, of the same n_bytes.
  std::byte* read_slot(int rank, int phases_ago, std::size_t n_bytes) noexcept {
    return place(rank, phases_ago, n_bytes);
  }
  /// Ends the phase. Throws MismatchError, TimeoutError, PeerLost, PeerFailed, SystemError.
  void end_phase(const Call& call);

  /// Point to point, in chunks through the sender's outbox. The sender may be kOutboxDepth chunks
  /// ahead; the receiver named in the oldest chunk takes it. n_sent is released after a chunk is
  /// written and n_taken after it is read, and each side acquires the other's counter before it
  /// touches a place.
  void send(const Call& call);
  void receive(const Call& call);

  /// This rank is at work elsewhere for all members, for that long from now at most: until then no
  /// one takes it for late, unless its process is stopped.
  void extend_deadline(std::chrono::nanoseconds at_most) noexcept;

  /// Makes the channel dead for all members with a system call's error, and throws it.
  [[noreturn]] void fail_system(const Call& call, int error_number, const std::string& text);
  /// Makes the channel dead for all members because this one cannot go on. From any thread.
  void abandon(std::string_view reason) noexcept;
  /// The same with the type and the text of an error found elsewhere.
  void end_with(const Error& error) noexcept;

 private:
  /// What a waiter waits for: a question that costs a few loads.
  class Condition {
   public:
    template <class Ready>
    explicit Condition(const Ready& ready)
        : ready_(&ready), ask_([](const void* r) { return (*static_cast<const Ready*>(r))(); }) {}
    bool operator()() const { return ask_(ready_); }

   private:
    const void* ready_;
    bool (*ask_)(const void*);
  };
  static constexpr int kEverybody = -1;

  Lane& lane(int rank) const noexcept { return lanes_[rank]; }
  std::byte* place(int rank, int phases_ago, std::size_t n_bytes) const noexcept {
    const int index = slot_index_ - phases_ago < 0 ? slot_index_ - phases_ago + kPhases
                                                   : slot_index_ - phases_ago;
    if (n_bytes <= kInlineBytes) {
      return lane(rank).flags[static_cast<std::size_t>(index)].payload.data();
    }
    const int rotation = slot_index_ - phases_ago < 0 ? rotation_ - 1 : rotation_;
    const int owner = swaps_slots_ ? rank ^ (rotation & 1) : rank;
    return slots_ + static_cast<std::size_t>(owner * kPhases + index) * header_->slot_bytes;
  }
  std::byte* outbox(int rank, std::uint64_t chunk) const noexcept;
  /// Until the oldest chunk of the outbox of call.root is for this rank; which one that is.
  std::uint64_t wait_for_chunk(const Call& call);
  std::uint64_t flag_of(int rank) const noexcept {
    return lane(rank).flags[static_cast<std::size_t>(slot_index_)].word.load(
        std::memory_order_seq_cst);
  }
  bool is_raised(std::uint64_t word) const noexcept { return word >> 32 == (phase_ & 0xffffffffU); }

  // wait.cpp
  template <class Ready>
  void wait(const Call& call, int awaited, const Ready& ready);
  void wait_asleep(const Call& call, int awaited, Condition ready);
  void sleep(Condition ready, std::chrono::nanoseconds at_most);
  void check_peer_liveness(const Call& call, int awaited, Condition ready, unsigned round);
  /// Valid until the next call of it; allocates nothing, since a late peer is no reason to.
  const std::vector<int>& absent(int awaited);
  /// Those of them that have no reason to be; valid as long.
  const std::vector<int>& late(int awaited);
  void wake_sleepers() noexcept {
    if (header_->n_sleepers.load(std::memory_order_seq_cst) != 0) ring();  // model: look
  }
  void ring() noexcept;

  // failure.cpp
  /// Writes the channel's failure, unless there is one already.
  void note_failure(FailureKind kind, std::string_view text, int error_number) noexcept;
  [[noreturn]] void fail(const Call& call, FailureKind kind, const std::string& text,
                         int error_number = 0);
  [[noreturn]] void fail_mismatch(const Call& call);
  [[noreturn]] void fail_timeout(const Call& call, std::vector<int> absent);
  [[noreturn]] void throw_failure(const Call& call);
  bool has_failed() const noexcept {
    return header_->failure.state.load(std::memory_order_seq_cst) != FailureState::none;
  }
  std::string call_of(int rank) const;
  /// It waits for a rank of another host, which may be late, and not it.
  bool is_in_call_elsewhere(int rank) const;

  std::shared_ptr<Membership> membership_;
  Range range_;
  ChannelHeader* header_;
  Lane* lanes_;
  std::byte* slots_;
  std::byte* outboxes_;
  int rank_;
  bool swaps_slots_;
  std::vector<int> peers_;
  std::vector<int> absent_;

  std::uint64_t phase_ = 1;  ///< the one being worked in
  int slot_index_ = 1;       ///< phase_ % kPhases
  int rotation_ = 0;         ///< phase_ / kPhases, its last bit
  std::uint32_t fingerprint_ = 0;
  bool is_oversubscribed_ = true;  ///< ranks exceed cores
  bool sleepers_fence_ = false;    ///< so that who raises a flag need not

  const char* site_file_ = nullptr;
  std::uint_least32_t site_line_ = 0;
  std::uint32_t site_ = 0;
  std::uint64_t site_hash_ = 0;
  const internal::Check check_ = internal::check_level();
  std::chrono::steady_clock::time_point wait_began_;
  bool has_waited_ = false;  ///< wait_began_ is of this call
};

template <class Ready>
void Channel::wait(const Call& call, int awaited, const Ready& ready) {
  // With a core for each rank the others are at work right now, and a look costs less than a
  // sleep. Without, every poll keeps the one who is awaited from running.
  constexpr int kPolls = 4000;
  constexpr int kYields = 100;
  const int n_polls = is_oversubscribed_ ? kYields : kPolls;
  for (int i = 0; i < n_polls; ++i) {
    if (ready()) return;
    if (is_oversubscribed_) {
      base::yield_cpu();
    } else if (i > kPolls / 4) {
      base::cpu_relax();
    }
  }
  wait_asleep(call, awaited, Condition(ready));
}

}  // namespace lockstep::shared
