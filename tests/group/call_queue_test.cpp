// For ThreadSanitizer too: what posted calls, calls of several threads and callbacks share without
// a lock is theirs by the queue's order alone.
#include "group/call_queue.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

namespace lockstep::internal {
namespace {

using namespace std::chrono_literals;

TEST(CallQueueTest, calls_of_several_threads_run_one_at_a_time) {
  constexpr int kThreads = 3, kCalls = 200;
  CallQueue queue;
  int n_run = 0;
  const auto count = [&n_run] {
    const int before = n_run;
    std::this_thread::yield();
    n_run = before + 1;
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kCalls; ++i) {
        queue.post(
            [&]() -> CallQueue::Completion {
              count();
              return {};
            },
            {.operation = "posted"});
        EXPECT_FALSE(queue.run(1min, [&](std::chrono::milliseconds) { count(); }));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  queue.wait_until_idle();
  EXPECT_EQ(n_run, 2 * kThreads * kCalls);
}

TEST(CallQueueTest, what_a_call_wrote_is_seen_when_it_has_ended) {
  CallQueue queue;
  for (int i = 0; i < 1000; ++i) {
    int value = 0, completed = 0;
    queue.post(
        [&]() -> CallQueue::Completion {
          value = i;
          return [&] {
            completed = i;
            return CallQueue::Callbacks();
          };
        },
        {.operation = "posted"});
    while (!queue.is_idle()) std::this_thread::yield();
    EXPECT_EQ(value, i);
    queue.wait_until_idle();  // also for the completion
    EXPECT_EQ(completed, i);
  }
}

TEST(CallQueueTest, callbacks_run_beside_later_calls_and_wait_for_them) {
  CallQueue queue;
  std::vector<int> seen(100);
  int n_calls = 0;
  for (int& each : seen) {
    queue.post(
        [&]() -> CallQueue::Completion {
          ++n_calls;
          return [&] {
            return [&] {
              int mine = 0;
              queue.post(
                  [&]() -> CallQueue::Completion {
                    mine = ++n_calls;
                    return {};
                  },
                  {.operation = "of a callback"});
              queue.wait_until_idle();
              each = mine;
            };
          };
        },
        {.operation = "posted"});
  }
  queue.wait_for_callbacks();
  EXPECT_EQ(n_calls, 200);
  for (const int each : seen) EXPECT_GT(each, 0);
}

}  // namespace
}  // namespace lockstep::internal
