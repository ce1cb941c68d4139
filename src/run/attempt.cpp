#include "run/attempt.hpp"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <iterator>
#include <lockstep/error.hpp>
#include <new>
#include <numeric>

#include "base/cpus.hpp"
#include "base/process.hpp"
#include "base/text.hpp"
#include "engines/shared/bootstrap/launcher_socket.hpp"
#include "run/errors.hpp"
#include "run/rank_environment.hpp"
#include "run/rank_logs.hpp"

namespace lockstep::run {
namespace {

using std::chrono::milliseconds;

// Between the kill of a process group and the end of its output.
constexpr milliseconds kLastOutput{1000};
constexpr milliseconds kRecheckInterval{50};

std::string name_of_signal(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

double seconds(std::chrono::nanoseconds duration) {
  return std::chrono::duration<double>(duration).count();
}

/// "rank 1", "ranks 1 and 3", "ranks 0, 1, 2 and 61 more".
std::string list_of(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  constexpr std::size_t kShown = 8;
  if (ranks.size() > kShown) {
    return fmt::format("ranks {} and {} more",
                       fmt::join(ranks.begin(), ranks.begin() + kShown, ", "),
                       ranks.size() - kShown);
  }
  return fmt::format("ranks {} and {}", fmt::join(ranks.begin(), ranks.end() - 1, ", "),
                     ranks.back());
}

int wait_status_of(const siginfo_t& info) {
  switch (info.si_code) {
    case CLD_EXITED: return (info.si_status & 0xff) << 8;
    case CLD_DUMPED: return info.si_status | 0x80;
    default: return info.si_status;  // CLD_KILLED
  }
}

/// 128 + n for signal n.
int exit_code_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

std::string how_ended(int wait_status) {
  if (!WIFSIGNALED(wait_status)) {
    return fmt::format("exited with code {}", WEXITSTATUS(wait_status));
  }
  const int signal = WTERMSIG(wait_status);
  return fmt::format("was killed by {} (signal {}, {}{})", name_of_signal(signal), signal,
                     strsignal(signal), WCOREDUMP(wait_status) ? ", core dumped" : "");
}

int n_threads(const Options& options) {
  return options.bind == Bind::core ? 1 : std::max(1, base::n_usable_cores() / options.n_ranks);
}

}  // namespace

Attempt::Attempt(const LaunchContext& context, int n_restarts, Nodes* nodes)
    : context_(context),
      n_restarts_(n_restarts),
      nodes_(nodes),
      placement_(nodes != nullptr ? nodes->placement()
                                  : single_node_layout(context.options.n_ranks, context.run_id)),
      generations_(context.options.n_ranks) {
  const bool is_elastic = context.options.elastic.least > 0;
  World first{.job = std::make_unique<shared::Job>(context.options.n_ranks,
                                                   context.options.env.tune, is_elastic),
              .places = std::vector<int>(static_cast<std::size_t>(context.options.n_ranks))};
  std::iota(first.places.begin(), first.places.end(), 0);
  worlds_.emplace(0, std::move(first));
  if (is_elastic) elastic_.emplace(context.options.n_ranks, context.options.elastic);
}

std::optional<int> Attempt::World::rank_of(int place) const {
  const auto found = std::ranges::find(places, place);
  if (found == places.end()) return std::nullopt;
  return static_cast<int>(found - places.begin());
}

Attempt::~Attempt() {
  kill_ranks();
  for (Rank& rank : ranks_) {
    if (rank.state != State::reaped) reap(rank);
  }
}

Outcome Attempt::run() {
  start_ranks();
  while (!over()) {
    wait_for_events();
    advance();
  }
  write_records();
  warn_if_none_joined();
  return outcome_;
}

bool Attempt::over() const {
  const bool all_reaped = std::all_of(ranks_.begin(), ranks_.end(),
                                      [](const Rank& rank) { return rank.state == State::reaped; });
  // A user who interrupts twice does not wait for a reader that is blocked.
  return all_reaped && (nodes_ == nullptr || nodes_->over()) &&
         (context_.mux.idle() || (n_interrupts_ > 1 && context_.mux.stuck()));
}

void Attempt::write_records() {
  if (outcome_.exit_code == 0 || !context_.options.env.record_dir) return;
  const std::string& dir = *context_.options.env.record_dir;
  try {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      const int index = static_cast<int>(rank);
      if (const auto number = world_of(index).rank_of(index)) {
        world_of(index).job->write_record(*number, dir);
      }
    }
    print_line(fmt::format("flight records are in {0}; see lockstep doctor --record {0}", dir));
  } catch (const SystemError& error) {
    print_line(error.what());
  }
}

void Attempt::warn_if_none_joined() {
  if (outcome_.exit_code != 0 || placement_.world_size == 1 || generations_.newest() > 0 ||
      worlds_.at(0).job->has_joined_rank() || !links_lockstep(context_.program)) {
    return;
  }
  print_line(
      fmt::format("no rank called lockstep::init_dist: each of the {} ran alone, as rank 0 of 1",
                  placement_.world_size));
}

void Attempt::print_line(const std::string& text) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  context_.mux.print_line(fmt::format("{:%Y-%m-%d %H:%M:%S} {}", local, text));
}

