#include "group/call_queue.hpp"

#include <gtest/gtest.h>

#include <atomic>

namespace lockstep::internal {
namespace {

/// A program that ends once it has waited has no call under way.
TEST(CallQueueTest, is_idle_once_its_last_call_has_told_its_end) {
  CallQueue queue;
  for (int i = 0; i < 20'000; ++i) {
    std::atomic<bool> is_done = false;
    queue.post(
        [&is_done]() -> CallQueue::Completion {
          return [&is_done] {
            is_done = true;
            return CallQueue::Callbacks();
          };
        },
        {});
    while (!is_done) {
    }
    ASSERT_TRUE(queue.is_idle()) << "after call " << i;
  }
}

}  // namespace
}  // namespace lockstep::internal
