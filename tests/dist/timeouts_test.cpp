// A call that consists of several collectives has one limit.

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <lockstep/lockstep.hpp>
#include <memory>
#include <thread>

namespace lockstep {
namespace timeouts_test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kEach{20}, kLimit{10'000};

/// A world of one where each call takes a while, and its limit is written down.
class Slow final : public Engine {
 public:
  explicit Slow(std::vector<milliseconds>& limits) : limits_(limits) {}
  std::string_view name() const noexcept override { return "slow"; }
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  void run(const Call& call) override {
    limits_.push_back(call.timeout);
    std::this_thread::sleep_for(kEach);
    if (call.in != call.out) std::memcpy(call.out, call.in, call.count * size_of(call.dtype));
  }
  std::unique_ptr<Engine> split(const Call&, int, int) override { return nullptr; }
  std::unique_ptr<SharedMemory> allocate(const Call&) override { return nullptr; }
  void abandon(std::string_view) noexcept override {}
  void leave(std::string_view) noexcept override {}

 private:
  std::vector<milliseconds>& limits_;
};

/// The limits of the collectives of which `call` consists.
template <class F>
std::vector<milliseconds> limits_of(F call) {
  std::vector<milliseconds> limits;
  call(Group(std::make_unique<Slow>(limits), "slow", std::chrono::hours(1)));
  return limits;
}

template <class F>
void expect_one_limit(F call) {
  const auto limits = limits_of([&](const Group& group) { call(group, Timeout(kLimit)); });
  ASSERT_GE(limits.size(), 2U);
  for (std::size_t i = 0; i < limits.size(); ++i) {
    EXPECT_LE(limits[i], kLimit - kEach * static_cast<int>(i)) << i;
  }
  for (const milliseconds limit : limits_of([&](const Group& group) { call(group, Timeout()); })) {
    EXPECT_EQ(limit, std::chrono::hours(1));
  }
}

TEST(TimeoutsTest, of_a_group_are_positive_and_cut) {
  std::vector<milliseconds> limits;
  const auto make = [&](milliseconds timeout) {
    return Group(std::make_unique<Slow>(limits), "slow", timeout);
  };
  EXPECT_EQ(make(milliseconds::max()).timeout(), Timeout::never().or_else({}));
  EXPECT_THROW(make(milliseconds(0)), UsageError);
  EXPECT_THROW(make(milliseconds(-1)), UsageError);
}

TEST(TimeoutsTest, typed_gathers) {
  const std::vector<int> data(3);
  expect_one_limit([&](const Group& g, Timeout limit) { all_gather(data, g, limit); });
  expect_one_limit([&](const Group& g, Timeout limit) { gather(data, 0, g, limit); });
}

TEST(TimeoutsTest, objects) {
  std::string object = "x";
  std::vector<std::string> list(2, "y");
  std::map<std::string, double> dict = {{"a", 1}};
  expect_one_limit([&](const Group& g, Timeout limit) { all_gather_object(object, g, limit); });
  expect_one_limit([&](const Group& g, Timeout limit) { gather_object(object, 0, g, limit); });
  expect_one_limit([&](const Group& g, Timeout limit) { broadcast_object(object, 0, g, limit); });
  expect_one_limit(
      [&](const Group& g, Timeout limit) { broadcast_object_list(list, 0, g, limit); });
  expect_one_limit(
      [&](const Group& g, Timeout limit) { all_reduce_dict(dict, ReduceOp::sum, g, limit); });
}

}  // namespace
}  // namespace timeouts_test
}  // namespace lockstep
