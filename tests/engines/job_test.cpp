#include "engines/shared/bootstrap/job.hpp"

#include <gtest/gtest.h>

namespace lockstep::shared {
namespace {

TEST(JobTest, knows_of_ranks_that_joined_over_another_engine) {
  const Job job(2);
  EXPECT_FALSE(job.has_joined_rank());
  note_joined("no segment");
  note_joined("-1:0");
  EXPECT_FALSE(job.has_joined_rank());
  note_joined(job.environment());
  EXPECT_TRUE(job.has_joined_rank());
}

}  // namespace
}  // namespace lockstep::shared
