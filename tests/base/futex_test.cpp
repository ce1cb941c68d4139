#include "base/futex.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <new>
#include <thread>
#include <vector>

#include "support/waiting.hpp"

namespace lockstep::base {
namespace {

using namespace std::chrono_literals;

// Sleeps until the word is no longer `expected`; false if the one-minute watchdog fired.
bool wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                     FutexScope scope) {
  while (word.load(std::memory_order_acquire) == expected) {
    if (!futex_wait(word, expected, 60s, scope)) return false;
  }
  return true;
}

TEST(FutexTest, timeout_returns_false_and_not_early) {
  const std::atomic<std::uint32_t> word{7};
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(futex_wait(word, 7, 20ms, FutexScope::thread));
  EXPECT_GE(std::chrono::steady_clock::now() - start, 20ms);
  EXPECT_FALSE(futex_wait(word, 7, 0ns, FutexScope::thread));
  EXPECT_FALSE(futex_wait(word, 7, -1s, FutexScope::process));
}

TEST(FutexTest, changed_word_returns_at_once) {
  const std::atomic<std::uint32_t> word{8};
  EXPECT_TRUE(futex_wait(word, 7, 60s, FutexScope::thread));
  EXPECT_TRUE(futex_wait(word, 7, 60s, FutexScope::process));
}

TEST(FutexTest, wake_reaches_every_thread) {
  std::atomic<std::uint32_t> word{0};
  std::atomic<int> n_woken{0};
  std::array<std::atomic<pid_t>, 4> tids{};
  {
    std::vector<std::jthread> sleepers;
    for (auto& tid : tids) {
      sleepers.emplace_back([&] {
        tid = ::gettid();
        n_woken += wait_for_change(word, 0, FutexScope::thread) ? 1 : 0;
      });
    }
    for (const auto& tid : tids) EXPECT_TRUE(test::wait_until_asleep(tid));
    word.store(1, std::memory_order_release);
    futex_wake_all(word, FutexScope::thread);
  }
  EXPECT_EQ(n_woken, 4);
}

TEST(FutexTest, wake_reaches_another_process) {
  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  auto* word = new (page) std::atomic<std::uint32_t>{0};
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(wait_for_change(*word, 0, FutexScope::process) ? 0 : 1);
  EXPECT_TRUE(test::wait_until_asleep(child));
  word->store(1, std::memory_order_release);
  futex_wake_all(*word, FutexScope::process);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  munmap(page, 4096);
}

}  // namespace
}  // namespace lockstep::base
