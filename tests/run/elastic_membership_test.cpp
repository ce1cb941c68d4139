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
    return membership.next(now);
  }
  Actions lose(int place) {
    membership.ended(place, /*is_done=*/false, now);
    return membership.next(now);
  }
  Actions finish(int place) {
    membership.ended(place, /*is_done=*/true, now);
    return membership.next(now);
  }
  Actions pass(milliseconds time) {
    now += time;
    return membership.next(now);
  }
  /// Until the next action without an event.
  Actions wait() {
    EXPECT_NE(membership.wakes_at(), ElasticMembership::Clock::time_point::max());
    now = std::max(now, membership.wakes_at());
    return membership.next(now);
  }
  milliseconds to_next() const {
    return std::chrono::duration_cast<milliseconds>(membership.wakes_at() - now);
  }

  ElasticMembership membership;
  ElasticMembership::Clock::time_point now{};
};

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
  EXPECT_EQ(launcher.wait().start, Places({0}));
  for (int i = 0; i < 2; ++i) {
    launcher.lose(0);
    EXPECT_EQ(launcher.wait().start, Places({0}));
  }
  EXPECT_TRUE(launcher.ask(2).give_up.empty());
  launcher.lose(0);  // three starts without joining; place 1 is next
  EXPECT_EQ(launcher.wait().start, Places({1}));
  for (int i = 0; i < 2; ++i) {
    launcher.lose(1);
    EXPECT_EQ(launcher.wait().start, Places({1}));
  }
  EXPECT_EQ(launcher.lose(1).give_up, "1 of at least 2 ranks are left");
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
  EXPECT_EQ(late.kill, Places({1}));
  EXPECT_EQ(late.form, Places({0, 2}));
  EXPECT_TRUE(launcher.lose(1).give_up.empty());
  EXPECT_EQ(launcher.wait().start, Places({1}));
}

TEST(ElasticMembershipTest, a_rank_that_does_not_ask_is_killed_when_a_replacement_waits) {
  Launcher launcher(2, {.least = 1, .most = 2});
  launcher.lose(1);
  EXPECT_EQ(launcher.wait().start, Places({1}));
  EXPECT_TRUE(launcher.ask(1).form.empty());  // rank 0 hangs
  EXPECT_EQ(launcher.to_next(), kLimit);
  EXPECT_EQ(launcher.wait().kill, Places({0}));
  EXPECT_EQ(launcher.lose(0).give_up, "no rank is left to go on from");
  EXPECT_FALSE(launcher.membership.asked(0, kLimit, launcher.now));
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
  Launcher launcher(2, {.least = 1, .most = 2});
  std::string why;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(why, "");
    launcher.lose(1);
    why = launcher.ask(0).give_up;
    if (!why.empty()) break;
    launcher.wait();
    launcher.ask(1);
    launcher.ask(0);
  }
  EXPECT_EQ(why, "3 generations in a row ended before they completed a step (step_done())");
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
  EXPECT_EQ(launcher.finish(0).kill, Places({1}));
  EXPECT_TRUE(launcher.lose(1).give_up.empty());
  EXPECT_EQ(launcher.membership.wakes_at(), ElasticMembership::Clock::time_point::max());
}

/// What the launcher and the processes know, beside the rule: tries every order of requests, ends
/// and starts, and checks what must hold in each.
struct Model {
  enum class Process { none, runs, asked, killed, done };

  Launcher launcher{3, {.least = 2, .most = 3}};
  std::vector<Process> processes = std::vector<Process>(3, Process::runs);
  bool is_over = false, has_ended = false;

  void apply(const Actions& actions) {
    if (actions.ends_generation) {
      EXPECT_FALSE(is_over);
      is_over = true;
    }
    for (const int place : actions.kill) {
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
    const Actions again = launcher.membership.next(launcher.now);
    EXPECT_TRUE(again.kill.empty() && again.start.empty() && again.form.empty());
    EXPECT_FALSE(again.ends_generation);
  }
  void form(const Places& ranks) {
    EXPECT_TRUE(is_over);
    EXPECT_GE(ranks.size(), 2U);
    EXPECT_EQ(std::set<int>(ranks.begin(), ranks.end()).size(), ranks.size());
    for (const int place : ranks) {
      EXPECT_EQ(processes[index(place)], Process::asked);
      processes[index(place)] = Process::runs;
    }
    // Nobody who has asked is left out.
    EXPECT_EQ(std::ranges::count(processes, Process::asked), 0);
    is_over = false;
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
    if (process == Model::Process::killed) visit([&](Model& m) { m.lose(place); }, n_deaths);
    if (n_deaths > 0 && (process == Model::Process::runs || process == Model::Process::asked)) {
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
