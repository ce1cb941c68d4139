#include "run/attempt.hpp"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <lockstep/error.hpp>
#include <numeric>

#include "base/cpus.hpp"
#include "base/process.hpp"
#include "base/text.hpp"
#include "engines/shared/bootstrap/launcher_socket.hpp"
#include "run/describe.hpp"
#include "run/errors.hpp"
#include "run/rank_environment.hpp"
#include "run/rank_logs.hpp"

namespace lockstep::run {
namespace {

using std::chrono::milliseconds;

// Between the kill of a process group and the end of its output.
constexpr milliseconds kLastOutput{1000};
constexpr milliseconds kRecheckInterval{50};

int wait_status_of(const siginfo_t& info) {
  switch (info.si_code) {
    case CLD_EXITED: return (info.si_status & 0xff) << 8;
    case CLD_DUMPED: return info.si_status | 0x80;
    default: return info.si_status;  // CLD_KILLED
  }
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
  World first{.job = std::make_unique<shared::Job>(context.options.n_ranks,
                                                   context.options.env.tune, is_elastic()),
              .places = {},
              .first_rank = placement_.first_rank};
  if (placement_.incarnation == 1) {
    first.places.resize(static_cast<std::size_t>(context.options.n_ranks));
    std::iota(first.places.begin(), first.places.end(), 0);
  }
  if (nodes != nullptr) {
    first.job->set_world(placement_.first_rank, placement_.world_size, placement_.key);
  }
  worlds_.emplace(0, std::move(first));
  for (const int n_ranks : placement_.ranks_of) {
    hosts_.insert(hosts_.end(), static_cast<std::size_t>(n_ranks), static_cast<int>(hosts_.size()));
  }
  if (!is_elastic()) return;
  if (nodes != nullptr) {
    take_lease();
    // At the latest then node 0 knows of a lost node.
    newest().job->set_time_of_verdict(NodeLease::at_node_0(context.options.elastic.lease) +
                                      std::chrono::seconds(2));
  }
  if (placement_.node_rank != 0) return;
  ElasticOptions options = context.options.elastic;
  if (options.most == 0) options.most = placement_.world_size;
  if (options.most > placement_.world_size || options.least > options.most) {
    throw usage_error(fmt::format("--elastic is {}:{}, but the nodes have {} ranks", options.least,
                                  options.most, placement_.world_size));
  }
  elastic_.emplace(placement_.ranks_of, options, Clock::now());
  members_ = elastic_->ranks();
  first_generation_of_.assign(members_.size(), 0);
  has_process_.assign(members_.size(), true);
}

std::optional<int> Attempt::World::number_of(int place) const {
  const auto found = std::ranges::find(places, place);
  if (found == places.end()) return std::nullopt;
  return static_cast<int>(found - places.begin());
}

Attempt::~Attempt() {
  kill_ranks();
  for (Place& place : places_) {
    if (place.state != State::reaped) reap(place);
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
  const bool all_reaped = std::all_of(places_.begin(), places_.end(), [](const Place& place) {
    return place.state == State::reaped;
  });
  // A user who interrupts twice does not wait for a reader that is blocked.
  return all_reaped && (nodes_ == nullptr || nodes_->over() || has_left_) &&
         (context_.mux.idle() || (n_interrupts_ > 1 && context_.mux.stuck()));
}

void Attempt::write_records() {
  if (outcome_.exit_code == 0 || !context_.options.env.record_dir) return;
  const std::string& dir = *context_.options.env.record_dir;
  try {
    for (int place = 0; place < n_places(); ++place) {
      if (const auto number = world_of(place).number_of(place)) {
        world_of(place).job->write_record(*number, dir);
      }
    }
    print_line(fmt::format("flight records are in {0}; see lockstep doctor --record {0}", dir));
  } catch (const SystemError& error) {
    print_line(error.what());
  }
}

void Attempt::warn_if_none_joined() {
  if (outcome_.exit_code != 0 || placement_.world_size == 1 || generations_.newest() > 0 ||
      placement_.incarnation > 1 || worlds_.at(0).job->has_joined_rank() ||
      !links_lockstep(context_.program)) {
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
  if (options.stdin_rank && *options.stdin_rank >= placement_.world_size) {
    throw usage_error(fmt::format("--stdin is {}, but the ranks are 0 to {}", *options.stdin_rank,
                                  placement_.world_size - 1));
  }
  std::vector<RankLogs> logs(static_cast<std::size_t>(options.n_ranks));
  if (options.log_dir && placement_.incarnation == 1)
    logs = open_rank_logs(*options.log_dir, placement_.first_rank, options.n_ranks, n_restarts_);

  ProcessStarter starter(context_.guard, context_.signals);
  for (int place = 0; place < options.n_ranks; ++place) {
    places_.emplace_back();
    if (placement_.incarnation > 1) {  // node 0 says which to start
      at(place).state = State::reaped;
      at(place).first_generation = std::nullopt;
      continue;
    }
    start_rank(place, std::move(logs[static_cast<std::size_t>(place)]), /*is_replacement=*/false,
               starter);
  }
  starter.wait();
}

void Attempt::start_rank(int place, RankLogs log, bool is_replacement,
                         ProcessStarter& starter) try {
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
  const bool passes_stdin = !is_replacement && gets_stdin(place);
  const RankOutputs outputs =
      context_.mux.add(world_rank(place), std::move(log.stdout_log), std::move(log.stderr_log));
  shared::LauncherSocket socket = shared::make_launcher_socket();
  ProcessSpec spec{.program = context_.program,
                   .arguments = options.command,
                   .environment = rank_environment(environment, place, socket.rank.get()),
                   .stdin_fd = passes_stdin ? STDIN_FILENO : null.get(),
                   .stdout_fd = outputs.stdout_fd.get(),
                   .stderr_fd = outputs.stderr_fd.get(),
                   .inherited_fds = {job.fd(), socket.rank.get()},
                   .cpu = {},
                   .open_files = context_.open_files};
  if (passes_stdin) {
    reader_ = place;
    // Where no foreground is needed, nothing will tell that it reads.
    if (isatty(STDIN_FILENO) == 1 && !Foreground::rules(STDIN_FILENO)) {
      context_.mux.pass_at_once(world_rank(place));
    }
  } else if (reader_ == place) {
    reader_.reset();  // its replacement
  }
  if (options.bind == Bind::core) {
    spec.cpu = context_.cores[static_cast<std::size_t>(place) % context_.cores.size()];
  }
  at(place) = {.process = starter.start(spec), .socket = std::move(socket.launcher)};
} catch (const SystemError& error) {
  if (remedy_for(error.error_number()).empty()) throw;
  errno = error.error_number();
  throw start_error(fmt::format("rank {} of {}", world_rank(place), placement_.world_size));
}

// --- events ---------------------------------------------------------------------------------

void Attempt::wait_for_events() {
  Clock::time_point next = phase_deadline_;
  for (const Place& place : places_) {
    next = std::min(next, place.deadline);
    if (place.address_request) next = std::min(next, place.address_request->end);
  }
  if (is_elastic() && phase_ == Phase::running) {
    next = std::min(next, wakes_again_);
    if (elastic_) next = std::min(next, elastic_->wakes_at());
  }
  if (nodes_ != nullptr && nodes_->idle_for() != milliseconds::max()) {
    next = std::min(next, Clock::now() + nodes_->idle_for());
  }
  int timeout_ms = -1;
  if (next != Clock::time_point::max()) {
    const auto left = std::chrono::ceil<milliseconds>(next - Clock::now()).count();
    timeout_ms = static_cast<int>(std::clamp<milliseconds::rep>(left, 0, 60'000));
  }
  poll_entries_.assign(1, {context_.signals.fd(), POLLIN, 0});
  if (nodes_ != nullptr) nodes_->append_to(poll_entries_);
  for (const Place& place : places_) {
    if (place.signal_after) poll_entries_.push_back({place.joined.get(), POLLIN, 0});
  }
  const std::size_t n_before_sockets = poll_entries_.size();
  for (const Place& place : places_) poll_entries_.push_back({place.socket.get(), POLLIN, 0});
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
  for (int place = 0; place < n_places(); ++place) {
    if (poll_entries_[n_before_sockets + static_cast<std::size_t>(place)].revents != 0)
      serve(place);
  }
  signal_rest();
  if (poll_entries_[0].revents != 0) handle_signals();
}

void Attempt::handle_signals() {
  while (const std::optional<Signal> signal = context_.signals.next()) {
    if (signal->number == SIGCHLD) {
      check_exits(signal->sender);
    } else {
      handle(*signal);
    }
  }
}

void Attempt::handle(const Signal& signal) {
  if (signal.number == SIGTSTP) {
    stop_job(SIGTSTP, /*whole_group=*/false);
  } else {
    forward(signal);
  }
}

void Attempt::forward(const Signal& received) {
  const int signal = received.number;
  if (is_warning(signal)) {
    if (phase_ == Phase::killing) return;
    print_line(fmt::format("{}: forwarded to the ranks", name_of_signal(signal)));
    signal_ranks(received);
    return;
  }
  outcome_.interrupted = true;
  if (nodes_ != nullptr && is_elastic() && !elastic_) {
    has_left_ = true;  // the others go on
    if (outcome_.exit_code == 0 || outcome_.joins_again) outcome_.exit_code = 128 + signal;
    outcome_.joins_again = false;
  } else if (nodes_ != nullptr) {
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
  terminate_ranks(received);
}

void Attempt::check_exits(pid_t first) {
  // Several exits may share one SIGCHLD; it names the earliest, so check that one first.
  for (int place = 0; place < n_places(); ++place) {
    if (at(place).process.leader() == first) look_at(place);
  }
  for (int place = 0; place < n_places(); ++place) {
    look_at(place);
    check_stop(place);
  }
}

void Attempt::look_at(int place) {
  Place& checked = at(place);
  if (checked.state != State::running) return;
  const std::optional<siginfo_t> ending = checked.process.ending();
  if (!ending) return;
  checked.state = State::ended;
  if (reader_ == place) end_reading();
  checked.end = Clock::now();
  checked.deadline = Clock::now() + context_.options.grace;
  const int wait_status = wait_status_of(*ending);
  const bool was_rank = checked.first_generation.has_value();  // not a replacement that waits
  for (const auto& [generation, world] : worlds_) {
    const auto number = was_rank ? world.number_of(place) : std::nullopt;
    if (number) world.job->rank_ended(*number, wait_status);
  }
  if (is_elastic() && (phase_ == Phase::running || (has_left_ && !outcome_.joins_again))) {
    read_progress();
    NodeEvent event{.kind = NodeEvent::Kind::ended, .place = world_rank(place), .is_done = true};
    tell_rule(wait_status == 0 ? event : note_end(place, wait_status));
  } else if (wait_status != 0 && !failed_) {
    report_failure(place, wait_status);
  }
}

/// Ctrl-C at the rank that had the foreground is for the whole job, before the end of this rank.
void Attempt::end_reading() {
  foreground_.end();
  while (const std::optional<Signal> signal = context_.signals.next()) {
    if (signal->number != SIGCHLD) handle(*signal);  // check_exits looks at every rank
  }
}

void Attempt::report_failure(int place, int wait_status) {
  failed_ = true;
  outcome_.exit_code = exit_code_of(wait_status);
  const std::string how = how_ended(wait_status);
  const auto n_running = std::count_if(places_.begin(), places_.end(), [](const Place& other) {
    return other.state == State::running;
  });
  std::string ending;
  if (phase_ == Phase::running) {
    phase_ = Phase::notified;
    phase_deadline_ = Clock::now() + kNotice;
    if (n_running > 0) ending = "; ending the others";
  }
  const std::string what = fmt::format("{}{} {} after {:.2f} s", describe_leaver(place),
                                       name_of(place), how, seconds(Clock::now() - start_));
  why_it_ends_ = what;
  print_line(what + ending);
  end_world(how, world_rank(place));
  if (nodes_ != nullptr) {
    nodes_->report_failed({.exit_code = outcome_.exit_code,
                           .interrupted = outcome_.interrupted,
                           .text = fmt::format("node {}: {}", placement_.node_rank, what),
                           .rank = world_rank(place)});
  }
}

std::string Attempt::name_of(int place) const {
  return fmt::format("rank {} (pid {})", world_rank(place), at(place).process.leader());
}

/// Describes the peer whose exit made this rank fail; empty if there is none.
std::string Attempt::describe_leaver(int failed_place) const {
  const World& world = world_of(failed_place);
  const auto failed = world.number_of(failed_place);
  const auto left = failed ? world.job->rank_that_left_before(*failed) : std::nullopt;
  if (!left) return {};
  const int leaver = world.places[static_cast<std::size_t>(*left)];
  const Place& place = at(leaver);
  const std::string how =
      place.state == State::running
          ? "left the world"
          : fmt::format("exited with code 0 after {:.2f} s", seconds(place.end - start_));
  return fmt::format("{} {} while rank {} still waited for it; ", name_of(leaver), how,
                     world_rank(failed_place));
}

void Attempt::end_with(const NodeFailure& failure) {
  if (failed_ || phase_ != Phase::running) return;
  failed_ = true;
  outcome_ = {.exit_code = failure.exit_code, .interrupted = failure.interrupted};
  phase_ = Phase::notified;
  phase_deadline_ = Clock::now() + kNotice;
  end_world(failure.text, failure.rank);
  why_it_ends_ = failure.text;
  refuse_all();
  print_line(failure.text + "; ending the ranks of this node");
}

int Attempt::world_rank(int place) const { return placement_.first_rank + place; }

bool Attempt::is_here(int place) const {
  return place >= placement_.first_rank && place < placement_.first_rank + n_places();
}

// --- time -----------------------------------------------------------------------------------

void Attempt::advance() {
  if (nodes_ != nullptr && is_elastic()) take_lease();
  regroup();
  answer_addresses();
  serve_store();
  for (int place = 0; place < n_places(); ++place) advance_rank(place);
  if (nodes_ != nullptr && is_elastic()) {
    const bool has_process = std::ranges::find(has_process_, true) != has_process_.end();
    if (elastic_ && phase_ == Phase::running && elastic_->is_done() && !has_process) nodes_->end();
  } else if (nodes_ != nullptr && !failed_ && phase_ == Phase::running &&
             std::none_of(places_.begin(), places_.end(),
                          [](const Place& place) { return place.state == State::running; })) {
    nodes_->report_done();
  }
  if (Clock::now() < phase_deadline_) return;
  if (phase_ == Phase::notified) {
    terminate_ranks({.number = SIGTERM, .sender = getpid()});
  } else {
    std::vector<int> late;
    for (int place = 0; place < n_places(); ++place) {
      if (at(place).state == State::running) late.push_back(world_rank(place));
    }
    if (!late.empty()) {
      print_line(fmt::format("{} did not end within {:g} s: killing (SIGKILL)", list_of(late),
                             seconds(context_.options.grace)));
    }
    kill_ranks();
  }
}

void Attempt::advance_rank(int place) {
  Place& checked = at(place);
  const bool late = Clock::now() >= checked.deadline;
  switch (checked.state) {
    case State::running: return;
    case State::ended:
      if (late || phase_ == Phase::killing || !context_.mux.is_open(world_rank(place)))
        reap(checked);
      return;
    case State::reaped:
      if (!late) return;
      // A process that left the group may hold an output forever. The mux closes it when nothing is
      // left to read and its reader has taken everything: check again until then.
      context_.mux.abandon(world_rank(place));
      checked.deadline = context_.mux.is_open(world_rank(place)) ? Clock::now() + kRecheckInterval
                                                                 : Clock::time_point::max();
      return;
  }
}

void Attempt::reap(Place& place) {
  place.process.signal(SIGKILL);
  context_.guard.remove_group(place.process.leader());
  place.process.reap();
  place.state = State::reaped;
  place.deadline = Clock::now() + kLastOutput;
}

void Attempt::terminate_ranks(const Signal& signal) {
  signal_ranks(signal);
  refuse_all();
  phase_ = Phase::terminating;
  phase_deadline_ = Clock::now() + context_.options.grace;
}

void Attempt::kill_ranks() {
  for (Place& place : places_) {
    place.signal_after.reset();
    place.process.signal(SIGKILL);
  }
  phase_ = Phase::killing;
  phase_deadline_ = Clock::time_point::max();
}

/// The process that has joined a world as this rank, or has asked for the next one, if it is alive.
std::optional<pid_t> Attempt::process_of(int place) const {
  const auto number = world_of(place).number_of(place);
  const auto joined = number ? world_of(place).job->process_of(*number) : std::nullopt;
  if (joined) return joined;
  const std::optional<Request>& request = at(place).request;
  return request ? request->process : std::nullopt;
}

/// Signals the process that has joined as this rank. Returns false if there is none.
bool Attempt::signal_joined(int place, int signal) {
  Place& to = at(place);
  const auto joined = process_of(place);
  if (!joined) return false;
  if (!to.joined) to.joined = base::open_pidfd(*joined);
  // The rank may have written any pid into the segment: none outside its group gets the signal.
  return to.joined && to.process.signal_member(*joined, signal);
}

void Attempt::signal_rank(int place, int signal) {
  Place& to = at(place);
  if (to.state == State::reaped) return;
  const bool is_alone = signal_joined(place, signal);
  if (!is_alone) to.process.signal(signal);
  if (is_warning(signal)) return;
  to.signal_after = is_alone ? std::optional(signal) : std::nullopt;
  to.process.signal(SIGCONT);  // a stopped process handles no other signal
}

void Attempt::signal_ranks(const Signal& signal) {
  for (int place = 0; place < n_places(); ++place) {
    // The terminal has signalled the group of the relay itself.
    if (foreground_.is_relay(signal.sender) && reader_ == place) continue;
    signal_rank(place, signal.number);
  }
}

/// Signals the remaining processes of ranks whose joined process has ended.
void Attempt::signal_rest() {
  for (Place& place : places_) {
    if (!place.signal_after) continue;
    pollfd entry{.fd = place.joined.get(), .events = POLLIN, .revents = 0};
    if (poll(&entry, 1, /*timeout=*/0) != 1) continue;
    place.process.signal(*place.signal_after);
    place.signal_after.reset();
  }
}

}  // namespace lockstep::run
