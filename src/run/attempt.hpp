#pragma once

#include <poll.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
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
#include "run/foreground.hpp"
#include "run/generations.hpp"
#include "run/guard.hpp"
#include "run/node_message.hpp"
#include "run/nodes.hpp"
#include "run/options.hpp"
#include "run/output_mux.hpp"
#include "run/rank_addresses.hpp"
#include "run/rank_logs.hpp"
#include "run/rank_store.hpp"
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
  bool joins_again = false;  ///< node 0 was not heard in time; the job may go on
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
/// The rank of --stdin gets the launcher's standard input; if that is a terminal, Foreground says
/// how. When the launcher stops (Ctrl-Z, or a read of the terminal in the background), it stops the
/// ranks first and the clock of all limits (base/job_clock.hpp), and continues both afterwards.
///
/// With --elastic a failure does not end the others: ElasticMembership says who are the ranks of
/// the next generation of the world, and each generation has a segment of its own. A place, see
/// ElasticMembership, is its process's rank in the first generation; here it has the number among
/// those of this node. On several nodes that of node 0 has the rule: it tells the others what to do
/// (NodeCommand), and they tell it what has happened (NodeEvent).
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
  using Clock = detail::JobClock;
  using milliseconds = std::chrono::milliseconds;
  // Ranks waiting for a dead peer are notified within milliseconds, even on a busy machine.
  static constexpr milliseconds kNotice{1000};

  // running -> ended: the process has exited but is not reaped, which keeps its process group id
  // from being reused. Processes it left in the group may finish writing.
  // ended -> reaped: the group is killed.
  enum class State : std::uint8_t { running, ended, reaped };
  /// A process's last request for its next world.
  struct Request {
    std::uint64_t number;
    std::optional<pid_t> process;                 ///< that has left a world and asked
    std::optional<std::int64_t> last_generation;  ///< in which it was a rank
    bool is_pending;                              ///< it waits for the next generation
  };
  /// A process's request for the addresses of all ranks, which is not answered yet.
  struct AddressRequest {
    std::uint64_t number;
    std::uint64_t world;
    Clock::time_point end;
    milliseconds limit;
  };
  struct Place {
    ChildGroup process{};
    base::UniqueFd socket{};  ///< the launcher's end: see launcher_socket.hpp
    std::optional<Request> request{};
    std::optional<AddressRequest> address_request{};
    std::optional<int> first_generation = 0;  ///< in which this process is a rank; none: it waits
    int newest_generation = 0;                ///< that this process was chosen for; -1: none
    bool is_late = false;                     ///< it is killed, and counts as lost already
    base::UniqueFd joined{};  ///< pidfd of the process that joined, if it alone got a signal
    std::optional<int> signal_after{};  ///< that the rest of the group gets when `joined` has ended
    State state = State::running;
    Clock::time_point end{};                                // of its process
    Clock::time_point deadline = Clock::time_point::max();  // of the state
  };
  enum class Phase : std::uint8_t { running, notified, terminating, killing };
  struct World {
    std::unique_ptr<shared::Job> job;  ///< of the ranks of this node
    std::vector<int> places;           ///< by their number in `job`
    int first_rank = 0;                ///< the rank of number 0
    bool has_told_step = false;
    std::vector<bool> has_told_finished{};  ///< by their number
    /// The number of a place there.
    std::optional<int> number_of(int place) const;
  };

  void start_ranks();
  void start_rank(int place, RankLogs log, bool is_replacement, ProcessStarter& starter);
  void wait_for_events();
  void handle_signals();
  void handle(const Signal& signal);
  void forward(const Signal& received);
  void serve(int place);
  void answer(int place, std::uint64_t number);
  void answer_addresses();
  void ask_store(int place, const shared::LauncherRequest& question);
  /// What other nodes ask of it, or their answers.
  void serve_store();
  void answer_store(const StoreMessage& answer);
  /// Here and on the other nodes.
  void give_address(const RankAddress& address);
  /// Tells ranks that wait over another engine that the world is over. `rank`: that failed.
  void end_world(std::string_view why, int rank);
  void check_exits(pid_t first);
  void end_reading();
  void check_stop(int place);
  /// Stops the ranks, and the launcher by the signal, until it is continued. Returns false if
  /// nothing has been stopped.
  bool stop_job(int signal, bool whole_group);
  void set_clock(std::int64_t word);
  /// Whether the place's first process gets the launcher's standard input.
  bool gets_stdin(int place) const;
  void look_at(int place);
  void report_failure(int place, int wait_status);
  NodeEvent note_end(int place, int wait_status);
  void read_progress();
  void regroup();
  void wake_sleepers();
  void refuse_all();
  void refuse_addresses(std::string_view why, int rank);
  void give_up(const std::string& why);
  bool is_elastic() const { return context_.options.elastic.least > 0; }
  // the rule, or where there is none, the way to it
  void tell_rule(const NodeEvent& event);
  void note_loss(int place, std::string_view why, int exit_code);
  void decide();
  void note_lost_node(int node);
  NodeCommand choose(const std::vector<int>& places);
  void tell(int node, const NodeCommand& command);
  void tell_all(const NodeCommand& command);
  // what it decides
  void hear_nodes();
  void admit_nodes();
  void carry_out(const NodeCommand& command);
  void replace(int place);
  void kill_late(int place, const std::string& why);
  void enter(const NodeCommand& command);
  void take_lease();
  void leave_job();
  World& newest() { return worlds_.at(generations_.newest()); }
  const World& world_of(int place) const { return worlds_.at(generations_.of(place)); }
  bool is_here(int place) const;  ///< a place of the whole job
  std::string name_of(int place) const;
  std::string describe_leaver(int failed_place) const;
  void end_with(const NodeFailure& failure);
  /// The place's number in errors and logs: its rank in the first generation.
  int world_rank(int place) const;
  Place& at(int place) { return places_[static_cast<std::size_t>(place)]; }
  const Place& at(int place) const { return places_[static_cast<std::size_t>(place)]; }
  int n_places() const { return static_cast<int>(places_.size()); }
  void advance();
  void advance_rank(int place);
  void reap(Place& place);
  void terminate_ranks(const Signal& signal);
  void kill_ranks();
  std::optional<pid_t> process_of(int place) const;
  bool signal_joined(int place, int signal);
  void signal_rank(int place, int signal);
  void signal_ranks(const Signal& signal);
  void signal_rest();
  void write_records();
  void warn_if_none_joined();
  bool over() const;
  void print_line(const std::string& text);

  const LaunchContext& context_;
  const int n_restarts_;
  Nodes* const nodes_;
  const RankLayout placement_;
  RankAddresses addresses_{placement_.world_size};
  RankStore store_;  // on node 0
  Generations generations_;
  std::map<int, World> worlds_;               // by generation
  std::optional<ElasticMembership> elastic_;  // on node 0
  NodeLease::Clock::time_point lease_{};
  std::vector<int> hosts_;  // of the newest world: for each rank the first one on its node
  int n_waiting_ = 0;       // replacements that wait for the next generation
  int formed_ = 0;          // the newest generation of which all have given their addresses
  bool has_left_ = false;   // this node, the job
  // on node 0, of the newest generation and of all places of the job
  std::vector<int> members_;  // places by rank
  std::vector<std::optional<int>> first_generation_of_;
  std::vector<bool> has_process_;     // by place of the job, as far as node 0 has heard
  bool has_completed_step_ = false;   // any generation
  bool has_regrouped_ = false;        // a rank, ever
  std::vector<shared::Lost> losses_;  // of ranks of elastic worlds
  std::optional<int> first_loss_;     // the exit code of the generation's first
  Clock::time_point wakes_again_ = Clock::time_point::max();
  milliseconds wake_delay_{};
  const Clock::time_point start_ = Clock::now();
  std::vector<Place> places_;
  Foreground foreground_;
  std::optional<int> reader_;  ///< the place whose process has the launcher's standard input
  Phase phase_ = Phase::running;
  Clock::time_point phase_deadline_ = Clock::time_point::max();
  int n_interrupts_ = 0;
  bool failed_ = false;
  std::string why_it_ends_ = "it is ending";  ///< for ranks that ask when it is
  Outcome outcome_;
  std::vector<pollfd> poll_entries_;
};

}  // namespace lockstep::run
