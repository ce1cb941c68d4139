#include "run/elastic_membership.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

namespace lockstep::run {
namespace {

using std::chrono::milliseconds;
using Actions = ElasticMembership::Actions;
using Places = std::vector<int>;

constexpr milliseconds kLimit{1000};

/// Time passes only where a test says so.
class Launcher {
 public:
  Launcher(int n_places, ElasticOptions options) : membership(n_places, options) {}

  Actions ask(int place) {
    membership.asked(place, kLimit, now);
    return membership.advance(now);
  }
  Actions lose(int place) {
    membership.ended(place, /*is_done=*/false, now);
    return membership.advance(now);
  }
  Actions finish(int place) {
    membership.ended(place, /*is_done=*/true, now);
    return membership.advance(now);
  }
  /// It does so after its last barrier.
  Actions complete(int place) {
    membership.finished(place);
    return membership.advance(now);
  }
  Actions pass(milliseconds time) {
    now += time;
    return membership.advance(now);
  }
  /// Until the next action without an event.
  Actions wait() {
    EXPECT_NE(membership.wakes_at(), ElasticMembership::Clock::time_point::max());
    now = std::max(now, membership.wakes_at());
    return membership.advance(now);
  }
  milliseconds to_next() const {
    return std::chrono::duration_cast<milliseconds>(membership.wakes_at() - now);
  }

