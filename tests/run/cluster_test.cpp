// The rule of elastic membership as a cluster in one process: a virtual clock, launchers, guards
// and ranks as state machines, and faults, all of it a function of a seed. What must hold:
//
// - From the moment at which node 0 chooses the next generation, no rank of an older one completes
// a
//   step or replaces a checkpoint: no two worlds both do.
// - After the last fault the job goes on or ends within a limit, and where it goes on, everybody
// who
//   is alive and reachable takes part, up to MAX ranks.
//
// LOCKSTEP_FAULT_RUNS=100000 for more schedules, LOCKSTEP_FAULT_SEED for others: a schedule that
// fails prints the seed which, with LOCKSTEP_FAULT_RUNS=1, runs it alone.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <queue>
#include <random>
#include <string>
#include <vector>

#include "run/elastic_membership.hpp"
#include "run/node_lease.hpp"

namespace lockstep::run {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using LocalTime = ElasticMembership::Clock::time_point;
using LeaseTime = NodeLease::Clock::time_point;
using Time =
    std::int64_t;  // of the test, in microseconds; every node's clock has a rate of its own
/// The rule's clock and the leases' are one here.
LeaseTime lease_time(LocalTime time) { return LeaseTime(time.time_since_epoch()); }
LocalTime local_time(LeaseTime time) { return LocalTime(time.time_since_epoch()); }
constexpr Time kMs = 1000, kSecond = 1'000'000;

constexpr milliseconds kLease{1000}, kStartLimit{2500};
constexpr Time kHeartbeat = 200 * kMs;
constexpr Time kCalm = 8 * kSecond;      // the last fault has ended
constexpr Time kReturns = 12 * kSecond;  // how long a launcher tries to join
constexpr Time kSettles = 90 * kSecond;  // after kCalm: up to 10 s before each of a few starts

/// What a launcher tells its ranks.
struct Segment {
  LocalTime until = LocalTime::max();  // of the lease
  int over = -1, formed = 0;           // generations
  int n_waiting = 0;
  bool has_told_step = false;
};

struct Process {
  enum class Phase : std::uint8_t { starting, asking, forming, running, finished };
  int place, node, launcher;
  std::size_t segment;
  Phase phase = Phase::starting;
  bool is_alive = true, hangs = false, exits_well = false, is_refused = false;
  bool has_state = false;  // was in a generation that has formed
  bool is_end_known = false;
  int generation = -1, address_of = -1;
  int request = 0, answered = -1, answer = -1;  // answer: a generation
  int steps = 0;
  Time stopped_until = 0, waits_until = 0, last_step = 0;
  bool is_in_generation() const { return phase == Phase::forming || phase == Phase::running; }
};

/// To node 0.
struct Report {
  bool is_hello = false;
  LocalTime sent{};
  NodeEvent event{};
};
/// From node 0.
struct Command {
  enum class Kind : std::uint8_t {
    welcome,
    echo,
    start,
    kill,
    choose,
    form,
    end,
    waiting,
    refuse,
    end_job,
  };
  Kind kind;
  int place = -1, generation = -1, n_waiting = 0;
  LocalTime sent{};
  std::vector<int> places{};
  int incarnation = 0;
  std::uint64_t number = 0;
};
struct Connection {
  int node;
  std::deque<Report> up{};
  std::deque<Command> down{};
  bool is_closed = false;  // by either end
};

struct Node {
  // Of the host
  double rate = 1;
  Time offset = 0, cut_until = 0, slow_until = 0;
  Time launcher_stopped_until = 0, guard_stopped_until = 0;
  int launcher = 0;  // which one, since there may be another after its end
  bool is_launcher_alive = true;
  // Of its launcher
  int incarnation = 1;  // 0: it asks to join
  std::uint64_t n_sent = 0, last_number = 0;
  NodeLease lease{kLease};
  int connection = -1;
  std::size_t segment = 0;
  std::vector<int> newest, pending, process;  // by local place; pending: requests; -1: none
  Time joins_until = 0;
  // What node 0's launcher knows of it
  bool is_member = true;
  Time lost_at = 0;
  int granted = 1;  // incarnation
  std::uint64_t n_told = 0;
  int link = -1;
};

enum class What : std::uint8_t {
  tick,            // process
  to_launcher,     // process, Note
  up,              // connection
  down,            // connection
  repeat_up,       // index of a copy
  repeat_down,     // index of a copy
  end_of_file,     // connection
  heartbeat,       // node, launcher
  lease,           // node, launcher
  guard,           // node, launcher
  timer,           // of node 0
  fault,           //
  start_launcher,  // node
};
enum Note : int { kAsks, kAddress, kEnded, kStep, kFinished };

struct Event {
  Time at;
  std::uint64_t order;
  What what;
  int a = 0, b = 0, c = 0;
  bool operator>(const Event& other) const {
    return at != other.at ? at > other.at : order > other.order;
  }
};

class Cluster {
 public:
  explicit Cluster(std::uint64_t seed)
      : random_(seed),
        n_places_(choose_sizes()),
        options_(choose_options()),
        rule_(n_places_, options_, LocalTime{}) {
    choose_weather();
    segments_.resize(nodes_.size());
    for (int place = 0; place < n_all(); ++place) {
      Process& rank = start_process(place, /*newest=*/0);
      rank.phase = Process::Phase::running;
      rank.generation = 0;
      rank.has_state = true;
      members_.push_back(place);
    }
    for (int node = 1; node < n_nodes(); ++node) {
      at_node(node).lease.echoed(lease_time(local(node)));
      segment_of(node).until = local_time(at_node(node).lease.until());
      connect(node);
      at_node(node).link = at_node(node).connection;
      arm(node);
    }
    const int n_faults = 1 + pick(6);
    for (int i = 0; i < n_faults; ++i) {
      const Time at = between(kSecond / 5, kCalm - kSecond);
      schedule(at, What::fault);
      if (chance(35)) schedule(at + between(0, 3 * kMs), What::fault);
    }
  }

