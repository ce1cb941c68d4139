#pragma once

#include <chrono>
#include <cstdint>
#include <lockstep/detail/time_limit.hpp>
#include <string>
#include <vector>

#include "run/node_lease.hpp"
#include "run/options.hpp"

namespace lockstep::run {

/// What the launcher of another node reports to that of node 0.
struct NodeEvent {
  enum class Kind : std::uint8_t {
    heartbeat,
    asked,           // see the functions of ElasticMembership with these names
    gave_address,    //
    ended,           //
    killed,          //
    finished,        //
    completed_step,  //
  };
  Kind kind = Kind::heartbeat;
  int node = 0;
  int incarnation = 0;       ///< that ElasticMembership::join returned
  std::uint64_t number = 0;  ///< of the incarnation's messages, from 1
  int place = -1;
  /// The newest generation of the place that its node was told of; -1: none.
  int generation = -1;
  bool is_done = false;                 ///< of ended
  std::chrono::milliseconds limit{};    ///< of asked
  NodeLease::Clock::time_point sent{};  ///< of heartbeat, by its node's clock
  /// Of ended, if the place was a rank of the generation: how, for texts, and the exit code.
  std::string why{};
  int exit_code = 0;
};

/// Which processes are the ranks of each generation of an elastic world: the rule of
/// `lockstep run --elastic`. It only computes: the launcher tells it what happened, and does what
/// advance() returns. A copy behaves as the original, so a test can try every order of events.
///
/// A place is the number of a process among those that the launchers keep running; its process may
/// be replaced. A generation ends when one of its ranks is lost, or asks for the next one. The next
/// one forms when every rank of it that is still running has asked: the survivors in their former
/// order, then the replacements that have asked, those of one node next to each other.
///
/// Several nodes: each has a launcher, and places are numbered from those of node 0 on. The
/// launcher of node 0 has this rule, and its end is that of the job; the others report to it, and
/// do what it tells them. A node is lost when its lease (NodeLease) has run out here; until then
/// its ranks may go on, whatever became of the connection, and no generation forms without them. A
/// generation forms in two steps: its places are chosen, and when each has given its address, all
/// are told. A loss between the two ends it. docs/design/021 has the proof that no two generations
/// complete steps side by side.
class ElasticMembership {
 public:
  using Clock = detail::JobClock;
  /// A place whose replacements ended so often in a row, each before a generation that it was a
  /// rank of had completed a step, gets no other. With the delays between them that takes more than
  /// 20 s.
  static constexpr int kFailedStarts = 8;

  /// n_places processes have started as the ranks of the first generation, on one node.
  ElasticMembership(int n_places, const ElasticOptions& options);
  /// By node, all of them in incarnation 1.
  ElasticMembership(const std::vector<int>& n_places, const ElasticOptions& options,
                    Clock::time_point now);

  // --- what happened, on node 0

  /// The process of a place asks for the next generation: a rank that regroups, or a replacement
  /// that joins. The limit of the first rank that asks is that of all.
  /// Returns false for a place that is done: it gets no answer.
  bool asked(int place, std::chrono::milliseconds limit, Clock::time_point now);
  /// The process of a place has ended. is_done: with exit code 0; it is not replaced then.
  void ended(int place, bool is_done, Clock::time_point now);
  /// The newest generation has completed a step.
  void completed_step();
  /// The rank of a place has done its part: its end is no loss, and those that still go on do not
  /// wait for it. It may ask for the next generation.
  void finished(int place);
  /// The rank of a place that was chosen has given its address.
  void gave_address(int place);

  // --- what happened, on other nodes

  /// A node that is no member asks to be one: its launcher, or its link, is new. Returns its
  /// incarnation; 0: the lease of the one before has not run out yet, and it asks again later.
  int join(int node, Clock::time_point now);
  enum class Reply : std::uint8_t {
    none,
    ignored,
    echo,    ///< of the heartbeat
    refuse,  ///< the rank that has asked: the others went on without it
  };
  /// A message has arrived. Those of former incarnations, those that have come before, and what
  /// was said of former generations are ignored.
  Reply report(const NodeEvent& event, Clock::time_point now);
  /// The same of a place of node 0, whose launcher says it itself.
  Reply happened(const NodeEvent& event, Clock::time_point now);

