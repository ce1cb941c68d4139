#include "run/rank_store.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::run {
namespace {

class RankStoreTest : public testing::Test {
 protected:
  using StoreAnswer = shared::StoreAnswer;
  using StoreRequest = shared::StoreRequest;
  using Kind = StoreRequest::Kind;
  using Status = StoreAnswer::Status;

  /// As a rank asks, in bytes.
  StoreAnswer ask(const StoreRequest& request, std::uint64_t world = 0) {
    const auto answer = shared::read_store_answer(store_.answer(world, bytes_of(request)));
    return answer.value_or(StoreAnswer{.status = Status::invalid});
  }
  std::string get(const std::string& key) { return ask({.kind = Kind::get, .words = {key}}).value; }

  RankStore store_;
};

TEST_F(RankStoreTest, keeps_values_with_any_bytes) {
  const std::string value("\0\n\xff", 3);
  ask({.kind = Kind::set, .words = {"a key", value}});
  EXPECT_EQ(get("a key"), value);
  ask({.kind = Kind::set, .words = {"a key", ""}});
  EXPECT_EQ(ask({.kind = Kind::get, .words = {"a key"}}).status, Status::done);
  EXPECT_EQ(get("a key"), "");
  EXPECT_EQ(ask({.kind = Kind::get, .words = {"another"}}).status, Status::missing);
}

TEST_F(RankStoreTest, adds_to_numbers_alone) {
  EXPECT_EQ(ask({.kind = Kind::add, .amount = 2, .words = {"n"}}).number, 2);
  EXPECT_EQ(ask({.kind = Kind::add, .amount = -5, .words = {"n"}}).number, -3);
  EXPECT_EQ(get("n"), "-3");
  for (const char* const text : {"", "three", "3 ", "9223372036854775807"}) {
    ask({.kind = Kind::set, .words = {"n", text}});
    EXPECT_EQ(ask({.kind = Kind::add, .amount = 1, .words = {"n"}}).status, Status::not_a_number);
    EXPECT_EQ(get("n"), text);
  }
}

TEST_F(RankStoreTest, appends_up_to_a_limit) {
  const std::string half(shared::kMaxStoreBytes / 4, 'x');
  for (int i = 0; i < 2; ++i) ask({.kind = Kind::append, .words = {"key", half}});
  EXPECT_EQ(get("key"), half + half);
  EXPECT_EQ(ask({.kind = Kind::append, .words = {"key", "y"}}).status, Status::too_long);
  EXPECT_EQ(get("key"), half + half);
}

TEST_F(RankStoreTest, compares_as_the_stores_of_torch) {
  const auto compare_set = [&](const char* expected, const char* desired) {
    return ask({.kind = Kind::compare_set, .words = {"key", expected, desired}}).value;
  };
  EXPECT_EQ(compare_set("expected", "new"), "expected");
  EXPECT_EQ(ask({.kind = Kind::count}).number, 0);
  EXPECT_EQ(compare_set("", "first"), "first");
  EXPECT_EQ(compare_set("other", "second"), "first");
  EXPECT_EQ(compare_set("first", "second"), "second");
}

TEST_F(RankStoreTest, checks_counts_and_removes) {
  ask({.kind = Kind::set, .words = {"a", "1"}});
  ask({.kind = Kind::set, .words = {"b", "2"}});
  EXPECT_EQ(ask({.kind = Kind::check, .words = {"a", "b"}}).status, Status::done);
  EXPECT_EQ(ask({.kind = Kind::check, .words = {"a", "c"}}).status, Status::missing);
  EXPECT_EQ(ask({.kind = Kind::check}).status, Status::done);
  EXPECT_EQ(ask({.kind = Kind::count}).number, 2);
  EXPECT_EQ(ask({.kind = Kind::remove, .words = {"a"}}).number, 1);
  EXPECT_EQ(ask({.kind = Kind::remove, .words = {"a"}}).number, 0);
  EXPECT_EQ(ask({.kind = Kind::count}).number, 1);
}

TEST_F(RankStoreTest, a_world_sees_its_own_keys_and_an_earlier_one_none) {
  ask({.kind = Kind::set, .words = {"key", "of 1"}}, 1);
  EXPECT_EQ(ask({.kind = Kind::get, .words = {"key"}}, 2).status, Status::missing);
  EXPECT_EQ(ask({.kind = Kind::get, .words = {"key"}}, 1).status, Status::over);
  EXPECT_EQ(ask({.kind = Kind::set, .words = {"key", "late"}}, 1).status, Status::over);
  EXPECT_EQ(ask({.kind = Kind::count}, 2).number, 0);
}

TEST_F(RankStoreTest, refuses_damaged_requests) {
  const std::string whole =
      bytes_of(StoreRequest{.kind = Kind::compare_set, .words = {"key", "", "value"}});
  const auto status_of = [&](std::string_view bytes) {
    return shared::read_store_answer(store_.answer(0, bytes))->status;
  };
  for (std::size_t n = 0; n < whole.size(); ++n) {
    EXPECT_EQ(status_of(std::string_view(whole).substr(0, n)), Status::invalid) << n;
  }
  EXPECT_EQ(status_of(whole + "x"), Status::invalid);
  std::string unknown = whole;
  unknown.front() = 8;
  EXPECT_EQ(status_of(unknown), Status::invalid);
  std::string too_long = whole;
  too_long[16] = '\xff';  // the length of the key
  EXPECT_EQ(status_of(too_long), Status::invalid);
  EXPECT_EQ(ask({.kind = Kind::set, .words = {"key"}}).status, Status::invalid);
  EXPECT_EQ(ask({.kind = Kind::get}).status, Status::invalid);
  EXPECT_EQ(ask({.kind = Kind::count}).number, 0);
  EXPECT_EQ(status_of(whole), Status::done);
}

}  // namespace
}  // namespace lockstep::run