  /// What is wrong with the schedule; empty: nothing.
  std::string run() {
    Time looks = kCalm;
    while (wrong_.empty() && !events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.at;
      happen(event);
      if (now_ < looks) continue;
      if (is_settled()) return wrong_;
      looks += kSecond / 4;
      if (now_ > kCalm + kSettles)
        fail(is_over_ ? "the job has ended, and not everywhere"
                      : "the job neither goes on nor ends");
    }
    if (wrong_.empty() && !is_settled()) fail("nothing happens any more");
    return wrong_;
  }
  bool has_given_up() const { return is_over_; }
  int n_generations() const { return newest_; }
  int n_lost_nodes() const { return n_lost_nodes_; }
  std::string describe() const {
    return fmt::format("{} places of {}, {}:{} ranks, limit {} ms", n_all(),
                       fmt::join(n_places_, "+"), options_.least, options_.most, limit_.count()) +
           log_;
  }

 private:
  // --- chance

  int pick(int n) { return static_cast<int>(random_() % static_cast<std::uint64_t>(n)); }
  bool chance(int percent) { return pick(100) < percent; }
  Time between(Time low, Time high) {
    return low + static_cast<Time>(random_() % static_cast<std::uint64_t>(high - low + 1));
  }
  Time some_time() {
    const int kind = pick(3);
    return kind == 0   ? between(50 * kMs, 500 * kMs)
           : kind == 1 ? between(800 * kMs, 2 * kSecond)
                       : between(2 * kSecond, 5 * kSecond);
  }
  /// Of whatever begins now and ends before kCalm.
  Time some_end() { return std::max(now_ + 1, std::min(kCalm, now_ + some_time())); }

  std::vector<int> choose_sizes() {
    std::vector<int> sizes(static_cast<std::size_t>(1 + (chance(10) ? 0 : 1 + pick(3))));
    const int n = 1 + pick(3);
    for (int& size : sizes) size = chance(20) ? 1 + pick(3) : n;
    nodes_.resize(sizes.size());
    return sizes;
  }
  ElasticOptions choose_options() {
    const int n = n_all();
    const int most = chance(60) ? n : 1 + pick(n);
    return {.least = chance(70) ? 1 : 1 + pick(most),
            .most = most,
            .start_limit = kStartLimit,
            .lease = kLease};
  }
  void choose_weather() {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      Node& node = nodes_[i];
      const auto n = static_cast<std::size_t>(n_places_[i]);
      node.newest.assign(n, -1);
      node.pending.assign(n, -1);
      node.process.assign(n, -1);
      node.segment = i;
      if (i == 0) continue;
      // Node 0's clock has rate 1: theirs differ by as much as the margin of 20 % allows.
      node.rate = chance(30) ? 0.84 : chance(30) ? 1.19 : 0.84 + 0.0035 * pick(100);
      node.offset = between(0, 100 * kSecond);
    }
    limit_ = milliseconds(chance(50) ? 300 + pick(900) : 1500 + pick(1500));
    late_after_ = between(300 * kMs, 2 * kSecond);
    total_steps_ = chance(30) ? 20 + pick(100) : 1 << 30;
    repeats_ = chance(50) ? 0 : 1 + pick(30);
    fails_ = chance(60) ? 0 : 1 + pick(20);
    hangs_ = chance(60) ? 0 : 1 + pick(10);
  }

  // --- the cluster

  int n_nodes() const { return static_cast<int>(nodes_.size()); }
  int n_all() const {
    int n = 0;
    for (const int of_node : n_places_) n += of_node;
    return n;
  }
  Node& at_node(int node) { return nodes_[static_cast<std::size_t>(node)]; }
  Process& at(int process) { return processes_[static_cast<std::size_t>(process)]; }
  Segment& segment_of(int node) { return segments_[at_node(node).segment]; }
  Connection& link(int connection) { return connections_[static_cast<std::size_t>(connection)]; }
  int first_of(int node) const {
    int place = 0;
    for (int i = 0; i < node; ++i) place += n_places_[static_cast<std::size_t>(i)];
    return place;
  }
  int& slot(std::vector<int> Node::*table, int place) {
    const int node = rule_.node_of(place);
    return (at_node(node).*table)[static_cast<std::size_t>(place - first_of(node))];
  }
  /// What a node's clock shows.
  LocalTime local(int node) const {
    const Node& of = nodes_[static_cast<std::size_t>(node)];
    return LocalTime(
        microseconds(of.offset + static_cast<Time>(static_cast<double>(now_) * of.rate)));
  }
  Time when(int node, LocalTime time) {
    const auto since = std::chrono::duration_cast<microseconds>(time.time_since_epoch()).count();
    const auto at = static_cast<double>(since - at_node(node).offset) / at_node(node).rate;
    return std::max(now_ + 1, static_cast<Time>(at) + 2);
  }
  void schedule(Time time, What what, int a = 0, int b = 0, int c = 0) {
    events_.push({time, n_events_++, what, a, b, c});
  }
  void fail(const std::string& what) {
    if (wrong_.empty()) wrong_ = fmt::format("at {} ms: {}", now_ / kMs, what);
  }
  template <class... Args>
  void note(fmt::format_string<Args...> text, Args&&... args) {
    if (is_logged) {
      log_ += fmt::format("\n  {:8.1f} ms  ", static_cast<double>(now_) / 1e3) +
              fmt::format(text, std::forward<Args>(args)...);
    }
  }

