// The typed operations in their three forms: functions, functions with CallOptions, members.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "support/expect.hpp"

namespace lockstep {
namespace typed_calls_test {
namespace {

using test::thrown;
using namespace std::chrono_literals;

/// What an engine gets of a call, apart from addresses.
struct Received {
  Op op;
  DType dtype;
  ReduceOp reduce;
  int root;
  std::size_t count;
  double limit_s;
  std::string group;
  std::string file;
  bool operator==(const Received&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Received& call) {
  return out << name_of(call.op) << " of " << call.count << ' ' << name_of(call.dtype) << ", "
             << name_of(call.reduce) << ", root " << call.root << ", " << call.limit_s
             << " s, group " << call.group << ", from " << call.file;
}

/// Rank 0 of two; its calls end at once, and the other rank has no elements.
class Writer final : public Engine {
 public:
  explicit Writer(std::vector<Received>& calls) : calls_(calls) {}
  std::string_view name() const noexcept override { return "writer"; }
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 2; }
  void run(const Call& call) override {
    calls_.push_back({call.op, call.dtype, call.reduce, call.root, call.count, call.limit_s(),
                      std::string(call.group), call.where.file_name()});
    if (call.op != Op::all_gather) return;
    const std::size_t n_bytes = call.count * size_of(call.dtype);
    if (call.counts.empty()) std::memset(call.out, 0, 2 * n_bytes);
    std::memcpy(call.out, call.in, n_bytes);
  }
  std::unique_ptr<Engine> split(const Call&, int, int) override { return nullptr; }
  std::unique_ptr<SharedMemory> allocate(const Call&) override { return nullptr; }
  void abandon(std::string_view) noexcept override {}
  void leave(std::string_view) noexcept override {}

 private:
  std::vector<Received>& calls_;
};

class TypedCallsTest : public testing::Test {
 protected:
  using Form = std::function<void()>;

  /// Whether the forms of each row make the calls on the engine that its first makes.
  void expect_same(const std::vector<std::vector<Form>>& rows) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::vector<Received> first;
      for (const Form& form : rows[i]) {
        calls_.clear();
        form();
        ASSERT_FALSE(calls_.empty()) << i;
        EXPECT_EQ(calls_[0].file, __FILE__) << i;
        if (first.empty()) first = calls_;
        EXPECT_EQ(first, calls_) << i;
      }
    }
  }

