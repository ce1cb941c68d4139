#include "group/worker.hpp"

#include <gtest/gtest.h>

#include <memory>

namespace lockstep::internal {
namespace {

/// A program that ends once it has waited has no call under way.
TEST(WorkerTest, is_idle_once_its_last_task_is_done) {
  Worker worker;
  for (int i = 0; i < 20'000; ++i) {
    const std::shared_ptr<WorkState> task = worker.post([] {}, {});
    while (!task->done()) {
    }
    ASSERT_TRUE(worker.is_idle()) << "after task " << i;
  }
}

}  // namespace
}  // namespace lockstep::internal
