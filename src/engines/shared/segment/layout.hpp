#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/cpus.hpp"
#include "engines/shared/segment/tuning.hpp"
#include "group/check.hpp"
#include "group/failure.hpp"
#include "record/flight_record.hpp"

/// The layout of shared memory. All processes that map it have the same base::layout_version(), the
/// hash of this header and of those whose types it uses.
/// Every type here but Mailbox is plain data and lock-free atomics, initially all zero bytes.
namespace lockstep::shared {

/// Incremented if the meaning of members changes but no struct does: other algorithms, other flags,
/// other places of a channel's parts. Nothing reads it: a part of this text, it changes the hash.
inline constexpr int kProtocol = 5;

inline constexpr std::uint64_t kMagic = 0x31706574736b6c6cULL;
inline constexpr int kMaxRanks = 512;
/// Two cache lines: the hardware prefetches adjacent lines in pairs.
inline constexpr std::size_t kLine = 128;
inline constexpr std::size_t kFreeRanges = 224;

enum class RankState : std::uint32_t { absent, alive, left, failed };

/// One rank of the world, on separate pages: its identity and how it ended.
struct alignas(kLine) RankBlock {
  std::atomic<RankState> state;
  std::atomic<std::int32_t> pid;
  std::atomic<std::uint64_t> start_time;      ///< see base::process_start_time
  std::atomic<std::uint64_t> pidfd_inode;     ///< see base::pidfd_inode
  std::atomic<std::uint64_t> pid_namespace;   ///< see base::namespace_of
  std::atomic<std::uint64_t> time_namespace;  ///< the same
  /// The waitpid status plus one, written by the launcher; 0 while the rank runs.
  std::atomic<std::int32_t> wait_status_plus_one;
  /// The order in which ranks end: see note_ended. 0: the rank runs, or nobody has noticed its end.
  std::atomic<std::uint32_t> ended_as;
  std::atomic<bool> has_finished;  ///< see Elastic::finish
  std::atomic<std::int32_t> cpu_quota;
  std::atomic<bool> receives_fences;  ///< see base/membarrier.hpp
  std::array<std::atomic<std::uint64_t>, std::tuple_size_v<base::CpuMask>> cpus;
  /// Offsets of the words on which its threads sleep, so that a launcher can wake them; 0: none.
  std::array<std::atomic<std::uint64_t>, 4> sleeps_at;
  /// Text of the exception with which the rank left; complete before state becomes failed.
  std::array<char, 1024> failure;
  internal::FlightRecord flight;
};

/// First bytes of the segment; n_ranks RankBlocks follow.
struct alignas(kLine) SegmentHeader {
  /// These three are read before the version is known to be the same, so they stay where they are.
  std::uint64_t magic;
  std::uint32_t version;         ///< base::layout_version()
  std::array<char, 20> release;  ///< base::version()
  std::int32_t n_ranks;
  std::uint64_t nonce;
  TuningOverrides tuning;              ///< of all channels
  std::uint64_t world_channel;         ///< offset of the world's channel
  std::atomic<std::uint64_t> n_bytes;  ///< end of the ranges allocated so far
  /// The bootstrap verified that all ranks are in one PID namespace.
  std::atomic<bool> has_one_pid_namespace;
  /// A rank has joined a world over another engine, which uses no other part of the segment.
  std::atomic<bool> has_joined_other_engine;
  bool has_launcher;  ///< that writes RankBlock::wait_status_plus_one
  /// Of `lockstep run --elastic`, which makes a segment for each generation of the world.
  std::uint32_t generation;
  bool is_elastic;
  std::atomic<bool> is_over;             ///< the generation; its ranks call regroup()
  std::atomic<std::uint32_t> n_waiting;  ///< processes that join the next generation
  std::atomic<std::uint64_t> n_steps;    ///< that its ranks have completed
  std::atomic<std::uint32_t> n_ended;    ///< see note_ended
  bool has_earlier_steps;                ///< an earlier generation has completed one
  std::array<char, 512> ending;          ///< why it is over; complete before is_over is set
  std::int32_t lost_rank_plus_one;  ///< of the world, whose loss ended it; 0: unknown. The same
  /// BootClock, in ns: when the lease of this host's launcher ends; 0: it has none. See NodeLease.
  std::atomic<std::int64_t> lease_until;
  /// How long the launchers may take to know who is lost, in ms; 0: base::patience::kVerdict.
  std::int64_t verdict_ms;
  std::atomic<std::int64_t> job_clock;  ///< written by the launcher: see base/job_clock.hpp
  /// Released ranges: see free_ranges.hpp.
  alignas(kLine) std::array<std::atomic<std::uint64_t>, kFreeRanges> free_ranges;
};

/// First bytes of a range: how many ranks still use it.
struct alignas(kLine) RangeHeader {
  std::atomic<std::uint32_t> n_users;
};

/// A rank's last call on a channel. Only that rank writes it. All fields are relaxed but `site`,
/// `n_refused`, `is_in_peers_memory` and `has_refusals`, because a reader either has acquired the
/// rank's flag of that same call, or prints a diagnosis in which an inconsistent view is harmless.
struct CallRecord {
  std::atomic<std::uint64_t> sequence;
  std::atomic<std::uint64_t> signature;  ///< op, dtype, reduction, finished, root: see encode_call
  std::atomic<std::uint64_t> count;      ///< elements, or a hash of Call::counts: see kByRank
  std::atomic<std::uint32_t> site;
  std::atomic<Check> check;  ///< how much the rank compares
  /// Calls that the rank has refused, also since this call: see Channel::refuse.
  std::atomic<std::uint32_t> n_refused;
  std::atomic<std::uint64_t>
      deadline_extended_until;           ///< base::ticks(): see Channel::extend_deadline
  std::atomic<bool> is_in_peers_memory;  ///< see Channel::enter_peers_memory
  std::atomic<bool> has_refusals;        ///< the rank's Refusals have memory
};

/// Set in a CallRecord's `signature` when the call has returned.
inline constexpr std::uint64_t kFinished = 1ULL << 24U;
/// Set there when the call has a count for each rank.
inline constexpr std::uint64_t kByRank = 1ULL << 25U;
/// Set there when the call is between hosts, over another engine; its root is a rank there.
inline constexpr std::uint64_t kBetweenHosts = 1ULL << 26U;

/// Of data behind a flag's word: in all of its lines, and in the first.
inline constexpr std::size_t kInlineBytes = 248, kFirstLineBytes = 56;

/// A rank's flag of one phase, with its inline payload.
struct alignas(kLine) Flag {
  /// Phase number (32 bits), fingerprint of the call (32 bits).
  std::atomic<std::uint64_t> word;
  std::array<std::byte, kInlineBytes> payload;
};

/// Head of a point-to-point message, in its first chunk.
struct MessageHead {
  std::atomic<std::int32_t> destination;
  std::uint32_t dtype;
  std::uint64_t count;
};

inline constexpr int kPhases = 3;  ///< slots and flags rotate over this many
inline constexpr int kOutboxDepth = 2;

/// One rank's control block on a channel.
struct alignas(kLine) Lane {
  std::array<Flag, kPhases> flags;
  alignas(kLine) CallRecord record;
  /// Chunks sent and chunks taken, each on a separate line because different ranks write them.
  alignas(kLine) std::atomic<std::uint64_t> n_sent;
  std::array<MessageHead, kOutboxDepth> heads;
  alignas(kLine) std::atomic<std::uint64_t> n_taken;
};

/// Why a rank refused a call: the text, stored in words because it may be read while a later text
/// is written, which only affects a diagnosis.
struct RefusalText {
  std::atomic<std::int32_t> peer;  ///< of a tagged send or recv; -1: a collective
  std::array<std::atomic<std::uint64_t>, 31> words;
};

/// The last calls that a rank refused: collectives of a channel, or tagged messages. Only that rank
/// writes it.
struct alignas(kLine) Refusals {
  std::atomic<std::uint32_t> n_texts;
  std::array<RefusalText, 8> texts;  ///< text i is of the refusals i, i + 8, ...
};

/// How many tagged sends and receives one rank has refused with one peer.
struct RefusedPairs {
  /// Set in a number by a rank that has refused fewer than its peer, and knows it.
  static constexpr std::uint32_t kMismatchSeen = std::uint32_t{1} << 31U;

