#pragma once

#include <poll.h>
#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "engines/shared/bootstrap/job.hpp"
#include "run/child_process.hpp"
#include "run/guard.hpp"
#include "run/nodes.hpp"
#include "run/options.hpp"
#include "run/output_mux.hpp"
#include "run/signals.hpp"

namespace lockstep::run {

/// Shared by all attempts of one launcher.
struct LaunchContext {
  const Options& options;
  std::string program;     ///< a path
  std::vector<int> cores;  ///< that ranks may run on
  rlimit open_files;       ///< limit at the start of the launcher
  const Guard& guard;
  const Signals& signals;
  OutputMux& mux;
};

/// How an attempt ended.
struct Outcome {
  int exit_code = 0;         ///< 0, or that of the first rank that failed; 128 + n for signal n
  bool interrupted = false;  ///< by a signal to the launcher
};

/// The ranks of one start, until all of them and all processes they started have ended.
///
/// After the first failure the others are notified through the segment and have kNotice to exit by
/// themselves, with their own report; then comes SIGTERM, and SIGKILL after the grace period. A
/// signal to the launcher is forwarded to the ranks at once and starts the same grace period.
class Attempt {
 public:
  /// `nodes`: the launchers on other machines; null if there are none.
  Attempt(const LaunchContext& context, int n_restarts, Nodes* nodes);
  /// Kills the remaining processes.
  ~Attempt();
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  /// Throws ExecError, UsageError, SystemError if the ranks cannot be started; none is left running
  /// then.
  Outcome run();

 private:
  using Clock = std::chrono::steady_clock;

  // running -> ended: the process has exited but is not reaped, which keeps its process group id
  // from being reused. Processes it left in the group may finish writing.
  // ended -> reaped: the group is killed.
  enum class State : std::uint8_t { running, ended, reaped };
  struct Rank {
    pid_t pid;
    State state = State::running;
    Clock::time_point end{};                                // of its process
    Clock::time_point deadline = Clock::time_point::max();  // of the state
  };
  enum class Phase : std::uint8_t { running, notified, terminating, killing };

  void start_ranks();
  void wait_for_events();
  void handle_signals();
  void forward(int signal);
  void look_for_ends(pid_t first);
  void look_at(int rank);
  void report_failure(int rank, int wait_status);
  std::string name_of(int rank) const;
  std::string describe_leaver(int failed_rank) const;
  void end_with(const NodeFailure& failure);
  int world_rank(std::size_t local_rank) const;
  void advance();
  void advance_rank(int rank);
  void reap(Rank& rank);
  void terminate_groups(int signal);
  void kill_groups();
  void signal_groups(int signal);
  void write_records();
  void warn_if_none_joined();
  bool over() const;
  void say(const std::string& text);

  const LaunchContext& context_;
  const int n_restarts_;
  Nodes* const nodes_;
  const Placement placement_;
  shared::Job job_;
  const Clock::time_point start_ = Clock::now();
  std::vector<Rank> ranks_;
  Phase phase_ = Phase::running;
  Clock::time_point phase_deadline_ = Clock::time_point::max();
  int n_interrupts_ = 0;
  bool failed_ = false;
  Outcome outcome_;
  std::vector<pollfd> poll_entries_;
};

}  // namespace lockstep::run
