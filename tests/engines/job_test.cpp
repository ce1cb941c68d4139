#include "engines/shared/bootstrap/job.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <lockstep/error.hpp>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/boot_clock.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/shared/protocol/waiter.hpp"
#include "engines/shared/segment/membership.hpp"
#include "support/expect.hpp"
#include "support/waiting.hpp"

namespace lockstep::shared {
namespace {

TEST(JobTest, knows_of_ranks_that_joined_over_another_engine) {
  const Job job(2);
  EXPECT_FALSE(job.has_joined_rank());
  record_joined("no segment", 0);
  record_joined("-1:0", 0);
  EXPECT_FALSE(job.has_joined_rank());
  record_joined(job.environment(), /*local_rank=*/-1);
  EXPECT_TRUE(job.has_joined_rank());
  for (const int rank : {0, 1}) EXPECT_EQ(job.process_of(rank), std::nullopt) << rank;
  record_joined(job.environment(), /*local_rank=*/1);
  EXPECT_EQ(job.process_of(0), std::nullopt);
  EXPECT_EQ(job.process_of(1), ::getpid());
}

TEST(JobTest, a_process_joins_after_it_joined_over_another_engine) {
  const Job job(1);
  record_joined(job.environment(), /*local_rank=*/0);
  const Call barrier{.op = Op::barrier,
                     .group = "world",
                     .sequence = 1,
                     .timeout = std::chrono::seconds(60),
                     .where = std::source_location::current()};
  const auto engine = join_world(inherit_world(job.environment()), /*rank=*/0, barrier);
  EXPECT_EQ(job.process_of(0), ::getpid());
  EXPECT_THROW(join_world(inherit_world(job.environment()), /*rank=*/0, barrier), UsageError);
}

// Where launcher and guard are stopped, nothing but the ranks themselves can look at the lease.
TEST(JobTest, ranks_without_a_lease_complete_no_step_and_do_not_wait) {
  using base::BootClock;
  Job job(2, {}, /*is_elastic=*/true);
  job.set_lease(BootClock::now() + std::chrono::hours(1));
  const Call barrier{.op = Op::barrier,
                     .group = "world",
                     .sequence = 1,
                     .timeout = std::chrono::seconds(60),
                     .where = std::source_location::current()};
  const auto segment = inherit_world(job.environment());
  std::unique_ptr<HostEngine> other;
  std::thread joins([&] { other = join_world(segment, /*rank=*/1, barrier); });
  const auto engine = join_world(segment, /*rank=*/0, barrier);
  joins.join();
  const Elastic elastic(segment, /*rank=*/0);
  elastic.check({});

  job.set_lease(BootClock::now());
  elastic.step_done();
  EXPECT_FALSE(job.has_completed_step());
  constexpr const char* kWhy = "the launcher of this host hears nothing from node 0";
  test::expect_contains(test::thrown<PeerLost>([&] { elastic.check({}); }), kWhy);
  test::expect_contains(test::thrown<PeerLost>([&] { elastic.check_lease({}); }), kWhy);
  test::expect_contains(test::thrown<PeerLost>([&] { engine->run(barrier); }),
                        kWhy);  // rank 1 never comes

  job.set_lease(BootClock::now() + std::chrono::hours(1));
  elastic.step_done();
  EXPECT_TRUE(job.has_completed_step());
}

TEST(JobTest, a_process_that_has_ended_is_not_the_rank) {
  const Job job(1);
  const pid_t child = ::fork();
  if (child == 0) {
    record_joined(job.environment(), /*local_rank=*/0);
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(job.has_joined_rank());
  EXPECT_EQ(job.process_of(0), std::nullopt);
}

/// A process joins as the rank and is killed; no launcher writes its status.
void join_and_be_killed(const std::shared_ptr<Segment>& segment, int world_rank) {
  const pid_t child = ::fork();
  if (child == 0) {
    const Membership membership(segment, world_rank);
    ::raise(SIGKILL);
  }
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST(EndingTest, a_status_is_awaited_where_a_launcher_writes_it_only) {
  EXPECT_TRUE(inherit_world(Job(1).environment())->header().has_launcher);
  constexpr long kSome = 20;  // a thread may sleep for reasons of the system
  for (const bool has_launcher : {false, true}) {
    const std::shared_ptr<Segment> segment = Segment::for_processes(3);
    segment->header().has_launcher = has_launcher;
    const Membership membership(segment, /*world_rank=*/0);
    for (const int rank : {1, 2}) join_and_be_killed(segment, rank);
    const auto n_sleeps_until_told = [&membership](int rank) {
      const long before = test::n_sleeps(::gettid());
      const auto ending = membership.ending_of(rank, /*ask_system=*/true);
      const long n = test::n_sleeps(::gettid()) - before;
      test::expect_contains(ending ? ending->text : "none", "died (its process ");
      return n;
    };
    EXPECT_EQ(n_sleeps_until_told(1) > kSome, has_launcher);
    EXPECT_LT(n_sleeps_until_told(2), kSome) << "waits again for a launcher that is late";
  }
}

/// Of ranks 1 to 3, as rank 0 finds them.
internal::Failure failure_of_the_first(const Membership& membership) {
  FirstEnded first;
  for (const int rank : {1, 2, 3}) {
    const auto ending = membership.ending_of(rank, /*ask_system=*/true);
    if (ending) first.add(rank, *ending);
  }
  return first.failure();
}

TEST(EndingTest, ranks_of_which_nobody_saw_who_ended_first_are_all_named) {
  const std::shared_ptr<Segment> segment = Segment::for_processes(4);
  const Membership membership(segment, /*world_rank=*/0);
  for (const int rank : {3, 1}) join_and_be_killed(segment, rank);
  const internal::Failure failure = failure_of_the_first(membership);
  for (const char* part : {"rank 1 died (", "rank 3 died (", "which of them ended first is not"})
    test::expect_contains(failure.text, part);
  EXPECT_EQ(failure.peers.n, 2);
}

TEST(EndingTest, a_rank_that_left_after_it_had_found_a_dead_one_is_not_named) {
  const std::shared_ptr<Segment> segment = Segment::for_processes(4);
  const Membership membership(segment, /*world_rank=*/0);
  Membership finder(segment, /*world_rank=*/1);
  join_and_be_killed(segment, 3);
  EXPECT_TRUE(finder.ending_of(3, /*ask_system=*/true));
  finder.leave("it lost rank 3");
  join_and_be_killed(segment, 2);
  const internal::Failure failure = failure_of_the_first(membership);
  EXPECT_TRUE(failure.text.starts_with("rank 3 died (")) << failure.text;
  EXPECT_EQ(failure.peers.n, 1) << failure.text;
}

TEST(EndingTest, a_launcher_knows_which_rank_it_reaped_first) {
  Job job(4);
  const Membership membership(inherit_world(job.environment()), /*world_rank=*/0);
  for (const int rank : {3, 1, 2}) job.rank_ended(rank, SIGKILL);
  const internal::Failure failure = failure_of_the_first(membership);
  EXPECT_EQ(failure.text, "rank 3 was killed by signal 9 (SIGKILL)");
}

// All within half a second: a rank that died is named within one.
TEST(LivenessCheckTest, asks_the_system_about_every_rank_in_time) {
  for (const std::size_t n : {1, 3, 4, 5, 100, 101, 199, 511}) {
    std::vector<int> n_asked(n);
    for (unsigned round = 7; round < 7 + 500 / kLivenessInterval.count(); ++round) {
      for (std::size_t i = 0; i < n; ++i) n_asked[i] += asks_system(i, n, round) ? 1 : 0;
    }
    EXPECT_GE(std::ranges::min(n_asked), 1) << n;
    EXPECT_LE(std::ranges::max(n_asked), n <= 4 ? 25 : 25 * 4 / static_cast<int>(n) + 2) << n;
  }
}

}  // namespace
}  // namespace lockstep::shared