// --- start ----------------------------------------------------------------------------------

void Attempt::start_ranks() {
  const Options& options = context_.options;
  std::vector<RankLogs> logs(static_cast<std::size_t>(options.n_ranks));
  if (options.log_dir)
    logs = open_rank_logs(*options.log_dir, placement_.first_rank, options.n_ranks, n_restarts_);

  ProcessStarter starter(context_.guard, context_.signals);
  for (int rank = 0; rank < options.n_ranks; ++rank) {
    ranks_.emplace_back();
    start_rank(rank, std::move(logs[static_cast<std::size_t>(rank)]), /*is_replacement=*/false,
               starter);
  }
  starter.wait();
}

void Attempt::start_rank(int rank, RankLogs log, bool is_replacement, ProcessStarter& starter) try {
  const Options& options = context_.options;
  const shared::Job& job = *newest().job;
  const WorldEnvironment environment{.n_ranks = options.n_ranks,
                                     .placement = placement_,
                                     .segment = job.environment(),
                                     .is_replacement = is_replacement,
                                     .n_restarts = n_restarts_,
                                     .max_restarts = options.max_restarts,
                                     .n_threads = n_threads(options)};
  const base::UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null) throw system_error("cannot open /dev/null");
  // A rank leads its own process group, which a terminal stops when it reads.
  const bool passes_stdin = rank == 0 && !is_replacement && isatty(STDIN_FILENO) == 0;
  const RankOutputs outputs = context_.mux.add(
      placement_.first_rank + rank, std::move(log.stdout_log), std::move(log.stderr_log));
  shared::LauncherSocket socket = shared::make_launcher_socket();
  ProcessSpec spec{.program = context_.program,
                   .arguments = options.command,
                   .environment = rank_environment(environment, rank, socket.rank.get()),
                   .stdin_fd = passes_stdin ? STDIN_FILENO : null.get(),
                   .stdout_fd = outputs.stdout_fd.get(),
                   .stderr_fd = outputs.stderr_fd.get(),
                   .inherited_fds = {job.fd(), socket.rank.get()},
                   .cpu = {},
                   .open_files = context_.open_files};
  if (options.bind == Bind::core) {
    spec.cpu = context_.cores[static_cast<std::size_t>(rank) % context_.cores.size()];
  }
  ranks_[static_cast<std::size_t>(rank)] = {.process = starter.start(spec),
                                            .socket = std::move(socket.launcher)};
} catch (const SystemError& error) {
  if (remedy_for(error.error_number()).empty()) throw;
  errno = error.error_number();
  throw start_error(fmt::format("rank {} of {}", world_rank(static_cast<std::size_t>(rank)),
                                placement_.world_size));
}

// --- events ---------------------------------------------------------------------------------

