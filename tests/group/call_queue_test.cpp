// For ThreadSanitizer too: what posted calls, calls of several threads and callbacks share without
// a lock is theirs by the queue's order alone.
#include "group/call_queue.hpp"

#include <gtest/gtest.h>
#include <sys/syscall.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/ranks.hpp"
#include "support/seccomp.hpp"

namespace lockstep::internal {
namespace {

using namespace std::chrono_literals;

TEST(CallQueueTest, calls_of_several_threads_run_one_at_a_time) {
  constexpr int kThreads = 3, kCalls = 200;
  const auto owner = CallQueue::make();
  CallQueue& queue = *owner;
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
  const auto owner = CallQueue::make();
  CallQueue& queue = *owner;
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
  const auto owner = CallQueue::make();
  CallQueue& queue = *owner;
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

TEST(CallQueueTest, callbacks_without_another_thread_run_after_the_posted_calls) {
  const auto statuses = test::run_processes(1, [] {
    std::promise<void> may_end;
    std::vector<std::string> order;
    const auto queue = CallQueue::make();
    queue->post(
        [&]() -> CallQueue::Completion {
          may_end.get_future().wait();
          // For this thread, which starts others. Not by a limit of memory: a process keeps the
          // stacks of threads that have ended.
          for (const int call : {SYS_clone, SYS_clone3}) test::forbid(call);
          return [&] { return CallQueue::Callbacks([&] { order.emplace_back("callbacks"); }); };
        },
        {.operation = "first"});
    queue->post(
        [&]() -> CallQueue::Completion {
          order.emplace_back("second");
          return {};
        },
        {.operation = "second"});
    may_end.set_value();
    queue->wait_for_callbacks();
    EXPECT_EQ(order, (std::vector<std::string>{"second", "callbacks"}));
  });
  EXPECT_EQ(statuses, std::vector<int>{0});
}

TEST(CallQueueTest, callbacks_may_be_the_last_owner) {
  std::weak_ptr<CallQueue::Owner> left;
  std::promise<void> is_released;
  bool has_run_second = false;
  {
    const auto owner = std::make_shared<CallQueue::Owner>(CallQueue::make());
    left = owner;
    (*owner)->post(
        [owner, released = is_released.get_future().share()]() -> CallQueue::Completion {
          return [owner, released] {
            return CallQueue::Callbacks([owner, released] { released.wait(); });
          };
        },
        {.operation = "first"});
    (*owner)->post(
        [&has_run_second]() -> CallQueue::Completion {
          has_run_second = true;
          return {};
        },
        {.operation = "second"});
    (*owner)->wait_until_idle();
  }
  is_released.set_value();
  while (!left.expired()) std::this_thread::yield();
  EXPECT_TRUE(has_run_second);
}

}  // namespace
}  // namespace lockstep::internal