  std::vector<Received> calls_;
  Group group_{std::make_unique<Writer>(calls_), "given", 1h};
  GroupScope scope_{Group(std::make_unique<Writer>(calls_), "default", 2h)};
  std::vector<float> x_ = std::vector<float>(2), both_ = std::vector<float>(4), other_ = both_;
};

constexpr auto kMax = ReduceOp::max;
constexpr auto kSum = ReduceOp::sum;

TEST_F(TypedCallsTest, functions_and_members_are_the_call_of_the_elements) {
  const Group& g = group_;
  auto &x = x_, &both = both_, &other = other_;
  const Elements e{x.data(), 2, DType::f32}, all{both.data(), 4, DType::f32};
  const ConstElements in = e;
  int one = 1;
  std::uint64_t own = 2;
  std::vector<std::size_t> counts(2);
  const std::size_t mine[] = {2, 0};
  const Elements sizes{counts.data(), 2, DType::u64};
  expect_same({
      {[&] { g.all_reduce(e, kMax, 5s); }, [&] { all_reduce(x, kMax, g, 5s); },
       [&] { g.all_reduce(x, kMax, 5s); },
       [&] {
         g.all_reduce({x.data(), 2, DType::f32}, kMax, 5s);
       }},
      {[&] { g.all_reduce_async(e, kMax, 5s).wait(); },
       [&] { all_reduce_async(x, kMax, g, 5s).wait(); },
       [&] { g.all_reduce_async(x, kMax, 5s).wait(); }},
      {[&] {
         g.all_reduce({&one, 1, DType::i32}, kMax, 5s);
       },
       [&] { all_reduce_value(1, kMax, g, 5s); }, [&] { g.all_reduce_value(1, kMax, 5s); }},
      {[&] { g.reduce(e, 1, kMax, 5s); }, [&] { reduce(x, 1, kMax, g, 5s); },
       [&] { g.reduce(x, 1, kMax, 5s); }},
      {[&] { g.reduce_async(e, 1, kMax, 5s).wait(); },
       [&] { reduce_async(x, 1, kMax, g, 5s).wait(); },
       [&] { g.reduce_async(x, 1, kMax, 5s).wait(); }},
      {[&] { g.broadcast(e, 1, 5s); }, [&] { broadcast(x, 1, g, 5s); },
       [&] { g.broadcast(x, 1, 5s); }},
      {[&] { g.broadcast_async(e, 1, 5s).wait(); }, [&] { broadcast_async(x, 1, g, 5s).wait(); },
       [&] { g.broadcast_async(x, 1, 5s).wait(); }},
      {[&] {
         g.all_gather({&own, 1, DType::u64}, sizes);
         g.all_gather(in, {other.data(), 2, DType::f32}, mine);
       },
       [&] { EXPECT_EQ(all_gather(x, g)[0], x); }, [&] { EXPECT_EQ(g.all_gather(x)[0], x); }},
      {[&] { g.all_gather(in, all, 5s); }, [&] { all_gather(x, both, g, 5s); },
       [&] { g.all_gather(x, both, 5s); }, [&] { g.all_gather(e, all, 5s); }},
      {[&] { g.all_gather_async(in, all, 5s).wait(); },
       [&] { all_gather_async(x, both, g, 5s).wait(); },
       [&] { g.all_gather_async(x, both, 5s).wait(); }},
      {[&] {
         g.all_gather({&own, 1, DType::u64}, sizes);
         g.gather(in, {}, mine, 1);
       },
       [&] { EXPECT_TRUE(gather(x, 1, g).empty()); }, [&] { EXPECT_TRUE(g.gather(x, 1).empty()); }},
      {[&] { g.scatter(all, e, 1, 5s); }, [&] { scatter(both, x, 1, g, 5s); },
       [&] { g.scatter(both, x, 1, 5s); }},
      {[&] { g.scatter_async(all, e, 1, 5s).wait(); },
       [&] { scatter_async(both, x, 1, g, 5s).wait(); },
       [&] { g.scatter_async(both, x, 1, 5s).wait(); }},
      {[&] { g.reduce_scatter(all, e, kMax, 5s); }, [&] { reduce_scatter(both, x, kMax, g, 5s); },
       [&] { g.reduce_scatter(both, x, kMax, 5s); }},
      {[&] { g.reduce_scatter_async(all, e, kMax, 5s).wait(); },
       [&] { reduce_scatter_async(both, x, kMax, g, 5s).wait(); },
       [&] { g.reduce_scatter_async(both, x, kMax, 5s).wait(); }},
      {[&] {
         g.all_to_all(all, {other.data(), 4, DType::f32}, 5s);
       },
       [&] { all_to_all(both, other, g, 5s); }, [&] { g.all_to_all(both, other, 5s); }},
      {[&] {
         g.all_to_all_async(all, {other.data(), 4, DType::f32}, 5s).wait();
       },
       [&] { all_to_all_async(both, other, g, 5s).wait(); },
       [&] { g.all_to_all_async(both, other, 5s).wait(); }},
      {[&] { g.send(in, 1, 5s); }, [&] { send(x, 1, g, 5s); }, [&] { g.send(x, 1, 5s); },
       [&] { g.send(e, 1, 5s); }},
      {[&] { g.send_async(in, 1, 5s).wait(); }, [&] { send_async(x, 1, g, 5s).wait(); },
       [&] { g.send_async(x, 1, 5s).wait(); }},
      {[&] { g.recv(e, 1, 5s); }, [&] { recv(x, 1, g, 5s); }, [&] { g.recv(x, 1, 5s); }},
      {[&] { g.recv_async(e, 1, 5s).wait(); }, [&] { recv_async(x, 1, g, 5s).wait(); },
       [&] { g.recv_async(x, 1, 5s).wait(); }},
  });
}

TEST_F(TypedCallsTest, named_arguments_are_those_by_position) {
  const Group& g = group_;
  auto &x = x_, &both = both_;
  const Group& d = default_group();
  const CallOptions options{.op = kMax, .group = g, .timeout = 5s};
  std::map<std::string, double> dict{{"a", 1}};
  expect_same({
      {[&] { all_reduce(x, kMax, g, 5s); }, [&] { all_reduce(x, options); }},
      {[&] { all_reduce(x, kMax, d); }, [&] { all_reduce(x, {.op = kMax}); }},
      {[&] { all_reduce(x, kSum, g); }, [&] { all_reduce(x, {.group = g}); }},
      {[&] { all_reduce(x, kSum, d, 5s); }, [&] { all_reduce(x, {.timeout = 5s}); }},
      {[&] { all_reduce(x); }, [&] { all_reduce(x, {}); }},
      {[&] { all_reduce_async(x, kMax, g, 5s).wait(); },
       [&] { all_reduce_async(x, options).wait(); }},
      {[&] { all_reduce_value(1, kMax, d, 5s); },
       [&] { all_reduce_value(1, {.op = kMax, .timeout = 5s}); }},
      {[&] { reduce(x, 1, kMax, g, 5s); },
       [&] { reduce(x, 1, {.op = kMax, .group = g, .timeout = 5s}); }},
      {[&] { reduce(x, 1, kSum, d); }, [&] { reduce(x, 1, {}); }},
      {[&] { reduce_async(x, 1, kMax, g, 5s).wait(); },
       [&] { reduce_async(x, 1, options).wait(); }},
      {[&] { reduce_scatter(both, x, kMax, g); },
       [&] { reduce_scatter(both, x, {.op = kMax, .group = g}); }},
      {[&] { reduce_scatter_async(both, x, kMax, g, 5s).wait(); },
       [&] { reduce_scatter_async(both, x, options).wait(); }},
  });
}

/// The default group is the one at the time of the call, not that in which the options were made.
TEST_F(TypedCallsTest, kept_options_have_the_default_group_of_the_call) {
  const CallOptions options{.op = kMax};
  all_reduce(x_, options);
  const GroupScope scope(group_);
  all_reduce(x_, options);
  ASSERT_EQ(calls_.size(), 2U);
  EXPECT_EQ(calls_[0].group, "default");
  EXPECT_EQ(calls_[1].group, "given");
}

TEST(CallOptionsTest, errors_name_the_line_of_the_call) {
  run_ranks(1, [] {
    std::vector<float> x(1);
    const auto error = thrown<UsageError>([&] { all_reduce(x, {.op = ReduceOp::band}); });
    EXPECT_NE(error.find("typed_calls_test.cpp:" + std::to_string(__LINE__ - 1)), std::string::npos)
        << error;
    std::thread of_no_rank([&] {
      const auto no_group = thrown<UsageError>([&] { all_reduce(x, {.timeout = 5s}); });
      EXPECT_NE(no_group.find("typed_calls_test.cpp:" + std::to_string(__LINE__ - 1)),
                std::string::npos)
          << no_group;
    });
    of_no_rank.join();
  });
}

TEST(CallOptionsTest, dicts_take_them) {
  run_ranks(3, [](int rank) {
    const Group pair = default_group().split(rank == 0 ? 0 : 1);
    std::map<std::string, int> dict{{"a", rank}};
    all_reduce_dict(dict, {.op = ReduceOp::max, .group = pair});
    EXPECT_EQ(dict["a"], rank == 0 ? 0 : 2);
    EXPECT_EQ(pair.all_reduce_value(1), rank == 0 ? 1 : 2);
    EXPECT_EQ(pair.all_gather(std::string(static_cast<std::size_t>(rank), 'x')).back(),
              rank == 0 ? "" : "xx");
  });
}

}  // namespace
}  // namespace typed_calls_test
}  // namespace lockstep
