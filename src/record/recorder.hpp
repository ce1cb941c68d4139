#pragma once

#include <lockstep/engine.hpp>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include "base/process_tag.hpp"
#include "base/ticks.hpp"
#include "record/flight_record.hpp"
#include "record/signature.hpp"
#include "record/trace_file.hpp"

namespace lockstep::internal {

/// The writing side of a rank's flight record, shared by all groups of the rank. Threads: any.
class Recorder {
 public:
  /// In memory that is zero but for rank, world_size and job.
  explicit Recorder(std::shared_ptr<FlightRecord> memory);
  /// For engines that have no memory to give: in a file of `dir`, so that a killed rank leaves it;
  /// else, or without room there, in memory of this process.
  static std::shared_ptr<Recorder> in_process(int rank, int world_size,
                                              const std::optional<std::string>& dir = {});

  FlightRecord& record() const noexcept { return *record_; }

  /// Number under which readers find this place of the program.
  std::uint32_t site(const std::source_location& where);
  /// Number under which readers find a group, of which this rank is `rank`.
  std::uint32_t add_group(std::string_view name, int rank, int size);

  /// Where died() writes the record. Before the first operation.
  void write_to(std::string dir) { dir_ = std::move(dir); }
  /// Begins the rank's trace. Before the first group. Throws SystemError.
  void trace_to(const std::string& dir) { trace_ = std::make_shared<Trace>(dir, *record_); }
  /// Null where nobody traces.
  const std::shared_ptr<Trace>& trace() const noexcept { return trace_; }
  /// A group of this rank is dead: writes the record's file, the first time and if it has a place.
  /// Never fails: the error that the caller is about to throw matters more. A fork of the rank's
  /// process writes nothing.
  void died(std::string_view reason) noexcept;

 private:
  struct Site {
    const char* file;
    std::uint_least32_t line;
  };

  base::ProcessTag process_;
  std::shared_ptr<FlightRecord> record_;
  std::optional<std::string> dir_;
  std::shared_ptr<Trace> trace_;
  std::mutex mutex_;         // guards sites_, and the writing of the record's sites and groups
  std::vector<Site> sites_;  // place i is the record's entry i + 1
};

/// Base of an engine, besides those that bring a recorder(), whose run() tells Call::track, each
/// time before it waits, how far the call is.
struct TellsTrack {};

/// One group's way into its rank's record.
///
/// What it costs. An engine whose calls may take little more than a look at the clock says how far
/// a call is; then the entry is written while the peers' answer is on its way, and a short call is
/// timed once, a second time only if it had to sleep. For other engines the entry is written, and
/// timed, before and after the call; and so it is for a trace, where no peer may seem to leave a
/// call before this rank has come to it. Threads: one at a time.
class Track {
 public:
  /// recorder: null where nothing is recorded. `engine_tells`: the engine calls arrived and slept.
  Track(std::shared_ptr<Recorder> recorder, std::string_view group, int rank, int size,
        bool engine_tells);

  const std::shared_ptr<Recorder>& recorder() const noexcept { return recorder_; }

  /// Before a call.
  void begin(Call& call) {
    if (record_ == nullptr) return;
    entry_ = nullptr;
    event_ = nullptr;
    is_short_ = trace_ == nullptr && engine_tells_ && n_bytes_of(call) <= kSmall;
    if (engine_tells_) call.track = this;
    if (!is_short_) open(call);
  }
  /// This rank's part is on its way to the peers. May be called again.
  void arrived(const Call& call) {
    if (entry_ == nullptr) open(call);
  }
  /// The call waits for so long that the thread sleeps. May be called again.
  void slept(const Call& call) {
    arrived(call);
    is_short_ = false;
  }
  /// After the call: returned, or thrown.
  void end(const Call& call) {
    if (record_ == nullptr) return;
    arrived(call);
    const std::uint64_t now = is_short_ ? FlightEntry::kSoon : base::ticks();
    close(now);
    if (event_ != nullptr) Trace::end(*event_, now, /*has_failed=*/false);
  }
  void fail(const Call& call) {
    if (record_ == nullptr) return;
    arrived(call);
    close(FlightEntry::kFailed);
    if (event_ != nullptr) Trace::end(*event_, base::ticks(), /*has_failed=*/true);
  }

 private:
  void open(const Call& call);
  void close(std::uint64_t end) noexcept {
    // Others may have gone once around the ring meanwhile. Who does so between these two lines
    // loses an end time, in a record that people read.
    if (entry_->stamp.load(std::memory_order_relaxed) == stamp_) {
      entry_->end.store(end, std::memory_order_release);
    }
  }

  /// A call that moves more takes so long that two looks at the clock do not count.
  static constexpr std::size_t kSmall = 16384;

  std::shared_ptr<Recorder> recorder_;
  FlightRecord* record_ = nullptr;  ///< null where nothing is recorded
  Trace* trace_ = nullptr;          ///< null where nobody traces
  FlightGroup* group_ = nullptr;
  std::uint32_t group_number_ = 0;
  bool engine_tells_;

  std::uint64_t block_ = 0;  ///< number of the block taken, from 1
  std::size_t n_left_ = 0;   ///< entries of it
  std::uint64_t stamp_ = 0;  ///< of entry_
  std::uint64_t n_collectives_ = 0;
  FlightEntry* entry_ = nullptr;  ///< of the call, once it is open
  TraceEvent* event_ = nullptr;   ///< the same in the trace, if there is one and it has room
  bool is_short_ = false;         ///< so far

  const char* site_file_ = nullptr;
  std::uint_least32_t site_line_ = 0;
  std::uint32_t site_ = 0;
};

}  // namespace lockstep::internal
