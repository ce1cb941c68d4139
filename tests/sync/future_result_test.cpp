#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <lockstep/error.hpp>
#include <lockstep/sync_master.hpp>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/expect.hpp"
#include "support/waiting.hpp"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

TEST(FutureResultTest, get_takes_what_was_put) {
  FutureResult<std::string> result;
  result.put("seven");
  EXPECT_EQ(result.get(), "seven");
}

TEST(FutureResultTest, get_waits_for_put) {
  FutureResult<int> result;
  std::jthread putter([&, getter = ::gettid()] {
    EXPECT_TRUE(test::wait_until_asleep(getter));
    result.put(7);
  });
  EXPECT_EQ(result.get(), 7);
}

TEST(FutureResultTest, second_put_is_an_error_until_the_first_is_taken) {
  FutureResult<int> result;
  result.put(1);
  const int line = __LINE__ + 2;
  try {
    result.put(2);
    FAIL() << "the second put passed";
  } catch (const UsageError& error) {
    EXPECT_EQ(static_cast<int>(error.context().where.line()), line);
    test::expect_contains(error.what(), "second put");
  }
  EXPECT_EQ(result.get(), 1);
  result.put(3);
  EXPECT_EQ(result.get(), 3);
}

TEST(FutureResultTest, get_times_out) {
  FutureResult<int> result;
  const auto start = std::chrono::steady_clock::now();
  test::expect_contains(test::thrown<TimeoutError>([&] { result.get(20ms); }), "20 ms");
  EXPECT_GE(std::chrono::steady_clock::now() - start, 20ms);
  EXPECT_THROW(result.get(0ms), TimeoutError);
  result.put(4);  // too late for that get, in time for the next
  EXPECT_EQ(result.get(0ms), 4);
}

TEST(FutureResultTest, move_only_and_empty_values_are_values) {
  FutureResult<std::unique_ptr<int>> pointer;
  pointer.put(std::make_unique<int>(5));
  EXPECT_EQ(*pointer.get(), 5);
  pointer.put(nullptr);
  EXPECT_EQ(pointer.get(1000ms), nullptr);

  FutureResult<std::optional<int>> optional;
  optional.put(std::nullopt);
  EXPECT_EQ(optional.get(1000ms), std::nullopt);
}

TEST(FutureResultTest, fail_is_thrown_by_get) {
  FutureResult<int> result;
  result.fail(std::make_exception_ptr(std::out_of_range("no such sample")));
  EXPECT_THROW(result.put(1), UsageError);
  EXPECT_THROW(result.get(), std::out_of_range);
  result.put(1);
  EXPECT_EQ(result.get(), 1);
}

struct ThrowsWhenMoved {
  explicit ThrowsWhenMoved(int n) : n_moves_left(n) {}
  ThrowsWhenMoved(ThrowsWhenMoved&& other) : n_moves_left(other.n_moves_left - 1) {
    if (n_moves_left < 0) throw std::runtime_error("moved too often");
  }
  int n_moves_left;
};

TEST(FutureResultTest, put_that_throws_puts_nothing) {
  FutureResult<ThrowsWhenMoved> result;
  EXPECT_THROW(result.put(ThrowsWhenMoved(0)), std::runtime_error);
  EXPECT_THROW(result.get(0ms), TimeoutError);
  result.put(ThrowsWhenMoved(5));
  EXPECT_GE(result.get(1000ms).n_moves_left, 0);
}

TEST(FutureResultTest, every_value_reaches_one_of_many_getters) {
  constexpr int kValues = 2000;
  FutureResult<int> result;
  std::atomic<int> sum{0};
  {
    std::vector<std::jthread> getters;
    for (int i = 0; i < 4; ++i) {
      getters.emplace_back([&] {
        for (int n = 0; n < kValues / 4; ++n) sum += result.get();
      });
    }
    for (int value = 1; value <= kValues;) {
      try {
        result.put(value);
        ++value;
      } catch (const UsageError&) {
        std::this_thread::yield();
      }
    }
  }
  EXPECT_EQ(sum, kValues * (kValues + 1) / 2);
}

TEST(FutureResultTest, ready_between_put_and_get) {
  FutureResult<int> result;
  EXPECT_FALSE(result.ready());
  result.put(3);
  EXPECT_TRUE(result.ready());
  EXPECT_EQ(result.get(), 3);
  EXPECT_FALSE(result.ready());
  result.fail(std::make_exception_ptr(std::runtime_error("lost")));
  EXPECT_TRUE(result.ready());
  EXPECT_THROW(result.get(), std::runtime_error);
  EXPECT_FALSE(result.ready());
}

}  // namespace
}  // namespace lockstep