  ElasticMembership membership;
  ElasticMembership::Clock::time_point now{};
};

Places killed(const Actions& actions) {
  Places places;
  for (const auto& kill : actions.kill) places.push_back(kill.place);
  return places;
}

TEST(ElasticMembershipTest, survivors_go_on_at_once_and_the_replacement_joins_later) {
  Launcher launcher(4, {.least = 2, .most = 4});
  EXPECT_TRUE(launcher.lose(1).ends_generation);
  EXPECT_TRUE(launcher.ask(3).form.empty());
  EXPECT_TRUE(launcher.ask(0).form.empty());
  EXPECT_EQ(launcher.ask(2).form, Places({0, 2, 3}));

  EXPECT_EQ(launcher.to_next(), milliseconds(100));
  EXPECT_EQ(launcher.wait().start, Places({1}));
  const Actions joins = launcher.ask(1);
  EXPECT_TRUE(joins.form.empty());
  EXPECT_FALSE(joins.ends_generation);
  EXPECT_EQ(launcher.membership.n_waiting(), 1);

  EXPECT_TRUE(launcher.ask(0).ends_generation);  // at a step's boundary
  EXPECT_TRUE(launcher.ask(2).form.empty());
  EXPECT_EQ(launcher.ask(3).form, Places({0, 2, 3, 1}));
  EXPECT_EQ(launcher.membership.n_waiting(), 0);
}

TEST(ElasticMembershipTest, a_generation_is_ended_once) {
  Launcher launcher(3, {.least = 1, .most = 3});
  EXPECT_TRUE(launcher.lose(0).ends_generation);
  EXPECT_FALSE(launcher.lose(1).ends_generation);
  EXPECT_EQ(launcher.ask(2).form, Places({2}));
}

TEST(ElasticMembershipTest, a_rank_that_dies_while_it_waits_is_left_out) {
  Launcher launcher(3, {.least = 1, .most = 3});
  launcher.lose(0);
  launcher.ask(1);
  EXPECT_TRUE(launcher.lose(1).form.empty());
  EXPECT_EQ(launcher.ask(2).form, Places({2}));
}

TEST(ElasticMembershipTest, below_the_least_number_survivors_wait_for_replacements) {
  Launcher launcher(2, {.least = 2, .most = 2});
  launcher.lose(0);
  EXPECT_TRUE(launcher.ask(1).give_up.empty());
  EXPECT_EQ(launcher.wait().start, Places({0}));
  EXPECT_EQ(launcher.ask(0).form, Places({1, 0}));
}

TEST(ElasticMembershipTest, without_replacements_the_job_ends) {
  Launcher launcher(3, {.least = 2, .most = 2});
  launcher.lose(0);
  launcher.ask(1);
  EXPECT_EQ(launcher.ask(2).form, Places({1, 2}));  // enough: place 0 stays vacant
  launcher.lose(1);
  const auto begin = launcher.now;
  EXPECT_EQ(launcher.wait().start, Places({0}));
  for (int i = 1; i < ElasticMembership::kFailedStarts; ++i) {
    EXPECT_TRUE(launcher.lose(0).abandoned.empty());
    EXPECT_EQ(launcher.wait().start, Places({0}));
  }
  EXPECT_TRUE(launcher.ask(2).give_up.empty());
  EXPECT_EQ(launcher.lose(0).abandoned, Places({0}));  // place 1 is next
  EXPECT_GT(launcher.now - begin, std::chrono::seconds(20));
  EXPECT_EQ(launcher.wait().start, Places({1}));
  for (int i = 1; i < ElasticMembership::kFailedStarts; ++i) {
    launcher.lose(1);
    EXPECT_EQ(launcher.wait().start, Places({1}));
  }
  const Actions last = launcher.lose(1);
  EXPECT_EQ(last.abandoned, Places({1}));
  EXPECT_EQ(last.give_up, "1 of at least 2 ranks are left");
}

TEST(ElasticMembershipTest, nobody_goes_on_from_nothing) {
  Launcher launcher(2, {.least = 1, .most = 2});
  launcher.lose(0);
  EXPECT_EQ(launcher.lose(1).give_up, "no rank is left to go on from");
}

TEST(ElasticMembershipTest, a_rank_that_does_not_ask_is_killed) {
  Launcher launcher(3, {.least = 1, .most = 3});
  launcher.ask(0);
  launcher.pass(kLimit / 2);
  launcher.ask(2);  // the limit is that of the first
  EXPECT_EQ(launcher.to_next(), kLimit / 2);
  const Actions late = launcher.wait();
  EXPECT_EQ(killed(late), Places({1}));
  EXPECT_EQ(late.kill.at(0).why, "did not call regroup() in time");
  EXPECT_EQ(late.form, Places({0, 2}));
  EXPECT_TRUE(launcher.lose(1).give_up.empty());
  EXPECT_EQ(launcher.wait().start, Places({1}));
}

TEST(ElasticMembershipTest, a_rank_that_works_alone_is_not_killed_for_a_replacement) {
  Launcher launcher(3, {.least = 1, .most = 3});
  launcher.lose(2);
  EXPECT_EQ(launcher.wait().start, Places({2}));
  EXPECT_TRUE(launcher.ask(2).form.empty());
  EXPECT_EQ(launcher.to_next(), kLimit);
  const Actions late = launcher.wait();
  EXPECT_TRUE(late.kill.empty());
  EXPECT_EQ(late.late, Places({0, 1}));
  EXPECT_EQ(launcher.membership.wakes_at(), ElasticMembership::Clock::time_point::max());
  launcher.pass(2 * kLimit);
  launcher.ask(0);  // it waits: from now on the other is late
  EXPECT_EQ(launcher.to_next(), kLimit);
  const Actions forms = launcher.wait();
  EXPECT_EQ(killed(forms), Places({1}));
  EXPECT_EQ(forms.form, Places({0, 2}));
  EXPECT_FALSE(launcher.membership.asked(1, kLimit, launcher.now));
}

TEST(ElasticMembershipTest, the_limit_of_a_rank_is_not_that_of_a_replacement_before_it) {
  Launcher launcher(3, {.least = 1, .most = 3});
  launcher.lose(2);
  launcher.wait();
  launcher.ask(2);
  launcher.pass(kLimit / 2);
  launcher.ask(0);
  EXPECT_EQ(launcher.to_next(), kLimit);
}

TEST(ElasticMembershipTest, delays_double_and_begin_anew_after_a_step) {
  Launcher launcher(2, {.least = 1, .most = 2});
  milliseconds delay{100};
  const auto lose_and_join = [&] {
    launcher.lose(1);
    launcher.ask(0);
    EXPECT_EQ(launcher.to_next(), delay);
    EXPECT_EQ(launcher.wait().start, Places({1}));
    launcher.ask(1);
    EXPECT_EQ(launcher.ask(0).form, Places({0, 1}));
  };
  lose_and_join();
  delay *= 2;
  lose_and_join();
  launcher.membership.completed_step();
  delay = milliseconds(100);
  lose_and_join();
}

TEST(ElasticMembershipTest, generations_without_a_step_end_the_job) {
  Launcher launcher(4, {.least = 1, .most = 1});
  EXPECT_EQ(launcher.lose(1).give_up, "");
  for (const int place : {0, 2, 3}) launcher.ask(place);
  EXPECT_EQ(launcher.ask(0).give_up, "");  // an error, in a generation without a loss
  for (const int place : {2, 3}) launcher.ask(place);
  EXPECT_EQ(launcher.lose(2).give_up, "");
  launcher.ask(0);
  EXPECT_EQ(launcher.ask(3).give_up,
            "3 generations in a row ended before they completed a step (step_done())");
}

TEST(ElasticMembershipTest, a_replacement_that_fails_when_it_has_joined_harms_its_place_alone) {
  Launcher launcher(3, {.least = 1, .most = 3});
  launcher.membership.completed_step();
  launcher.lose(1);
  milliseconds delay{100};
  for (int i = 0; i < ElasticMembership::kFailedStarts; ++i) {
    launcher.ask(0);
    EXPECT_EQ(launcher.ask(2).form, Places({0, 2}));
    launcher.membership.completed_step();  // without the replacement
    EXPECT_EQ(launcher.to_next(), delay);
    delay = std::min(2 * delay, milliseconds(10'000));
    EXPECT_EQ(launcher.wait().start, Places({1}));
    launcher.ask(1);
    launcher.ask(0);
    EXPECT_EQ(launcher.ask(2).form, Places({0, 2, 1}));
    const Actions failed = launcher.lose(1);
    EXPECT_TRUE(failed.ends_generation);
    const bool is_last = i == ElasticMembership::kFailedStarts - 1;
    EXPECT_EQ(failed.abandoned, is_last ? Places({1}) : Places());
  }
  launcher.ask(0);
  EXPECT_EQ(launcher.ask(2).form, Places({0, 2}));
  EXPECT_EQ(launcher.membership.wakes_at(), ElasticMembership::Clock::time_point::max());
}

TEST(ElasticMembershipTest, a_place_whose_process_has_completed_a_step_begins_anew) {
  Launcher launcher(2, {.least = 1, .most = 2});
  for (int i = 0; i < 2 * ElasticMembership::kFailedStarts; ++i) {
    launcher.membership.completed_step();
    EXPECT_TRUE(launcher.lose(1).abandoned.empty());
    launcher.ask(0);
    EXPECT_EQ(launcher.to_next(), milliseconds(100));
    launcher.wait();
    launcher.ask(1);
    EXPECT_EQ(launcher.ask(0).form, Places({0, 1}));
  }
}

TEST(ElasticMembershipTest, a_replacement_that_does_not_join_is_killed_at_its_limit) {
  Launcher launcher(2, {.least = 2, .most = 2, .start_limit = milliseconds(2500)});
  launcher.lose(1);
  launcher.ask(0);
  EXPECT_EQ(launcher.wait().start, Places({1}));
  EXPECT_EQ(launcher.to_next(), milliseconds(2500));
  const Actions late = launcher.wait();
  EXPECT_EQ(killed(late), Places({1}));
  EXPECT_EQ(late.kill.at(0).why, "did not call init_dist within 2.5 s");
  launcher.lose(1);
  EXPECT_EQ(launcher.to_next(), milliseconds(200));
  launcher.wait();
  EXPECT_EQ(launcher.ask(1).form, Places({0, 1}));
}

TEST(ElasticMembershipTest, ranks_that_have_done_their_part_are_left_in_peace) {
  Launcher launcher(4, {.least = 3, .most = 4});
  for (const int place : {0, 1, 2}) launcher.complete(place);
  EXPECT_FALSE(launcher.lose(2).ends_generation);  // no loss
  EXPECT_EQ(launcher.membership.wakes_at(), ElasticMembership::Clock::time_point::max());
  // Rank 3 is behind, in the last barrier, when its peer dies there. It goes on alone.
  EXPECT_EQ(launcher.ask(3).form, Places({3}));
  EXPECT_FALSE(launcher.membership.asked(0, kLimit, launcher.now));
  launcher.finish(3);
  EXPECT_TRUE(launcher.finish(0).give_up.empty());
}

TEST(ElasticMembershipTest, a_loss_beside_ranks_that_have_done_their_part_ends_nobody) {
  Launcher launcher(3, {.least = 1, .most = 3});
  launcher.complete(0);
  launcher.complete(1);
  EXPECT_TRUE(launcher.lose(2).ends_generation);
  EXPECT_EQ(launcher.wait().start, Places({2}));
  EXPECT_TRUE(launcher.ask(2).form.empty());
  const Actions late = launcher.pass(10 * kLimit);
  EXPECT_TRUE(late.kill.empty() && late.late.empty() && late.give_up.empty());
  launcher.finish(0);
  EXPECT_EQ(launcher.finish(1).give_up, "the other ranks have finished without it");
}

TEST(ElasticMembershipTest, ranks_that_have_done_their_part_may_begin_another) {
  Launcher launcher(3, {.least = 3, .most = 3});
  for (const int place : {0, 1, 2}) launcher.complete(place);
  EXPECT_TRUE(launcher.ask(0).ends_generation);
  EXPECT_TRUE(launcher.ask(2).form.empty());
  EXPECT_EQ(launcher.to_next(), kLimit);
  EXPECT_EQ(launcher.ask(1).form, Places({0, 1, 2}));
}

TEST(ElasticMembershipTest, a_rank_that_finished_is_not_replaced) {
  Launcher launcher(2, {.least = 1, .most = 2});
  EXPECT_FALSE(launcher.finish(0).ends_generation);
  EXPECT_EQ(launcher.membership.wakes_at(), ElasticMembership::Clock::time_point::max());
  EXPECT_EQ(launcher.ask(1).form, Places({1}));
}

TEST(ElasticMembershipTest, a_rank_lost_after_the_others_have_finished_ends_the_job) {
  Launcher launcher(2, {.least = 1, .most = 2});
  launcher.finish(0);
  EXPECT_EQ(launcher.lose(1).give_up, "the other ranks have finished without it");
}

TEST(ElasticMembershipTest, replacements_end_when_the_ranks_have_finished) {
  Launcher launcher(2, {.least = 1, .most = 2});
  launcher.lose(1);
  launcher.ask(0);
  launcher.wait();
  launcher.ask(1);
  EXPECT_EQ(killed(launcher.finish(0)), Places({1}));
  EXPECT_TRUE(launcher.lose(1).give_up.empty());
  EXPECT_EQ(launcher.membership.wakes_at(), ElasticMembership::Clock::time_point::max());
}

/// What the launcher and the processes know, beside the rule: tries every order of requests, ends
/// and starts, and checks what must hold in each.
struct Model {
  enum class Process { none, runs, asked, killed, completed, done };

  Launcher launcher{3, {.least = 2, .most = 3}};
  std::vector<Process> processes = std::vector<Process>(3, Process::runs);
  bool is_over = false, has_ended = false;
  bool has_completed = false;  // a rank of the generation its part

  void apply(const Actions& actions) {
    if (actions.ends_generation) {
      EXPECT_FALSE(is_over);
      is_over = true;
    }
    for (const int place : killed(actions)) {
      EXPECT_NE(processes[index(place)], Process::none);
      processes[index(place)] = Process::killed;
    }
    for (const int place : actions.start) {
      EXPECT_EQ(processes[index(place)], Process::none);
      processes[index(place)] = Process::runs;
    }
    if (!actions.form.empty()) form(actions.form);
    has_ended = has_ended || !actions.give_up.empty();
    // What has been done is not done again.
    const Actions again = launcher.membership.advance(launcher.now);
    EXPECT_TRUE(again.kill.empty() && again.start.empty() && again.form.empty());
    EXPECT_FALSE(again.ends_generation);
  }
  void form(const Places& ranks) {
    EXPECT_TRUE(is_over);
    EXPECT_GE(ranks.size(), has_completed ? 1U : 2U);
    EXPECT_EQ(std::set<int>(ranks.begin(), ranks.end()).size(), ranks.size());
    for (const int place : ranks) {
      EXPECT_EQ(processes[index(place)], Process::asked);
      processes[index(place)] = Process::runs;
    }
    // Nobody who has asked is left out.
    EXPECT_EQ(std::ranges::count(processes, Process::asked), 0);
    is_over = has_completed = false;
  }
  static std::size_t index(int place) { return static_cast<std::size_t>(place); }

  void lose(int place) {
    processes[index(place)] = Process::none;
    apply(launcher.lose(place));
  }

  /// With every process that runs asking, and time passing, the ranks go on or the job ends.
  void expect_an_end() {
    for (int i = 0; i < 100 && is_over && !has_ended; ++i) {
      for (int place = 0; place < 3; ++place) {
        if (processes[index(place)] == Process::killed) lose(place);
        if (processes[index(place)] == Process::completed) {
          processes[index(place)] = Process::done;
          apply(launcher.finish(place));
        }
        if (processes[index(place)] != Process::runs || !is_over) continue;
        processes[index(place)] = Process::asked;
        apply(launcher.ask(place));
      }
      if (!is_over || has_ended) return;
      if (launcher.membership.wakes_at() == ElasticMembership::Clock::time_point::max()) break;
      apply(launcher.wait());
    }
    EXPECT_TRUE(!is_over || has_ended) << "the ranks wait for ever";
  }
};

/// Returns how many states were visited.
std::size_t explore(const Model& model, int depth, int n_deaths) {
  Model end = model;
  end.expect_an_end();
  std::size_t n = 1;
  if (depth == 0 || model.has_ended || ::testing::Test::HasFailure()) return n;
  const auto visit = [&](auto event, int deaths) {
    Model next = model;
    event(next);
    n += explore(next, depth - 1, deaths);
  };
  for (int place = 0; place < 3; ++place) {
    const auto process = model.processes[Model::index(place)];
    if (process == Model::Process::runs) {
      visit(
          [&](Model& m) {
            m.processes[Model::index(place)] = Model::Process::asked;
            m.apply(m.launcher.ask(place));
          },
          n_deaths);
      visit(
          [&](Model& m) {
            m.processes[Model::index(place)] = Model::Process::done;
            m.apply(m.launcher.finish(place));
          },
          n_deaths);
    }
    const auto ranks = model.launcher.membership.ranks();
    if (process == Model::Process::runs && !model.is_over &&
        std::ranges::find(ranks, place) != ranks.end()) {
      visit(
          [&](Model& m) {
            m.processes[Model::index(place)] = Model::Process::completed;
            m.has_completed = true;
            m.apply(m.launcher.complete(place));
          },
          n_deaths);
    }
    if (process == Model::Process::killed) visit([&](Model& m) { m.lose(place); }, n_deaths);
    if (n_deaths > 0 && (process == Model::Process::runs || process == Model::Process::asked ||
                         process == Model::Process::completed)) {
      visit([&](Model& m) { m.lose(place); }, n_deaths - 1);
    }
  }
  if (model.launcher.membership.wakes_at() != ElasticMembership::Clock::time_point::max()) {
    visit([](Model& m) { m.apply(m.launcher.wait()); }, n_deaths);
  }
  return n;
}

#ifndef N_EVENTS  // `./dev model` looks further
#define N_EVENTS 8
#endif

TEST(ElasticMembershipTest, every_order_of_two_deaths_and_their_replacements) {
  const std::size_t n_states = explore(Model(), /*depth=*/N_EVENTS, /*n_deaths=*/2);
  EXPECT_GT(n_states, 10'000U);
  RecordProperty("n_states", std::to_string(n_states));
}

}  // namespace
}  // namespace lockstep::run
