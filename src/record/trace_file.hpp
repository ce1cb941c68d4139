#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <lockstep/engine.hpp>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "base/guarded_fd.hpp"
#include "base/ticks.hpp"
#include "record/flight_record.hpp"

/// What `lockstep run --trace` collects: every call and region of a rank, in a file that the rank
/// maps. Its contents outlive the rank, however it dies. Plain data and lock-free atomics,
/// initially all zero bytes.
namespace lockstep::internal {

/// Written by one thread. It stores the fields, then the kind; at the end of the event, it stores
/// whether it failed, then the end time.
struct alignas(64) TraceEvent {
  enum class Kind : std::uint8_t { none, call, region, thread };
  static constexpr std::size_t kTextLength = 40;

  struct CallPart {
    std::uint64_t signature;  ///< see encode_call
    std::uint64_t count;
    std::uint64_t sequence;
    std::uint64_t collective;  ///< 0: send, recv
    std::uint32_t site;
    std::uint32_t group;
  };
  union {
    CallPart call;
    std::array<char, kTextLength> text;  ///< region or thread name; null-terminated unless full
  };
  std::uint64_t start;             ///< base::ticks()
  std::atomic<std::uint64_t> end;  ///< base::ticks(); 0: not ended
  std::int32_t thread;             ///< the system's thread id
  std::atomic<Kind> kind;          ///< none: not complete
  std::atomic<bool> has_failed;
};
static_assert(sizeof(TraceEvent) == 64);

/// A trace's file.
struct alignas(4096) TraceFile {
  static constexpr std::string_view kMagic = "lockstep trace 2";
  /// 64 MiB; viewers cannot load more from many ranks. Later events are only counted.
  static constexpr std::size_t kMaxEvents = std::size_t{1} << 20U;

  std::array<char, 16> magic;  ///< written last, when the header is complete
  std::int32_t rank;
  std::int32_t world_size;
  std::int32_t pid;
  std::int32_t n_restarts;
  std::uint32_t job;  ///< as FlightRecord::job
  /// Identifies the CLOCK_MONOTONIC: the same for all processes of one running system and one time
  /// namespace.
  std::array<char, 64> clock;
  std::array<char, 64> host;
  std::uint64_t anchor_ticks;
  std::int64_t anchor_ns;
  std::atomic<std::uint64_t> n_events;  ///< begun, including events without space
  std::atomic<std::uint64_t> n_room;    ///< events below this index have memory
  std::atomic<int> error_number;        ///< why there is no more space; 0: kMaxEvents
  std::array<std::array<char, 104>, FlightRecord::kMaxGroups> groups;
  std::array<std::array<char, FlightRecord::kSiteLength>, FlightRecord::kMaxSites> sites;
  std::array<TraceEvent, kMaxEvents> events;
};

/// The writing side. Threads: any.
class Trace {
 public:
  /// Creates DIR/rank-N.XXXXXX for the rank of `record`, with the record's sites and groups.
  /// Throws SystemError.
  Trace(const std::string& dir, const FlightRecord& record, int n_restarts);

  void name_site(std::uint32_t number, std::string_view text) noexcept;
  void name_group(std::uint32_t number, std::string_view text) noexcept;

  /// nullptr if there is no space left. No system call, lock or allocation except for one event in
  /// 1,024 and the first event of a thread.
  TraceEvent* begin(const TraceEvent::CallPart& call, std::uint64_t start) noexcept;
  TraceEvent* begin(std::string_view region, std::uint64_t start) noexcept;
  static void end(TraceEvent& event, std::uint64_t end, bool has_failed) noexcept {
    if (has_failed) event.has_failed.store(true, std::memory_order_relaxed);
    event.end.store(end, std::memory_order_release);
  }

 private:
  TraceEvent* take(std::int32_t thread, std::uint64_t start) noexcept;
  TraceEvent* begin_text(TraceEvent::Kind kind, std::string_view text, std::int32_t thread,
                         std::uint64_t start) noexcept;
  std::int32_t this_thread() noexcept;
  bool make_room(std::uint64_t number) noexcept;

  base::GuardedFd fd_;
  std::shared_ptr<TraceFile> file_;
  std::mutex mutex_;  // guards the reservation of space
};

/// Identifies the running system, so that times of different systems are not compared; empty if
/// unknown.
std::string name_of_clock();

}  // namespace lockstep::internal