  std::atomic<std::uint32_t> n_sends;
  std::atomic<std::uint32_t> n_receives;
};

enum class FailureState : std::uint32_t { none, writing, ready };

/// Why a channel is dead; written once, by the first rank that detects it.
struct alignas(kLine) FailureRecord {
  std::atomic<FailureState> state;
  internal::Failure::Kind kind;
  std::int32_t error_number;
  internal::PeerList peers;
  std::array<char, 16384> text;
};

/// First bytes of a channel behind its RangeHeader; Lanes, slots and outboxes follow.
struct alignas(kLine) ChannelHeader {
  std::int32_t n_ranks;
  std::uint32_t slot_bytes;
  std::uint32_t outbox_bytes;
  Tuning tuning;
  /// World rank of each member.
  std::array<std::int32_t, kMaxRanks> members;
  FailureRecord failure;
  /// Sleepers wait on `wake_counter`; a rank that makes something ready increments it if any sleep.
  alignas(kLine) std::atomic<std::uint32_t> wake_counter;
  std::atomic<std::uint32_t> n_sleepers;
};

/// One send or receive of TaggedMessages.
struct RequestEntry {
  /// reserved: its owner fills it in. unmatched: in a list, waits for its match. cancelled: still
  /// in a list; the next rank that scans it removes it. copying: `copier` has taken it out of the
  /// list and copies. abandoned: its owner no longer waits for the copier. The last three are its
  /// ends, until the owner has seen them.
  static constexpr std::int32_t kRefusalMismatch = -1;
  enum State : std::uint32_t {
    free,
    reserved,
    unmatched,
    cancelled,
    copying,
    abandoned,
    complete,
    mismatched,
    failed,
  };