  /// Whether the process is stopped until a time; its event happens then.
  bool is_deferred(const Event& event, Time stopped_until) {
    if (stopped_until <= now_) return false;
    schedule(stopped_until + between(0, 2 * kMs), event.what, event.a, event.b, event.c);
    return true;
  }

  void happen(const Event& event) {
    switch (event.what) {
      case What::tick:
        if (at(event.a).is_alive && !is_deferred(event, at(event.a).stopped_until)) tick(event.a);
        return;
      case What::to_launcher: {
        const int node = at(event.a).node;
        if (!runs(node, at(event.a).launcher)) return;
        if (is_deferred(event, at_node(node).launcher_stopped_until)) return;
        notice(node, event.a, event.b, event.c);
        return;
      }
      case What::up:
      case What::down:
      case What::end_of_file: {
        const Connection& on = link(event.a);
        if (is_deferred(event, at_node(on.node).cut_until)) return;
        const int reader = event.what == What::down ? on.node : 0;
        if (is_deferred(event, at_node(reader).launcher_stopped_until)) return;
        arrive(event);
        return;
      }
      case What::repeat_up:
        if (!is_deferred(event, at_node(0).launcher_stopped_until)) {
          take(-1, copies_up_[static_cast<std::size_t>(event.a)]);
        }
        return;
      case What::repeat_down:
        if (runs(event.b, event.c) &&
            !is_deferred(event, at_node(event.b).launcher_stopped_until)) {
          obey(event.b, -1, copies_down_[static_cast<std::size_t>(event.a)]);
        }
        return;
      case What::heartbeat:
        if (runs(event.a, event.b) &&
            !is_deferred(event, at_node(event.a).launcher_stopped_until)) {
          beat(event.a);
        }
        return;
      case What::lease:
        if (runs(event.a, event.b) &&
            !is_deferred(event, at_node(event.a).launcher_stopped_until)) {
          look_at_lease(event.a);
        }
        return;
      case What::guard:
        if (!is_deferred(event, at_node(event.a).guard_stopped_until)) guard(event.a, event.b);
        return;
      case What::timer:
        if (is_deferred(event, at_node(0).launcher_stopped_until)) return;
        timer_at_ = LocalTime::max();
        advance();
        return;
      case What::fault: fault(); return;
      case What::start_launcher: start_launcher(event.a); return;
    }
  }
  bool runs(int node, int launcher) {
    return at_node(node).is_launcher_alive && at_node(node).launcher == launcher;
  }

  // --- ranks

  Process& start_process(int place, int newest) {
    const int node = rule_.node_of(place);
    for (const Process& other : processes_) {
      if (other.place == place && other.is_alive && holds_lease(other)) {
        fail(fmt::format("place {} has two processes", place));
      }
    }
    slot(&Node::newest, place) = newest;
    slot(&Node::pending, place) = -1;
    slot(&Node::process, place) = static_cast<int>(processes_.size());
    processes_.push_back({.place = place,
                          .node = node,
                          .launcher = at_node(node).launcher,
                          .segment = at_node(node).segment});
    schedule(now_ + between(5 * kMs, 100 * kMs), What::tick,
             static_cast<int>(processes_.size()) - 1);
    return processes_.back();
  }
  /// Whether the process may still complete a step.
  bool holds_lease(const Process& process) const {
    return process.node == 0 || local(process.node) < segments_[process.segment].until;
  }
  void end(int process, bool is_done) {
    Process& ended = at(process);
    if (!ended.is_alive) return;
    ended.is_alive = false;
    ended.exits_well = is_done;
    schedule(now_ + between(0, 2 * kMs), What::to_launcher, process, kEnded);
  }
  void ask(int process) {
    Process& rank = at(process);
    rank.phase = Process::Phase::asking;
    rank.waits_until = now_ + between(limit_.count() * kMs, 2 * limit_.count() * kMs);
    schedule(now_ + between(0, 2 * kMs), What::to_launcher, process, kAsks, ++rank.request);
  }

