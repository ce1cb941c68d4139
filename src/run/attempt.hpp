#pragma once

#include <poll.h>
#include <sys/types.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engines/shared/bootstrap/job.hpp"
#include "engines/shared/bootstrap/launcher_socket.hpp"
#include "run/child_process.hpp"
#include "run/elastic_membership.hpp"
#include "run/generations.hpp"
#include "run/guard.hpp"
#include "run/nodes.hpp"
#include "run/options.hpp"
#include "run/output_mux.hpp"
#include "run/rank_logs.hpp"
#include "run/signals.hpp"

namespace lockstep::run {

/// Shared by all attempts of one launcher.
struct LaunchContext {
  const Options& options;
  std::string program;     ///< a path
  std::string run_id;      ///< see RankLayout
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
/// signal to the launcher is forwarded to the ranks at once; SIGINT, SIGTERM and SIGHUP start the
/// same grace period.
///
/// A signal goes to the process that joined as the rank, as the segment tells: the processes that
/// it started, a DataLoader's workers for example, must serve its handler. They get SIGINT, SIGTERM
/// or SIGHUP after its end. Where no process has joined, the rank's whole process group gets the
/// signal.
///
/// With --elastic a failure does not end the others: ElasticMembership says who are the ranks of
/// the next generation of the world, and each generation has a segment of its own. `rank` in the
/// names of this class is the place of a process there, which is its rank in the first generation.
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
  using milliseconds = std::chrono::milliseconds;
  // Ranks waiting for a dead peer are notified within milliseconds, even on a busy machine.
  static constexpr milliseconds kNotice{1000};

  // running -> ended: the process has exited but is not reaped, which keeps its process group id
  // from being reused. Processes it left in the group may finish writing.
  // ended -> reaped: the group is killed.
  enum class State : std::uint8_t { running, ended, reaped };
  struct Rank {
    ChildGroup process{};
    base::UniqueFd socket{};           ///< the launcher's end: see launcher_socket.hpp
    std::optional<pid_t> requester{};  ///< the process that has left a world and asked for the next
    std::uint64_t request = 0;         ///< the number of that request
    std::int64_t last_generation = -1;  ///< of that process, when it asked
    int first_generation = 0;           ///< in which this process was a rank; -1: it waits for one
    bool is_late = false;               ///< it is killed, and counts as lost already
    bool waits = false;                 ///< it has asked for the next generation
    base::UniqueFd joined{};  ///< pidfd of the process that joined, if it alone got a signal
    int signal_after = 0;     ///< what the rest of the group gets when that process has ended
    State state = State::running;
    Clock::time_point end{};                                // of its process
    Clock::time_point deadline = Clock::time_point::max();  // of the state
  };
  enum class Phase : std::uint8_t { running, notified, terminating, killing };
  struct World {
    std::unique_ptr<shared::Job> job;
    std::vector<int> places;  ///< by rank
    /// The rank of a place there.
    std::optional<int> rank_of(int place) const;
  };

  void start_ranks();
  void start_rank(int rank, RankLogs log, bool is_replacement, ProcessStarter& starter);
  void wait_for_events();
  void handle_signals();
  void forward(int signal);
  void serve(int rank);
  void answer(int rank);
  void check_exits(pid_t first);
  void look_at(int rank);
  void report_failure(int rank, int wait_status);
  void note_end(int rank, int wait_status);
  void read_progress();
  void note_loss(int rank, std::string_view why, int exit_code);
  void regroup();
  bool replace(int rank);
  void refuse_all(std::string_view why);
  void form(const std::vector<int>& places);
  void give_up(const std::string& why);
  World& newest() { return worlds_.at(generations_.newest()); }
  const World& world_of(int rank) const { return worlds_.at(generations_.of(rank)); }
  std::string name_of(int rank) const;
  std::string describe_leaver(int failed_rank) const;
  void end_with(const NodeFailure& failure);
  int world_rank(std::size_t local_rank) const;
  void advance();
  void advance_rank(int rank);
  void reap(Rank& rank);
  void terminate_ranks(int signal);
  void kill_ranks();
  std::optional<pid_t> process_of(int rank) const;
  bool signal_joined(int rank, int signal);
  void signal_rank(int rank, int signal);
  void signal_ranks(int signal);
  void signal_rest();
  void write_records();
  void warn_if_none_joined();
  bool over() const;
  void print_line(const std::string& text);

  const LaunchContext& context_;
  const int n_restarts_;
  Nodes* const nodes_;
  const RankLayout placement_;
  Generations generations_;
  std::map<int, World> worlds_;  // by generation
  std::optional<ElasticMembership> elastic_;
  std::vector<shared::Lost> losses_;  // of ranks of elastic worlds
  int first_loss_ = 0;                // the exit code of the generation's first; 0: none
  Clock::time_point wakes_again_ = Clock::time_point::max();
  milliseconds wake_delay_{};
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
