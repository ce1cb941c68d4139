#include "engines/shared/bootstrap/job.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <lockstep/error.hpp>
#include <optional>

#include "engines/shared/bootstrap/shared_world.hpp"
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

/// A segment of two ranks, of which rank 1 has joined and been killed, in a process whose status no
/// launcher has written.
std::shared_ptr<Segment> with_a_killed_rank(bool has_launcher) {
  std::shared_ptr<Segment> segment = Segment::for_processes(2);
  segment->header().has_launcher = has_launcher;
  const pid_t child = ::fork();
  if (child == 0) {
    const Membership membership(segment, /*world_rank=*/1);
    ::raise(SIGKILL);
  }
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  return segment;
}

TEST(EndingTest, a_status_is_awaited_where_a_launcher_writes_it_only) {
  EXPECT_TRUE(inherit_world(Job(1).environment())->header().has_launcher);
  const auto n_sleeps_until_told = [](bool has_launcher) {
    const Membership membership(with_a_killed_rank(has_launcher), /*world_rank=*/0);
    const long before = test::n_sleeps(::gettid());
    const auto ending = membership.ending_of(1, /*ask_system=*/true);
    const long n = test::n_sleeps(::gettid()) - before;
    test::expect_contains(ending ? ending->text : "none", "died (its process ");
    return n;
  };
  constexpr long kSome = 20;  // a thread may sleep for reasons of the system
  EXPECT_LT(n_sleeps_until_told(/*has_launcher=*/false), kSome);
  EXPECT_GT(n_sleeps_until_told(/*has_launcher=*/true), kSome);
}

}  // namespace
}  // namespace lockstep::shared