  void tick(int process) {
    Process& rank = at(process);
    if (rank.hangs) return;
    const bool has_finished = rank.phase == Process::Phase::finished;
    if (now_ < kCalm && !has_finished && pick(1000) < hangs_) {
      note("rank at place {} hangs", rank.place);
      rank.hangs = true;
      return;
    }
    const Segment& segment = segments_[rank.segment];
    switch (rank.phase) {
      case Process::Phase::starting: ask(process); break;
      case Process::Phase::asking:
        if (rank.is_refused) return end(process, /*is_done=*/false);
        if (rank.answered == rank.request) {
          rank.phase = Process::Phase::forming;
          rank.generation = rank.answer;
          rank.waits_until = now_ + between(limit_.count() * kMs, 2 * limit_.count() * kMs);
        } else if (now_ > rank.waits_until) {
          if (chance(30)) return end(process, /*is_done=*/false);
          ask(process);
        }
        break;
      case Process::Phase::forming:
        if (segment.over >= rank.generation) {
          ask(process);
        } else if (rank.address_of != rank.generation) {
          rank.address_of = rank.generation;
          schedule(now_ + between(0, 2 * kMs), What::to_launcher, process, kAddress,
                   rank.generation);
        } else if (segment.formed >= rank.generation) {
          rank.phase = Process::Phase::running;
          rank.steps = std::max(rank.steps, steps_of_[rank.generation]);
          rank.last_step = now_;
        } else if (now_ > rank.waits_until) {
          ask(process);
        }
        break;
      case Process::Phase::running: step(process); break;
      case Process::Phase::finished: return end(process, /*is_done=*/true);
    }
    const bool is_quick =
        rank.phase == Process::Phase::asking || rank.phase == Process::Phase::forming;
    schedule(now_ + (is_quick ? between(kMs, 20 * kMs) : between(20 * kMs, 150 * kMs)), What::tick,
             process);
  }

  void step(int process) {
    Process& rank = at(process);
    Segment& segment = segments_[rank.segment];
    if (segment.over >= rank.generation) return ask(process);
    if (!holds_lease(rank)) return;  // step_done refuses
    if (rank.generation != newest_ || rank.generation != formed_) {
      return fail(fmt::format("place {} completes a step of generation {}, and {} was chosen",
                              rank.place, rank.generation, newest_));
    }
    ++rank.steps;
    rank.last_step = now_;
    if (!segment.has_told_step) {
      schedule(now_ + between(0, 2 * kMs), What::to_launcher, process, kStep, rank.generation);
      segment.has_told_step = true;
    }
    if (rank.steps >= total_steps_) {
      rank.phase = Process::Phase::finished;
      schedule(now_ + between(0, 2 * kMs), What::to_launcher, process, kFinished, rank.generation);
      return;
    }
    if (segment.n_waiting > 0) return ask(process);
    for (const int peer : members_) {
      const Process& other = at(peer);
      if (other.phase == Process::Phase::finished || other.exits_well) continue;
      if (now_ - std::max(other.last_step, formed_at_) > late_after_) return ask(process);
    }
  }

  // --- what every launcher does

  /// Of a rank that it has started.
  void notice(int node, int process, int what, int value) {
    const Process& rank = at(process);
    if (slot(&Node::process, rank.place) != process) return;
    NodeEvent event{.place = rank.place, .generation = value, .limit = limit_};
    switch (what) {
      case kAsks:
        if (value != rank.request) return;
        slot(&Node::pending, rank.place) = value;
        event.kind = NodeEvent::Kind::asked;
        event.generation = slot(&Node::newest, rank.place);
        break;
      case kAddress: event.kind = NodeEvent::Kind::gave_address; break;
      case kEnded:
        event.kind = NodeEvent::Kind::ended;
        event.is_done = rank.exits_well;
        slot(&Node::process, rank.place) = -1;
        break;
      case kStep: event.kind = NodeEvent::Kind::completed_step; break;
      default: event.kind = NodeEvent::Kind::finished; break;
    }
    if (node != 0) return report(node, event);
    at(process).is_end_known |= event.kind == NodeEvent::Kind::ended;
    const auto reply = rule_.happened(event, local(0));
    at(process).is_refused |= reply == ElasticMembership::Reply::refuse;
    advance();
  }

