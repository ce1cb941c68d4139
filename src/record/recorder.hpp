#pragma once

#include <array>
#include <atomic>
#include <lockstep/engine.hpp>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>

#include "base/fork_guard.hpp"
#include "base/ticks.hpp"
#include "record/flight_record.hpp"
#include "record/progress.hpp"
#include "record/signature.hpp"
#include "record/trace_file.hpp"

namespace lockstep::internal {

/// The writing side of a rank's flight record, shared by all groups of the rank. Threads: any.
class Recorder {
 public:
  /// The memory must be zero except for rank, world_size and job.
  explicit Recorder(std::shared_ptr<FlightRecord> memory);
  /// For engines that provide no memory: in a file of `dir`, which remains if the rank is killed;
  /// without `dir`, or if there is no space, in this process's memory.
  static std::shared_ptr<Recorder> in_process(int rank, int world_size,
                                              const std::optional<std::string>& dir = {});

  FlightRecord& record() const noexcept { return *record_; }

  /// The number under which readers find this source line; 0: there is no room. Takes a lock for a
  /// new line only.
  std::uint32_t site(const std::source_location& where) {
    const Site wanted{where.file_name(), where.line()};
    const std::uint32_t likely = slot(first_slot(wanted)).load(std::memory_order_acquire);
    return likely != 0 && sites_[likely] == wanted ? likely : find_or_add(wanted);
  }
  /// The number under which readers find a group in which this rank is `rank`.
  std::uint32_t add_group(std::string_view name, int rank, int size);

  /// Sets where write_on_failure() writes the record. Call before the first operation.
  void write_to(std::string dir) { dir_ = std::move(dir); }
  /// Begins the rank's trace. Call before the first group. `n_restarts`: Env::restart. Throws
  /// SystemError.
  void trace_to(const std::string& dir, int n_restarts) {
    trace_ = std::make_shared<Trace>(dir, *record_, n_restarts);
  }
  /// Null if tracing is off.
  const std::shared_ptr<Trace>& trace() const noexcept { return trace_; }
  /// A group of this rank is dead: writes the record's file, once, if write_to was called. Never
  /// fails, because the error that the caller is about to throw matters more. A fork of the rank's
  /// process writes nothing.
  void write_on_failure(std::string_view reason) noexcept;
  /// Whether write_on_failure was called.
  bool has_failed() const noexcept { return has_failed_.load(std::memory_order_relaxed); }

 private:
  struct Site {
    const char* file;
    std::uint_least32_t line;
    friend bool operator==(const Site&, const Site&) = default;
  };
  static std::size_t first_slot(const Site& site) noexcept {
    const std::uint64_t key = reinterpret_cast<std::uintptr_t>(site.file) + site.line;
    return key * 0x9e3779b97f4a7c15ULL >> 32U;
  }
  std::atomic<std::uint8_t>& slot(std::size_t i) noexcept {
    return site_numbers_[i % site_numbers_.size()];
  }
  std::uint32_t find_or_add(const Site& wanted);

  base::ForkGuard process_;
  std::shared_ptr<FlightRecord> record_;
  std::optional<std::string> dir_;
  std::atomic<bool> has_failed_{false};
  std::shared_ptr<Trace> trace_;
  std::mutex mutex_;  // guards writes to sites_, and to the record's sites and groups
  std::atomic<std::uint32_t> n_sites_{0};
  std::array<Site, FlightRecord::kMaxSites> sites_{};  // element i is the record's entry i
  /// A hash table of the elements of sites_, which it publishes; 0: none. Half of it stays empty.
  std::array<std::atomic<std::uint8_t>, 2 * FlightRecord::kMaxSites> site_numbers_{};
};

/// Writes one group's calls into its rank's record.
///
/// Cost. See NativeEngine::reports_progress; a call that had to sleep reads the clock twice, and so
/// does every call for a trace, in which no peer may appear to leave a call before this rank has
/// entered it. Threads: one at a time.
class GroupRecorder final : public Progress {
 public:
  /// recorder: null if nothing is recorded. engine_reports: see NativeEngine::reports_progress.
  GroupRecorder(std::shared_ptr<Recorder> recorder, std::string_view group, int rank, int size,
                bool engine_reports);

  const std::shared_ptr<Recorder>& recorder() const noexcept { return recorder_; }

  /// Before a call.
  void begin(Call& call) {
    if (record_ == nullptr) return;
    entry_ = nullptr;
    event_ = nullptr;
    is_short_ = trace_ == nullptr && engine_reports_ && n_bytes_of(call) <= kSmall;
    if (engine_reports_) call.progress = this;
    if (!is_short_) open(call);
  }
  void arrived(const Call& call) override {
    if (entry_ == nullptr) open(call);
  }
  void slept(const Call& call) override {
    arrived(call);
    is_short_ = false;
  }
  /// After the call: returned, or thrown.
  void end(const Call& call) {
    if (record_ == nullptr) return;
    arrived(call);
    const std::uint64_t now = is_short_ ? FlightEntry::kShort : base::ticks();
    close(now);
    if (event_ != nullptr) Trace::end(*event_, now, /*has_failed=*/false);
  }
  void fail(const Call& call, bool has_peer_ended = false) noexcept try {
    if (record_ == nullptr) return;
    arrived(call);
    close(has_peer_ended ? FlightEntry::kPeerEnded : FlightEntry::kFailed);
    if (event_ != nullptr) Trace::end(*event_, base::ticks(), /*has_failed=*/true);
  } catch (const std::bad_alloc&) {  // the call is not recorded; its own error matters more
  }
  /// A collective that this rank refused: it has a number, so that those of the later ones are the
  /// same on all ranks that refused as many.
  void skip_collective() noexcept { ++n_collectives_; }

 private:
  void take_block();
  FlightEntry& claim_entry();
  void open(const Call& call);
  void close(std::uint64_t end) noexcept {
    // Other threads may have wrapped around the ring meanwhile. If one does so between these two
    // lines, it loses an end time, which only affects a diagnosis.
    if (entry_->begun.load(std::memory_order_relaxed) == number_) {
      entry_->end.store(end, std::memory_order_release);
    }
  }

  /// For calls that move more bytes, the cost of two clock reads is negligible.
  static constexpr std::size_t kSmall = 16384;

  std::shared_ptr<Recorder> recorder_;
  FlightRecord* record_ = nullptr;  ///< null if nothing is recorded
  Trace* trace_ = nullptr;          ///< null if tracing is off
  FlightGroup* group_ = nullptr;
  std::uint32_t group_number_ = 0;
  bool engine_reports_;

  std::uint64_t block_ = 0;   ///< number of the block taken, from 1
  std::size_t n_left_ = 0;    ///< entries left in it
  std::uint64_t number_ = 0;  ///< of entry_
  std::uint64_t n_collectives_ = 0;
  FlightEntry* entry_ = nullptr;  ///< of the current call, once open
  TraceEvent* event_ = nullptr;   ///< the same in the trace, if there is one with space
  bool is_short_ = false;         ///< so far
};

}  // namespace lockstep::internal