void Attempt::wait_for_events() {
  Clock::time_point next = phase_deadline_;
  for (const Rank& rank : ranks_) next = std::min(next, rank.deadline);
  if (elastic_ && phase_ == Phase::running) {
    next = std::min({next, elastic_->wakes_at(), wakes_again_});
  }
  int timeout_ms = -1;
  if (next != Clock::time_point::max()) {
    const auto left = std::chrono::ceil<milliseconds>(next - Clock::now()).count();
    timeout_ms = static_cast<int>(std::clamp<milliseconds::rep>(left, 0, 60'000));
  }
  poll_entries_.assign(1, {context_.signals.fd(), POLLIN, 0});
  if (nodes_ != nullptr) nodes_->append_to(poll_entries_);
  for (const Rank& rank : ranks_) {
    if (rank.signal_after != 0) poll_entries_.push_back({rank.joined.get(), POLLIN, 0});
  }
  const std::size_t n_before_sockets = poll_entries_.size();
  for (const Rank& rank : ranks_) poll_entries_.push_back({rank.socket.get(), POLLIN, 0});
  const std::size_t n_before_mux = poll_entries_.size();
  context_.mux.append_to(poll_entries_);
  if (poll(poll_entries_.data(), poll_entries_.size(), timeout_ms) < 0) {
    if (errno == EINTR) return;
    throw system_error("cannot wait for the ranks");
  }
  // A rank's last output precedes the report of its exit.
  context_.mux.service(std::span(poll_entries_).subspan(n_before_mux));
  if (nodes_ != nullptr) {
    if (const auto failure = nodes_->service()) end_with(*failure);
  }
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (poll_entries_[n_before_sockets + rank].revents != 0) serve(static_cast<int>(rank));
  }
  signal_rest();
  if (poll_entries_[0].revents != 0) handle_signals();
}

void Attempt::handle_signals() {
  while (const std::optional<Signal> signal = context_.signals.next()) {
    if (signal->number == SIGCHLD) {
      check_exits(signal->sender);
    } else {
      forward(signal->number);
    }
  }
}

void Attempt::forward(int signal) {
  if (is_warning(signal)) {
    if (phase_ == Phase::killing) return;
    print_line(fmt::format("{}: forwarded to the ranks", name_of_signal(signal)));
    signal_ranks(signal);
    return;
  }
  outcome_.interrupted = true;
  if (nodes_ != nullptr) {
    nodes_->report_failed({.exit_code = 128 + signal,
                           .interrupted = true,
                           .text = fmt::format("node {} was ended by {}", placement_.node_rank,
                                               name_of_signal(signal))});
    if (outcome_.exit_code == 0) outcome_.exit_code = 128 + signal;
  }
  if (signal == SIGINT) ++n_interrupts_;
  if (phase_ == Phase::killing) return;
  if (n_interrupts_ > 1) {
    print_line("second SIGINT: killing the ranks (SIGKILL)");
    kill_ranks();
    return;
  }
  print_line(fmt::format("{}: forwarded to the ranks, which have {:g} s to exit{}",
                         name_of_signal(signal), seconds(context_.options.grace),
                         signal == SIGINT ? "; a second one kills them now" : ""));
  terminate_ranks(signal);
}

void Attempt::serve(int rank) {
  Rank& asking = ranks_[static_cast<std::size_t>(rank)];
  base::UniqueFd& socket = asking.socket;
  const shared::LauncherRequest question = shared::receive_request(socket.get());
  switch (question.kind) {
    case shared::LauncherRequest::Kind::none: return;
    case shared::LauncherRequest::Kind::closed: socket.reset(); return;
    case shared::LauncherRequest::Kind::next_world: break;
  }
  asking.request = question.number;
  if (elastic_) {
    if (phase_ != Phase::running)
      return shared::refuse(socket.get(), question.number, 0, "it is ending");
    read_progress();
    asking.requester = process_of(rank);
    asking.last_generation = question.last_generation;
    asking.waits = elastic_->asked(rank, question.limit, Clock::now());
    if (!asking.waits) {
      shared::refuse(socket.get(), question.number, 0,
                     "this rank left its world, and the others went on without it");
    }
    return;
  }
  try {
    answer(rank);
  } catch (const SystemError& error) {
    shared::refuse(socket.get(), question.number, error.error_number(), error.text());
  } catch (const std::bad_alloc&) {
    shared::refuse(socket.get(), question.number, ENOMEM, "no memory for its segment");
  }
}

void Attempt::answer(int rank) {
  Rank& asking = ranks_[static_cast<std::size_t>(rank)];
  const World& last = newest();
  const int next = generations_.next_of(rank, last.job->has_rank_left());
  if (!worlds_.contains(next)) {
    worlds_.emplace(next, World{.job = last.job->next(), .places = last.places});
  }
  asking.requester = process_of(rank);
  generations_.enter(rank, next);
  shared::answer(asking.socket.get(), asking.request, worlds_.at(next).job->fd(),
                 {.rank = rank, .size = context_.options.n_ranks});
  worlds_.erase(worlds_.begin(), worlds_.lower_bound(generations_.oldest()));
}

void Attempt::check_exits(pid_t first) {
  // Several exits may share one SIGCHLD; it names the earliest, so check that one first.
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].process.leader() == first) look_at(static_cast<int>(rank));
  }
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) look_at(static_cast<int>(rank));
}

