#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "run/options.hpp"

namespace lockstep::run {

/// Which processes are the ranks of each generation of an elastic world: the rule of
/// `lockstep run --elastic`. It only computes: the launcher tells it what happened, and does what
/// advance() returns. A copy behaves as the original, so a test can try every order of events.
///
/// A place is the number of a process among those that the launcher keeps running; its process may
/// be replaced. A generation ends when one of its ranks is lost, or asks for the next one. The next
/// one forms when every rank of it that is still running has asked: the survivors in their former
/// order, then the replacements that have asked.
class ElasticMembership {
 public:
  using Clock = std::chrono::steady_clock;
  /// A place whose replacements ended so often in a row, each before a generation that it was a
  /// rank of had completed a step, gets no other. With the delays between them that takes more than
  /// 20 s.
  static constexpr int kFailedStarts = 8;

  /// n_places processes have started as the ranks of the first generation.
  ElasticMembership(int n_places, const ElasticOptions& options);

  // --- what happened

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
    std::vector<int> form;       ///< the places of the next generation, by rank; empty: not yet
    std::string give_up;         ///< why the job ends; empty: it goes on
  };
  /// Call it after each event, and at wakes_at().
  Actions advance(Clock::time_point now);
  /// When advance() has something to do without an event; max(): never.
  Clock::time_point wakes_at() const;

  /// Replacements that have asked, and wait for the next generation.
  int n_waiting() const;
  const std::vector<int>& ranks() const { return ranks_; }  ///< places of the generation, by rank

 private:
  enum class State : std::uint8_t {
    rank,        // of the generation, running
    regrouping,  // a rank that has asked
    late,        // a process that did not ask within its limit: killed, lost
    starting,    // a replacement that has not asked yet
    waiting,     // one that has
    scheduled,   // gets a process at start_at
    vacant,      // has none: enough others run
    abandoned,   // its replacements failed too often, or have nothing left to join
    done,        // ended with exit code 0, or the others went on after it had finished
  };
  struct Place {
    State state = State::rank;
    Clock::time_point due{};            // scheduled: its start; starting: the end of its limit
    std::chrono::milliseconds delay{};  // of the next start
    int n_failed_starts = 0;
    bool is_new = false;  // a replacement that was in no generation which completed a step
    bool has_finished = false;
  };

  int count(std::initializer_list<State> states) const;
  int n_awaited() const;
  void fill(Clock::time_point now);
  void kill_late(Clock::time_point now, Actions& actions);
  void form(Actions& actions);
  void begin_limit(Clock::time_point now);

  ElasticOptions options_;
  std::vector<Place> places_;
  std::vector<int> ranks_;
  bool is_over_ = false;        // the generation
  bool has_lost_rank_ = false;  // the generation; another reason to end is a request
  bool has_lost_new_ = false;   // a rank that is_new
  bool has_finished_rank_ = false;
  bool is_told_ = false, is_late_told_ = false;
  std::vector<int> abandoned_{};                        // not yet told
  Clock::time_point limit_ = Clock::time_point::max();  // of the ranks that have not asked
  std::chrono::milliseconds asked_limit_{};             // of the last that asked
  int n_without_step_ = 0;  // generations in a row that failed before they completed a step
  bool has_completed_step_ = false;
};

}  // namespace lockstep::run