  /// Does what node 0 has decided.
  void carry_out(int node, const Command& command) {
    Segment& segment = segment_of(node);
    switch (command.kind) {
      case Command::Kind::start:
        if (node != 0 && now_ < kCalm && chance(fails_)) {
          return report(node, {.kind = NodeEvent::Kind::ended, .place = command.place});
        }
        start_process(command.place, /*newest=*/-1);
        return;
      case Command::Kind::kill: {
        const int process = slot(&Node::process, command.place);
        if (process >= 0) end(process, /*is_done=*/false);
        if (node != 0) report(node, {.kind = NodeEvent::Kind::killed, .place = command.place});
        return;
      }
      case Command::Kind::choose:
        for (const int place : command.places) {
          if (rule_.node_of(place) != node) continue;
          slot(&Node::newest, place) = command.generation;
          const int process = slot(&Node::process, place);
          if (process < 0 || slot(&Node::pending, place) < 0) continue;
          at(process).answered = std::exchange(slot(&Node::pending, place), -1);
          at(process).answer = command.generation;
        }
        segment.has_told_step = false;
        return;
      case Command::Kind::form: segment.formed = command.generation; return;
      case Command::Kind::end: segment.over = command.generation; return;
      case Command::Kind::waiting: segment.n_waiting = command.n_waiting; return;
      case Command::Kind::refuse: {
        const int process = slot(&Node::process, command.place);
        if (process >= 0) at(process).is_refused = true;
        return;
      }
      case Command::Kind::end_job:
        kill_all(node, at_node(node).launcher);
        stop_launcher(node);
        return;
      case Command::Kind::welcome:
      case Command::Kind::echo: return;
    }
  }
  void kill_all(int node, int launcher) {
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      if (processes_[i].node == node && processes_[i].launcher == launcher) {
        end(static_cast<int>(i), /*is_done=*/false);
      }
    }
  }
  /// It exits, or is killed.
  void stop_launcher(int node) {
    Node& of = at_node(node);
    if (!of.is_launcher_alive) return;
    of.is_launcher_alive = false;
    if (node == 0) {
      is_over_ = true;
      for (int other = 1; other < n_nodes(); ++other) close(at_node(other).link);
    } else {
      close(of.connection);
    }
    schedule(now_ + between(0, 5 * kMs), What::guard, node, of.launcher);
  }
  void guard(int node, int launcher) {
    Node& of = at_node(node);
    // A launcher that joins again has ended its ranks itself.
    const bool has_ended = !runs(node, launcher);
    if (has_ended || (node != 0 && local(node) >= segment_of(node).until)) kill_all(node, launcher);
    if (!has_ended && node != 0 && of.incarnation != 0) {
      schedule(std::max(when(node, segment_of(node).until), now_ + 20 * kMs), What::guard, node,
               launcher);
    }
  }

  // --- launchers of other nodes

  void connect(int node) {
    at_node(node).connection = static_cast<int>(connections_.size());
    connections_.push_back({.node = node});
  }
  void arm(int node) {
    const Node& of = at_node(node);
    schedule(now_ + between(0, kHeartbeat), What::heartbeat, node, of.launcher);
    schedule(when(node, local_time(of.lease.until())), What::lease, node, of.launcher);
    schedule(when(node, local_time(of.lease.until())), What::guard, node, of.launcher);
  }
  Time transit(int node) {
    if (at_node(node).slow_until > now_) return between(0, 700 * kMs);
    return chance(2) ? between(0, 60 * kMs) : between(100, 3 * kMs);
  }
  void send_up(int node, const Report& report) {
    Node& of = at_node(node);
    if (of.connection < 0 || link(of.connection).is_closed) return;
    link(of.connection).up.push_back(report);
    schedule(now_ + transit(node), What::up, of.connection);
  }
  void report(int node, NodeEvent event) {
    Node& of = at_node(node);
    if (of.incarnation == 0) return;
    event.node = node;
    event.incarnation = of.incarnation;
    event.number = ++of.n_sent;
    send_up(node, {.sent = local(node), .event = event});
  }
  void beat(int node) {
    Node& of = at_node(node);
    if (of.incarnation != 0) {
      report(node, {.kind = NodeEvent::Kind::heartbeat});
    } else {
      if (now_ > of.joins_until) return stop_launcher(node);  // "node 0 is lost"
      if (of.connection < 0 || link(of.connection).is_closed) connect(node);
      send_up(node, {.is_hello = true, .sent = local(node)});
    }
    schedule(now_ + kHeartbeat, What::heartbeat, node, of.launcher);
  }
  void look_at_lease(int node) {
    Node& of = at_node(node);
    if (of.incarnation == 0) return;
    if (of.lease.has_run_out(lease_time(local(node)))) return leave(node);
    schedule(when(node, local_time(of.lease.until())), What::lease, node, of.launcher);
  }
  /// Ends the ranks, and asks to join again.
  void leave(int node) {
    Node& of = at_node(node);
    note("node {} leaves", node);
    kill_all(node, of.launcher);
    close(of.connection);
    forget(node);
  }
  void forget(int node) {
    Node& of = at_node(node);
    of.incarnation = 0;
    of.connection = -1;
    of.segment = segments_.size();
    segments_.push_back({.until = LocalTime::min()});
    std::ranges::fill(of.newest, -1);
    std::ranges::fill(of.pending, -1);
    std::ranges::fill(of.process, -1);
    of.joins_until = now_ + kReturns;
  }
  void start_launcher(int node) {
    Node& of = at_node(node);
    if (of.is_launcher_alive || is_over_) return;
    note("another launcher on node {}", node);
    of.is_launcher_alive = true;
    ++of.launcher;
    of.launcher_stopped_until = 0;
    forget(node);
    schedule(now_, What::heartbeat, node, of.launcher);
  }
  void obey(int node, int connection, const Command& command) {
    Node& of = at_node(node);
    if (command.kind == Command::Kind::welcome) {
      if (of.incarnation != 0 || connection != of.connection) return;
      of.incarnation = command.incarnation;
      of.n_sent = 0;
      of.last_number = command.number;
      of.lease = NodeLease(kLease);
      of.lease.echoed(lease_time(command.sent));
      segment_of(node).until = local_time(of.lease.until());
      note("node {} joins as incarnation {}", node, of.incarnation);
      schedule(when(node, local_time(of.lease.until())), What::lease, node, of.launcher);
      schedule(when(node, local_time(of.lease.until())), What::guard, node, of.launcher);
      return;
    }
    if (of.incarnation == 0 || command.incarnation != of.incarnation) return;
    if (command.number <= of.last_number) return;
    of.last_number = command.number;
    if (command.kind == Command::Kind::echo) {
      of.lease.echoed(lease_time(command.sent));
      segment_of(node).until = local_time(of.lease.until());
      return;
    }
    if (of.lease.has_run_out(lease_time(local(node)))) return leave(node);
    carry_out(node, command);
  }

  // --- connections

  void close(int connection) {
    if (connection < 0 || link(connection).is_closed) return;
    Connection& closed = link(connection);
    closed.is_closed = true;
    if (chance(50)) {
      for (const Report& report : closed.up) {  // node 0 reads the next link first
        copies_up_.push_back(report);
        schedule(now_ + some_time(), What::repeat_up, static_cast<int>(copies_up_.size()) - 1);
      }
      closed.up.clear();
    }
    if (chance(50)) closed.down.clear();
    schedule(now_ + transit(closed.node), What::end_of_file, connection);
  }
  void arrive(const Event& event) {
    Connection& on = link(event.a);
    const int node = on.node;
    if (event.what == What::up) {
      if (on.up.empty()) return;
      const Report report = std::move(on.up.front());
      on.up.pop_front();
      if (chance(repeats_)) {
        copies_up_.push_back(report);
        schedule(now_ + some_time(), What::repeat_up, static_cast<int>(copies_up_.size()) - 1);
      }
      take(event.a, report);
    } else if (event.what == What::down) {
      if (on.down.empty()) return;
      const Command command = std::move(on.down.front());
      on.down.pop_front();
      if (chance(repeats_)) {
        copies_down_.push_back(command);
        schedule(now_ + some_time(), What::repeat_down, static_cast<int>(copies_down_.size()) - 1,
                 node, at_node(node).launcher);
      }
      if (at_node(node).is_launcher_alive && at_node(node).connection == event.a) {
        obey(node, event.a, command);
      }
    } else if (at_node(node).is_launcher_alive && at_node(node).connection == event.a) {
      // Node 0 is lost, or only the link: the node's ranks may run until the lease has run out.
      if (at_node(node).incarnation == 0 || chance(50)) leave(node);
    }
  }

  // --- node 0's launcher

  void tell(int node, Command command) {
    Node& of = at_node(node);
    if (of.link < 0 || link(of.link).is_closed) return;
    command.incarnation = of.granted;
    command.number = ++of.n_told;
    link(of.link).down.push_back(command);
    schedule(now_ + transit(node), What::down, of.link);
  }
  void tell_all(const Command& command) {
    if (at_node(0).is_launcher_alive) carry_out(0, command);
    for (int node = 1; node < n_nodes(); ++node) {
      if (at_node(node).is_member) tell(node, command);
    }
  }
  void take(int connection, const Report& report) {
    if (is_over_) return;
    const LocalTime now = local(0);
    if (report.is_hello) {
      if (connection < 0) return;
      const int node = link(connection).node;
      const int incarnation = rule_.join(node, now);
      if (incarnation != 0) {
        Node& of = at_node(node);
        of.is_member = true;
        of.granted = incarnation;
        of.n_told = 0;
        of.link = connection;
        tell(node, {.kind = Command::Kind::welcome, .sent = report.sent});
        tell(node, {.kind = Command::Kind::waiting, .n_waiting = n_waiting_});
      }
      return advance();
    }
    const NodeEvent& event = report.event;
    Node& of = at_node(event.node);
    if (event.kind == NodeEvent::Kind::ended && of.is_member && of.granted == event.incarnation) {
      for (Process& process : processes_) {
        if (process.place == event.place && !process.is_alive) process.is_end_known = true;
      }
    }
    switch (rule_.report(event, now)) {
      case ElasticMembership::Reply::none:
      case ElasticMembership::Reply::ignored: break;
      case ElasticMembership::Reply::echo:
        tell(event.node, {.kind = Command::Kind::echo, .sent = report.sent});
        break;
      case ElasticMembership::Reply::refuse:
        tell(event.node, {.kind = Command::Kind::refuse, .place = event.place});
        break;
    }
    advance();
  }

  void advance() {
    if (is_over_ || !wrong_.empty()) return;
    const ElasticMembership::Actions actions = rule_.advance(local(0));
    for (const int node : actions.lost) {
      note("node {} is lost", node);
      ++n_lost_nodes_;
      at_node(node).is_member = false;
      at_node(node).lost_at = now_;
      close(at_node(node).link);
    }
    n_abandoned_ += static_cast<int>(actions.abandoned.size());
    for (const auto& [place, why] : actions.kill) {
      note("kill {}: {}", place, why);
      const Command kill{.kind = Command::Kind::kill, .place = place};
      rule_.node_of(place) == 0 ? carry_out(0, kill) : tell(rule_.node_of(place), kill);
    }
    if (actions.ends_generation) {
      note("generation {} is over", newest_);
      tell_all({.kind = Command::Kind::end, .generation = newest_});
    }
    bool have_failed = false;
    for (const int place : actions.start) {
      const Command start{.kind = Command::Kind::start, .place = place};
      if (rule_.node_of(place) != 0) {
        tell(rule_.node_of(place), start);
      } else if (now_ < kCalm && chance(fails_)) {
        rule_.ended(place, /*is_done=*/false, local(0));
        have_failed = true;
      } else {
        carry_out(0, start);
      }
    }
    if (!actions.choose.empty() || (n_nodes() == 1 && !actions.form.empty())) {
      choose(n_nodes() == 1 ? actions.form : actions.choose);
    }
    if (!actions.form.empty()) form(actions.form);
    if (!actions.give_up.empty()) return give_up(actions.give_up);
    if (n_waiting_ != rule_.n_waiting()) {
      n_waiting_ = rule_.n_waiting();
      tell_all({.kind = Command::Kind::waiting, .n_waiting = n_waiting_});
    }
    if (rule_.wakes_at() < timer_at_) {
      timer_at_ = rule_.wakes_at();
      schedule(when(0, timer_at_), What::timer);
    }
    if (have_failed) advance();
  }

  void choose(const std::vector<int>& places) {
    if (rule_.generation() <= newest_) {
      return fail(fmt::format("generation {} is chosen again", rule_.generation()));
    }
    newest_ = rule_.generation();
    note("generation {} is chosen: {}", newest_, fmt::join(places, " "));
    for (const Process& process : processes_) {
      if (process.is_alive && process.is_in_generation() && process.generation < newest_ &&
          holds_lease(process)) {
        return fail(fmt::format("generation {} is chosen, and place {} is in generation {}",
                                newest_, process.place, process.generation));
      }
    }
    chosen_ = places;
    const int n = static_cast<int>(places.size());
    const bool has_finished = std::ranges::any_of(processes_, [](const Process& process) {
      return process.phase == Process::Phase::finished;
    });
    const int most = std::max(options_.most, static_cast<int>(members_.size()));
    if ((n < options_.least && !has_finished) || n > most) return fail(fmt::format("{} ranks", n));
    bool has_survivor = false;
    int steps = 0;
    for (const int place : places) {
      const Process& process = at(newest_process(place));
      has_survivor = has_survivor || (process.has_state && !process.is_end_known);
      steps = std::max(steps, process.steps);
    }
    if (!has_survivor) return fail("replacements go on from nothing");
    steps_of_[newest_] = steps;
    tell_all({.kind = Command::Kind::choose, .generation = newest_, .places = places});
  }
  int newest_process(int place) const {
    int newest = -1;
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      if (processes_[i].place == place) newest = static_cast<int>(i);
    }
    return newest;
  }

  void form(const std::vector<int>& places) {
    if (places != chosen_) return fail("another generation forms than was chosen");
    members_.clear();
    for (const int place : places) {
      const int member = newest_process(place);
      if (n_nodes() > 1 && at(member).address_of != newest_)
        return fail(
            fmt::format("generation {} forms without the address of place {}", newest_, place));
      if (at(member).is_end_known || !at_node(at(member).node).is_member) {
        return fail(
            fmt::format("generation {} forms with place {}, which is lost", newest_, place));
      }
      members_.push_back(member);
      at(member).has_state = true;
    }
    note("generation {} has formed", newest_);
    formed_ = newest_;
    formed_at_ = now_;
    tell_all({.kind = Command::Kind::form, .generation = newest_});
  }

  void give_up(const std::string& why) {
    note("the job ends: {}", why);
    int n_left = 0, n_survivors = 0;
    for (const Process& process : processes_) {
      if (!process.is_alive || process.phase == Process::Phase::finished) continue;
      if (process.phase == Process::Phase::starting || !holds_lease(process)) continue;
      ++n_left;
      n_survivors += process.has_state ? 1 : 0;
    }
    const bool has_failed = why.find("in a row") != std::string::npos;
    if (n_survivors > 0 && n_left >= options_.least && !has_failed) {
      return fail(fmt::format("{} ranks could go on, but: {}", n_left, why));
    }
    const bool may_return = std::ranges::any_of(nodes_, [&](const Node& node) {
      return !node.is_member && now_ < node.lost_at + kStartLimit.count() * kMs;
    });
    if (n_survivors > 0 && may_return && !has_failed) return fail("no lost node is waited for");
    tell_all({.kind = Command::Kind::end_job});
    is_over_ = true;
  }

  // --- faults

  void fault() {
    if (now_ >= kCalm) return;
    const int node = pick(n_nodes());
    Node& of = at_node(node);
    const int kind = pick(100);
    if (kind < 20) {
      const int process = some_rank();
      if (process < 0) return;
      note("rank at place {} is killed", at(process).place);
      return end(process, /*is_done=*/kind == 0);
    }
    if (kind < 28) {
      const int process = some_rank();
      if (process < 0) return;
      at(process).stopped_until = some_end();
      note("rank at place {} stops until {}", at(process).place, at(process).stopped_until / kMs);
      return;
    }
    if (kind < 32) {
      const int process = some_rank();
      if (process < 0 || at(process).phase == Process::Phase::finished) return;
      at(process).hangs = true;
      note("rank at place {} hangs", at(process).place);
      return;
    }
    const Time until = some_end();
    if (kind < 42) {  // the launcher, the guard or both stop
      note("launcher or guard of node {} stops until {}", node, until / kMs);
      if (kind != 32) of.launcher_stopped_until = until;
      if (kind < 38) of.guard_stopped_until = until;
      return;
    }
    if (kind < 50) {  // the host stops
      note("host {} stops until {}", node, until / kMs);
      of.launcher_stopped_until = of.guard_stopped_until = until;
      for (Process& process : processes_) {
        if (process.node == node) process.stopped_until = until;
      }
      return;
    }
    if (kind < 52) {
      note("node 0's launcher is killed");
      return stop_launcher(0);
    }
    if (node == 0) return;
    if (kind < 62) {
      note("launcher of node {} is killed, another starts at {}", node, until / kMs);
      stop_launcher(node);
      return schedule(until, What::start_launcher, node);
    }
    if (kind < 70) {
      note("host {} loses power until {}", node, until / kMs);
      const int launcher = of.launcher;
      of.cut_until = until;
      stop_launcher(node);
      for (int past = 0; past <= launcher; ++past) kill_all(node, past);
      return schedule(until, What::start_launcher, node);
    }
    if (kind < 85) {
      note("link of node {} is cut until {}", node, until / kMs);
      of.cut_until = until;
      return;
    }
    if (kind < 92) {
      note("link of node {} is slow until {}", node, until / kMs);
      of.slow_until = until;
      return;
    }
    note("connection of node {} breaks", node);
    close(of.connection);
  }
  int some_rank() {
    std::vector<int> alive;
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      if (processes_[i].is_alive) alive.push_back(static_cast<int>(i));
    }
    return alive.empty() ? -1
                         : alive[static_cast<std::size_t>(pick(static_cast<int>(alive.size())))];
  }

  // --- after the last fault

  bool is_settled() {
    const auto n_alive = std::ranges::count_if(processes_, &Process::is_alive);
    if (is_over_) {
      return n_alive == 0 && std::ranges::none_of(nodes_, &Node::is_launcher_alive);
    }
    if (n_alive == 0) {  // all have finished
      return std::ranges::all_of(rule_.ranks(), [&](int place) {
        const Process& rank = at(newest_process(place));
        return rank.exits_well || rank.phase == Process::Phase::finished;
      });
    }
    if (formed_ != newest_) return false;
    int n_lost = 0, n_running = 0, n_hanging = 0;
    for (const int member : members_) {
      const Process& rank = at(member);
      if (rank.exits_well || rank.phase == Process::Phase::finished) continue;
      const bool is_running = rank.is_alive && rank.phase == Process::Phase::running;
      ++(rank.is_alive && rank.hangs ? n_hanging : is_running ? n_running : n_lost);
    }
    // A rank that does nothing, and for which no other rank waits, is left in peace.
    if (n_hanging > 0 || n_lost > 0) return n_hanging > 0 && n_running == 0;
    const auto n_done = static_cast<int>(std::ranges::count_if(processes_, &Process::exits_well));
    return std::ranges::all_of(nodes_, &Node::is_member) &&
           n_running >= std::min(options_.most, n_all() - n_abandoned_) - n_done;
  }

 public:
  static inline bool is_logged = false;

 private:
  std::mt19937_64 random_;
  std::vector<Node> nodes_;
  std::vector<int> n_places_;
  ElasticOptions options_;
  ElasticMembership rule_;
  milliseconds limit_{};  // of a rank that asks
  Time late_after_ = 0;   // ranks of the generation
  int total_steps_ = 0, repeats_ = 0, fails_ = 0, hangs_ = 0;

  Time now_ = 0;
  std::uint64_t n_events_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<Process> processes_;
  std::vector<Segment> segments_;
  std::deque<Connection> connections_;
  std::vector<Report> copies_up_;
  std::vector<Command> copies_down_;
  // Node 0's launcher, and what has come of it
  LocalTime timer_at_ = LocalTime::max();
  int n_waiting_ = 0, n_abandoned_ = 0, n_lost_nodes_ = 0;
  int newest_ = 0, formed_ = 0;  // generations
  std::vector<int> chosen_;
  std::vector<int> members_;  // processes of the newest that has formed
  std::map<int, int> steps_of_;
  Time formed_at_ = 0;
  bool is_over_ = false;
  std::string wrong_, log_;
};

std::uint64_t setting(const char* name, std::uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(ClusterTest, random_schedules_have_one_world_and_leave_nobody_out) {
  const std::uint64_t n = setting("LOCKSTEP_FAULT_RUNS", 5000);
  const std::uint64_t first = setting("LOCKSTEP_FAULT_SEED", 1);
  Cluster::is_logged = n == 1;
  std::uint64_t n_ended = 0, n_generations = 0, n_lost_nodes = 0;
  for (std::uint64_t seed = first; seed < first + n; ++seed) {
    Cluster cluster(seed);
    const std::string wrong = cluster.run();
    ASSERT_EQ(wrong, "") << "LOCKSTEP_FAULT_RUNS=1 LOCKSTEP_FAULT_SEED=" << seed
                         << " runs this schedule: " << cluster.describe();
    n_ended += cluster.has_given_up() ? 1 : 0;
    n_generations += static_cast<std::uint64_t>(cluster.n_generations());
    n_lost_nodes += static_cast<std::uint64_t>(cluster.n_lost_nodes());
  }
  fmt::print("{} schedules: {} generations, {} lost nodes, {} jobs ended early\n", n, n_generations,
             n_lost_nodes, n_ended);
}

}  // namespace
}  // namespace lockstep::run