void Attempt::look_at(int rank) {
  Rank& checked = ranks_[static_cast<std::size_t>(rank)];
  if (checked.state != State::running) return;
  const std::optional<siginfo_t> ending = checked.process.ending();
  if (!ending) return;
  checked.state = State::ended;
  checked.end = Clock::now();
  checked.deadline = Clock::now() + context_.options.grace;
  const int wait_status = wait_status_of(*ending);
  const bool was_rank = checked.first_generation >= 0;  // not a replacement that waits
  for (const auto& [generation, world] : worlds_) {
    const auto number = was_rank ? world.rank_of(rank) : std::nullopt;
    if (number) world.job->rank_ended(*number, wait_status);
  }
  if (elastic_ && phase_ == Phase::running) {
    read_progress();
    if (wait_status != 0) note_end(rank, wait_status);
    elastic_->ended(rank, /*is_done=*/wait_status == 0, Clock::now());
  } else if (wait_status != 0 && !failed_) {
    report_failure(rank, wait_status);
  }
}

void Attempt::report_failure(int rank, int wait_status) {
  failed_ = true;
  outcome_.exit_code = exit_code_of(wait_status);
  const std::string how = how_ended(wait_status);
  const auto n_running = std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& other) {
    return other.state == State::running;
  });
  std::string ending;
  if (phase_ == Phase::running) {
    phase_ = Phase::notified;
    phase_deadline_ = Clock::now() + kNotice;
    if (n_running > 0) ending = "; ending the others";
  }
  const std::string what = fmt::format("{}{} {} after {:.2f} s", describe_leaver(rank),
                                       name_of(rank), how, seconds(Clock::now() - start_));
  print_line(what + ending);
  if (nodes_ != nullptr) {
    nodes_->report_failed({.exit_code = outcome_.exit_code,
                           .interrupted = outcome_.interrupted,
                           .text = fmt::format("node {}: {}", placement_.node_rank, what)});
  }
}

std::string Attempt::name_of(int rank) const {
  const auto i = static_cast<std::size_t>(rank);
  return fmt::format("rank {} (pid {})", world_rank(i), ranks_[i].process.leader());
}

/// Describes the peer whose exit made this rank fail; empty if there is none.
std::string Attempt::describe_leaver(int failed_rank) const {
  const World& world = world_of(failed_rank);
  const auto failed = world.rank_of(failed_rank);
  const auto left = failed ? world.job->rank_that_left_before(*failed) : std::nullopt;
  if (!left) return {};
  const int leaver = world.places[static_cast<std::size_t>(*left)];
  const Rank& rank = ranks_[static_cast<std::size_t>(leaver)];
  const std::string how =
      rank.state == State::running
          ? "left the world"
          : fmt::format("exited with code 0 after {:.2f} s", seconds(rank.end - start_));
  return fmt::format("{} {} while rank {} still waited for it; ", name_of(leaver), how,
                     world_rank(static_cast<std::size_t>(failed_rank)));
}

void Attempt::end_with(const NodeFailure& failure) {
  if (failed_ || phase_ != Phase::running) return;
  failed_ = true;
  outcome_ = {.exit_code = failure.exit_code, .interrupted = failure.interrupted};
  phase_ = Phase::notified;
  phase_deadline_ = Clock::now() + kNotice;
  print_line(failure.text + "; ending the ranks of this node");
}

int Attempt::world_rank(std::size_t local_rank) const {
  return placement_.first_rank + static_cast<int>(local_rank);
}

// --- going on after a loss --------------------------------------------------------------------

void Attempt::note_end(int rank, int wait_status) {
  const Rank& ended = ranks_[static_cast<std::size_t>(rank)];
  if (ended.is_late) return;
  const auto number = newest().rank_of(rank);
  const bool was_rank = number && ended.first_generation >= 0;
  const bool has_finished = was_rank && newest().job->has_finished(*number);
  const bool is_new =
      was_rank && ended.first_generation > 0 && ended.first_generation == generations_.newest();
  const std::string failure = is_new ? newest().job->failure_of(*number) : std::string();
  print_line(fmt::format("{} {} after {:.2f} s{}", name_of(rank), how_ended(wait_status),
                         seconds(Clock::now() - start_),
                         has_finished       ? ", after it had done its part; the others go on"
                         : !failure.empty() ? ": " + failure
                         : was_rank         ? ""
                         : ended.first_generation < 0 ? ", before it was a rank of a world"
                                                      : ", after it had left the world"));
  if (has_finished && outcome_.exit_code == 0) outcome_.exit_code = exit_code_of(wait_status);
  if (!was_rank || has_finished) return;
  note_loss(rank, newest().job->ending_of(*number), exit_code_of(wait_status));
  if (!context_.options.env.record_dir) return;
  try {  // now: the segment is gone when the next generation has formed
    newest().job->write_record(*number, *context_.options.env.record_dir);
  } catch (const SystemError& error) {
    print_line(error.what());
  }
}

