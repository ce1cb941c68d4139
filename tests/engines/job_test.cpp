#include "engines/shared/bootstrap/job.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <lockstep/error.hpp>
#include <optional>

#include "engines/shared/bootstrap/shared_world.hpp"

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

}  // namespace
}  // namespace lockstep::shared
