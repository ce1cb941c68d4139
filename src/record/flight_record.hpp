#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <lockstep/engine.hpp>
#include <lockstep/types.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/ticks.hpp"

/// The flight recorder's memory: a rank's last operations, readable by other processes while it
/// runs and after it has died. Plain data and lock-free atomics, initially all zero bytes.
namespace lockstep::internal {

/// One operation.
///
/// Protocol. The writer is the thread inside the call. It stores `begun`, then the fields, then
/// `complete`, the same number; each store is a release. A reader loads them in the opposite order,
/// with acquire: if both numbers are equal, no other call has written the fields that it read.
///
/// Two threads have one entry at once only if the kernel preempts one of them while others wrap
/// around all entries, which takes many times as long as the stores of a call. A thread that is
/// preempted after its `begun` has left the two numbers different: others pass over its block. One
/// that is preempted before it finds, after its `begun`, that the block is no longer its own: it
/// stores 0, takes another entry, and whatever was in this one is hidden. (It needs no fence: the
/// switch to another thread and back is one.) For two calls in an entry that a reader accepts, two
/// threads would have to be preempted, one at each of these places, while others wrap around twice.
/// `end` changes once more, under the same number.
struct alignas(64) FlightEntry {
  /// Values of `end` that are not times.
  static constexpr std::uint64_t kUnderWay = 0;
  static constexpr std::uint64_t kFailed = 1;
  static constexpr std::uint64_t kShort = 2;  ///< finished a few microseconds after `start` at most
  static constexpr std::uint64_t kPeerEnded = 3;  ///< failed with PeerLost or PeerFailed

  std::atomic<std::uint64_t> begun;      ///< number of the call; 0: none
  std::atomic<std::uint64_t> sequence;   ///< in its group, from 1
  std::atomic<std::uint64_t> signature;  ///< see encode_call
  std::atomic<std::uint64_t> count;
  std::atomic<std::uint64_t> start;       ///< base::ticks()
  std::atomic<std::uint64_t> end;         ///< base::ticks(), or one of the above
  std::atomic<std::uint64_t> collective;  ///< number of the collective in its group; 0: send, recv
  std::atomic<std::uint16_t> site;
  std::atomic<std::uint16_t> group;
  std::atomic<std::uint32_t> complete;  ///< low bits of the number
};

/// A group as seen by one of its ranks. name, rank and size are complete before it is counted.
struct alignas(64) FlightGroup {
  std::atomic<std::uint64_t> n_calls;
  std::atomic<std::uint64_t> n_bytes;
  std::int32_t rank;
  std::int32_t size;
  std::array<char, 104> name;
};

struct alignas(128) FlightRecord {
  /// A group takes numbers in blocks, so that a rank's threads contend once per kBlock calls.
  static constexpr std::size_t kBlock = 16;
  /// The last 1,024 operations, and the block being filled.
  static constexpr std::size_t kEntries = 1024 + kBlock;
  static constexpr std::size_t kMaxSites = 128;
  static constexpr std::size_t kSiteLength = 64;
  static constexpr std::size_t kMaxGroups = 128;

  std::atomic<std::uint64_t> n_blocks;  ///< blocks taken so far
  alignas(128) std::int32_t rank;
  std::int32_t world_size;
  std::uint32_t job;  ///< the same on all ranks, different for each job; 0: unknown
  std::int32_t pid;
  std::atomic<std::uint32_t> n_sites;
  std::atomic<std::uint32_t> n_groups;
  /// The rank has written its record file itself.
  std::atomic<std::uint32_t> is_written;
  std::uint32_t generation_plus_one;  ///< of an elastic world; 0: it is not elastic
  /// A reading of both clocks from when the rank joined.
  std::uint64_t anchor_ticks;
  std::int64_t anchor_ns;
  std::array<FlightEntry, kEntries> entries;
  /// Entry 0 stands for all groups, and all source lines, beyond the capacity.
  std::array<FlightGroup, kMaxGroups> groups;
  /// "file:line" of each source line this rank has called from; complete before its number is used.
  std::array<std::array<char, kSiteLength>, kMaxSites> sites;
};

/// An operation as read from a FlightRecord.
struct Operation {
  enum class State : std::uint8_t { under_way, finished, failed };

  std::uint64_t number;
  std::uint64_t sequence;
  std::uint64_t collective;  ///< 0: send, recv
  Op op;
  DType dtype;
  ReduceOp reduce;
  int root;
  std::uint64_t count;
  std::uint64_t n_bytes;
  State state;
  bool has_peer_ended;     ///< the call failed with PeerLost or PeerFailed
  std::int64_t start_ns;   ///< CLOCK_MONOTONIC
  std::int64_t end_ns;     ///< if finished
  std::size_t group;       ///< index into FlightRecord::groups
  std::string_view where;  ///< points into the record
};

/// The current contents of the record, in the order in which the operations began. The input is
/// not trusted: a damaged record gives wrong operations, nothing worse.
std::vector<Operation> operations_of(const FlightRecord& record);
/// The same in times of the reader's CLOCK_MONOTONIC, which differs in another time namespace;
/// `anchor` is an earlier reading there.
std::vector<Operation> operations_of(const FlightRecord& record, const base::TickAnchor& anchor);

std::string_view site_of(const FlightRecord& record, std::uint32_t site) noexcept;
std::string_view name_of(const FlightGroup& group) noexcept;
std::size_t n_groups_of(const FlightRecord& record) noexcept;

/// Text of a rank-N.json; docs/observability.md has the format. `reason`: why it is written.
std::string json_of(const FlightRecord& record, std::string_view reason, std::string_view host);

/// DIR/rank-N.json.
std::string record_file(const FlightRecord& record, const std::string& dir);
/// Writes DIR/rank-N.json atomically, on the rank's host. Throws SystemError.
void write_record(const FlightRecord& record, std::string_view reason, const std::string& dir);

}  // namespace lockstep::internal