// --- time -----------------------------------------------------------------------------------

void Attempt::advance() {
  regroup();
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) advance_rank(static_cast<int>(rank));
  if (nodes_ != nullptr && !failed_ && phase_ == Phase::running &&
      std::none_of(ranks_.begin(), ranks_.end(),
                   [](const Rank& rank) { return rank.state == State::running; })) {
    nodes_->report_done();
  }
  if (Clock::now() < phase_deadline_) return;
  if (phase_ == Phase::notified) {
    terminate_ranks(SIGTERM);
  } else {
    std::vector<int> late;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].state == State::running) late.push_back(world_rank(rank));
    }
    if (!late.empty()) {
      print_line(fmt::format("{} did not end within {:g} s: killing (SIGKILL)", list_of(late),
                             seconds(context_.options.grace)));
    }
    kill_ranks();
  }
}

void Attempt::advance_rank(int rank) {
  Rank& checked = ranks_[static_cast<std::size_t>(rank)];
  const bool late = Clock::now() >= checked.deadline;
  switch (checked.state) {
    case State::running: return;
    case State::ended:
      if (late || phase_ == Phase::killing || !context_.mux.is_open(placement_.first_rank + rank))
        reap(checked);
      return;
    case State::reaped:
      if (!late) return;
      // A process that left the group may hold an output forever. The mux closes it when nothing is
      // left to read and its reader has taken everything: check again until then.
      context_.mux.abandon(placement_.first_rank + rank);
      checked.deadline = context_.mux.is_open(placement_.first_rank + rank)
                             ? Clock::now() + kRecheckInterval
                             : Clock::time_point::max();
      return;
  }
}

void Attempt::reap(Rank& rank) {
  rank.process.signal(SIGKILL);
  context_.guard.remove_group(rank.process.leader());
  rank.process.reap();
  rank.state = State::reaped;
  rank.deadline = Clock::now() + kLastOutput;
}

void Attempt::terminate_ranks(int signal) {
  signal_ranks(signal);
  refuse_all("it is ending");
  phase_ = Phase::terminating;
  phase_deadline_ = Clock::now() + context_.options.grace;
}

void Attempt::kill_ranks() {
  for (Rank& rank : ranks_) {
    rank.signal_after = 0;
    rank.process.signal(SIGKILL);
  }
  phase_ = Phase::killing;
  phase_deadline_ = Clock::time_point::max();
}

/// The process that has joined a world as this rank, or has asked for the next one, if it is alive.
std::optional<pid_t> Attempt::process_of(int rank) const {
  const auto number = world_of(rank).rank_of(rank);
  const auto joined = number ? world_of(rank).job->process_of(*number) : std::nullopt;
  return joined ? joined : ranks_[static_cast<std::size_t>(rank)].requester;
}

/// Signals the process that has joined as this rank. Returns false if there is none.
bool Attempt::signal_joined(int rank, int signal) {
  Rank& to = ranks_[static_cast<std::size_t>(rank)];
  const auto joined = process_of(rank);
  if (!joined) return false;
  if (!to.joined) to.joined = base::open_pidfd(*joined);
  // The rank may have written any pid into the segment: none outside its group gets the signal.
  return to.joined && to.process.signal_member(*joined, signal);
}

void Attempt::signal_rank(int rank, int signal) {
  Rank& to = ranks_[static_cast<std::size_t>(rank)];
  if (to.state == State::reaped) return;
  const bool is_alone = signal_joined(rank, signal);
  if (!is_alone) to.process.signal(signal);
  if (is_warning(signal)) return;
  to.signal_after = is_alone ? signal : 0;
  to.process.signal(SIGCONT);  // a stopped process handles no other signal
}

void Attempt::signal_ranks(int signal) {
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    signal_rank(static_cast<int>(rank), signal);
  }
}

/// Signals the remaining processes of ranks whose joined process has ended.
void Attempt::signal_rest() {
  for (Rank& rank : ranks_) {
    if (rank.signal_after == 0) continue;
    pollfd entry{.fd = rank.joined.get(), .events = POLLIN, .revents = 0};
    if (poll(&entry, 1, /*timeout=*/0) != 1) continue;
    rank.process.signal(rank.signal_after);
    rank.signal_after = 0;
  }
}

}  // namespace lockstep::run