  std::atomic<std::uint32_t> state;
  std::int32_t next;  ///< the next in its list: an index over all ranks' entries; -1: none
  // Atomics, because a timeout is reported without the lock.
  std::atomic<std::int32_t> peer;  ///< the other rank; -1: any
  std::atomic<std::int32_t> tag;
  std::atomic<std::uint32_t> is_send;
  std::uint32_t dtype;
  std::uint64_t address;  ///< in the owner's process
  std::uint64_t count;
  std::atomic<std::int32_t> copier;
  /// failed: an errno value; mismatched: the copier's dtype, or kRefusalMismatch.
  std::int32_t why;
  std::uint64_t copier_count;  ///< mismatched; kRefusalMismatch: the copier's n_refused
  std::uint32_t n_refused;     ///< of these messages with the peer, by the owner
};

/// Indices of the oldest and the newest entry; -1: none.
struct EntryList {
  std::int32_t first;
  std::int32_t last;
};

/// The unmatched messages to one rank: the sends of other ranks, and its receives.
struct alignas(kLine) Mailbox {
  pthread_mutex_t mutex;             ///< robust; guards the lists and RequestEntry::next
  std::atomic<std::int32_t> holder;  ///< of the mutex: a rank plus one
  /// How many entries of this rank have memory. Only that rank writes it, after backing them.
  std::atomic<std::int32_t> n_entries;
  std::atomic<bool> has_refusals;  ///< this rank's Refusals and RefusedPairs have memory
  EntryList sends;
  EntryList receives;
};

// The same headers give the same layout, whatever the compiler and the standard library.
static_assert(offsetof(SegmentHeader, version) == 8 && offsetof(SegmentHeader, release) == 12);
static_assert(sizeof(SegmentHeader) == 2560 && offsetof(SegmentHeader, free_ranges) == 768);
static_assert(sizeof(RankBlock) == 93568 && offsetof(RankBlock, flight) == 2176);
static_assert(sizeof(internal::FlightEntry) == 64 && sizeof(internal::FlightRecord) == 91392);
static_assert(sizeof(ChannelHeader) == 18816 && offsetof(ChannelHeader, failure) == 2176);
static_assert(sizeof(Lane) == 1152 && sizeof(Flag) == 256 && sizeof(CallRecord) == 56);
static_assert(sizeof(Refusals) == 2176 && sizeof(RefusedPairs) == 8);
static_assert(sizeof(RequestEntry) == 64 && sizeof(Mailbox) == 128);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<RankState>::is_always_lock_free);

}  // namespace lockstep::shared