  // --- what follows

  struct Kill {
    int place;
    std::string why;  ///< "did not ..."; empty: a replacement that has nothing left to join
  };
  struct Actions {
    /// The generation is over: tell its ranks. Once for each generation.
    bool ends_generation = false;
    std::vector<Kill> kill;      ///< ranks that count as lost now, and replacements
    std::vector<int> late;       ///< ranks that do not ask, where no other rank waits for them
    std::vector<int> start;      ///< places that get a process
    std::vector<int> abandoned;  ///< places that get none any more
    std::vector<int> lost;       ///< nodes: what their links bring is ignored from now on
    /// The places of the next generation, by rank; empty: not yet. Several nodes only: each rank
    /// gives its address.
    std::vector<int> choose;
    std::vector<int> form;  ///< these places are generation(): tell all; empty: not yet
    std::string give_up;    ///< why the job ends; empty: it goes on
  };
  /// Call it after each event, and at wakes_at().
  Actions advance(Clock::time_point now);
  /// When advance() has something to do without an event; max(): never.
  Clock::time_point wakes_at() const;

  /// Whether no process runs that may be a rank, and none will.
  bool is_done() const;
  /// Replacements that have asked, and wait for the next generation.
  int n_waiting() const;
  const std::vector<int>& ranks() const { return ranks_; }  ///< places of the generation, by rank
  int generation() const { return generation_; }            ///< the newest that was chosen
  int node_of(int place) const { return places_[static_cast<std::size_t>(place)].node; }

 private:
  enum class State : std::uint8_t {
    rank,         // of the generation, running
    regrouping,   // a rank that has asked
    late,         // a process that was late for its limit: killed, lost
    starting,     // a replacement that has not asked yet
    waiting,      // one that has
    scheduled,    // gets a process at start_at
    vacant,       // has none: enough others run
    unreachable,  // its node is lost
    abandoned,    // its replacements failed too often, or have nothing left to join
    done,         // ended with exit code 0, or the others went on after it had finished
  };
  struct Place {
    int node = 0;
    State state = State::rank;
    Clock::time_point due{};            // scheduled: its start; starting: the end of its limit
    std::chrono::milliseconds delay{};  // of the next start
    int n_failed_starts = 0;
    bool is_new = false;  // a replacement that was in no generation which completed a step
    bool has_finished = false;
    bool has_formed = true;    // it was in a generation that has formed
    bool has_address = false;  // for the newest generation
    bool is_killed = false;    // late: its node has done so
  };
  struct Node {
    enum class State : std::uint8_t {
      member,
      lost,  // it may return
      gone,  // it has not; nobody waits for it any more
    };
    State state = State::member;
    Clock::time_point until = Clock::time_point::max();  // end of its lease, or of its return
    int incarnation = 1;
    std::uint64_t last_number = 0;  // of its messages
  };

  int count(std::initializer_list<State> states) const;
  int n_awaited() const;
  void fill(Clock::time_point now);
  void vacate(int place, State then);
  void look_at_nodes(Clock::time_point now, Actions& actions);
  void kill_late(Clock::time_point now, Actions& actions);
  void choose(Clock::time_point now, Actions& actions);
  void form(Actions& actions);
  void begin_limit(Clock::time_point now);

  ElasticOptions options_;
  std::vector<Node> nodes_;
  std::vector<Place> places_;
  std::vector<int> ranks_;
  int generation_ = 0;
  bool has_formed_ = true;      // the generation; before: its ranks give their addresses
  bool is_over_ = false;        // the generation
  bool has_lost_rank_ = false;  // the generation; another reason to end is a request
  bool has_lost_new_ = false;   // a rank that is_new
  bool has_finished_rank_ = false;
  bool is_told_ = false, is_late_told_ = false;
  std::vector<int> abandoned_{};  // not yet told
  Clock::time_point limit_ =
      Clock::time_point::max();              // of ranks that have not asked, or no address
  std::chrono::milliseconds asked_limit_{};  // of the last that asked
  int n_without_step_ = 0;  // generations in a row that failed before they completed a step
  bool has_completed_step_ = false;
};

}  // namespace lockstep::run
