#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <lockstep/error.hpp>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "conformance/reference.hpp"
#include "engines/hierarchical/hierarchical.hpp"
#include "engines/message/message_engine.hpp"
#include "support/expect.hpp"
#include "support/message_network.hpp"
#include "support/waiting.hpp"

namespace lockstep::message {
namespace {

using namespace std::chrono_literals;
using test::MessageNetwork;
using test::run_message_ranks;

Call call_of(Op op, std::size_t count, const void* in, void* out, int root = 0) {
  return {.op = op,
          .dtype = DType::f32,
          .root = root,
          .count = count,
          .in = in,
          .out = out,
          .group = "world",
          .sequence = 1,
          .timeout = 60s,
          .where = std::source_location::current()};
}

float value(int rank, std::size_t i) { return static_cast<float>((rank * 37 + i * 11) % 101); }

std::vector<float> values_of(int rank, std::size_t count, std::size_t first = 0) {
  std::vector<float> data(count);
  for (std::size_t i = 0; i < count; ++i) data[i] = value(rank, first + i);
  return data;
}

/// Of every rank, i-th element.
float sum_of(int n_ranks, std::size_t i) {
  float sum = 0;
  for (int r = 0; r < n_ranks; ++r) sum += value(r, i);
  return sum;
}

void expect_sums(const std::vector<float>& data, int n_ranks, std::size_t first = 0) {
  for (std::size_t i = 0; i < data.size(); ++i) ASSERT_EQ(data[i], sum_of(n_ranks, first + i)) << i;
}

class MessageLevelsTest : public ::testing::TestWithParam<int> {
 protected:
  const int n = GetParam();
  const std::size_t n_ranks = static_cast<std::size_t>(n);
};
// At most eight ranks send from each to each.
INSTANTIATE_TEST_SUITE_P(Ranks, MessageLevelsTest, ::testing::Values(3, 8, 9, 16, 21, 64, 72),
                         [](const auto& n) { return "ranks_" + std::to_string(n.param); });

/// More than one part.
class MessagePartsTest : public MessageLevelsTest {};
INSTANTIATE_TEST_SUITE_P(Ranks, MessagePartsTest, ::testing::Values(9, 16, 21, 64, 72),
                         [](const auto& of) { return "ranks_" + std::to_string(of.param); });

/// So many that levels have fewer messages than an exchange from each to each.
class MessageManyPartsTest : public MessageLevelsTest {};
INSTANTIATE_TEST_SUITE_P(Ranks, MessageManyPartsTest, ::testing::Values(64, 72),
                         [](const auto& of) { return "ranks_" + std::to_string(of.param); });

/// In the header's message, in slices, from each to each.
constexpr std::size_t kCounts[] = {0, 1, 16, 17, 300, 600, 2'000, 4'096, 4'097, 70'001};

TEST_P(MessageLevelsTest, reductions) {
  run_message_ranks(n, [&](Engine& engine) {
    for (const std::size_t count : kCounts) {
      auto data = values_of(engine.rank(), count);
      engine.run(call_of(Op::all_reduce, count, data.data(), data.data()));
      expect_sums(data, n);
      const int root = n - 2;
      data = values_of(engine.rank(), count);
      engine.run(call_of(Op::reduce, count, data.data(), data.data(), root));
      if (engine.rank() == root) {
        expect_sums(data, n);
      } else {
        ASSERT_EQ(data, values_of(engine.rank(), count));
      }
    }
  });
}

/// Through levels, in slices, and directly.
TEST_P(MessageLevelsTest, sums_have_the_bits_of_the_tree) {
  using test::Bytes;
  for (const DType dtype : {DType::bf16, DType::f32, DType::f64}) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean}) {
      for (const std::size_t count : {std::size_t{67}, std::size_t{1'999}, 300 * n_ranks}) {
        const Bytes expected = test::reduced(dtype, op, count, /*seed=*/count, n);
        const auto run = [&](Engine& engine, Op which) {
          Bytes in = test::values(dtype, count, /*seed=*/count, engine.rank());
          Bytes out = in;
          const bool is_scattered = which == Op::reduce_scatter;
          const std::size_t part = is_scattered ? count / n_ranks : count;
          Call call =
              call_of(which, part, is_scattered ? in.data() : out.data(), out.data(), n - 1);
          call.dtype = dtype;
          call.reduce = op;
          engine.run(call);
          out.resize(part * size_of(dtype));
          return out;
        };
        run_message_ranks(n, [&](Engine& engine) {
          ASSERT_EQ(run(engine, Op::all_reduce), expected) << name_of(dtype) << ' ' << count;
          const Bytes at_root = run(engine, Op::reduce);
          if (engine.rank() == n - 1) {
            ASSERT_EQ(at_root, expected) << name_of(dtype) << ' ' << count;
          }
          if (count % n_ranks != 0) return;
          const Bytes part = run(engine, Op::reduce_scatter);
          ASSERT_TRUE(std::equal(
              part.begin(), part.end(),
              expected.begin() + static_cast<std::ptrdiff_t>(part.size()) * engine.rank()));
        });
      }
    }
  }
}

TEST_P(MessageLevelsTest, reduce_scatter) {
  run_message_ranks(n, [&](Engine& engine) {
    for (const std::size_t count : {1, 7, 100, 1'100, 4'096, 4'097}) {
      const auto in = values_of(engine.rank(), count * n_ranks);
      std::vector<float> out(count);
      engine.run(call_of(Op::reduce_scatter, count, in.data(), out.data()));
      expect_sums(out, n, static_cast<std::size_t>(engine.rank()) * count);
    }
  });
}

TEST_P(MessageLevelsTest, broadcast_from_every_root) {
  run_message_ranks(n, [&](Engine& engine) {
    for (const std::size_t count : kCounts) {
      for (int root = 0; root<n; root += count> 2'000 ? 7 : 1) {
        auto data = values_of(engine.rank(), count);
        engine.run(call_of(Op::broadcast, count, data.data(), data.data(), root));
        ASSERT_EQ(data, values_of(root, count));
      }
    }
  });
}

TEST_P(MessageLevelsTest, gather_scatter_all_gather_all_to_all) {
  run_message_ranks(n, [&](Engine& engine) {
    const int rank = engine.rank();
    for (const std::size_t count : {1, 16, 100, 1'000, 4'096, 4'097}) {
      std::vector<float> every;  // of all ranks, in order
      for (int r = 0; r < n; ++r) {
        const auto part = values_of(r, count);
        every.insert(every.end(), part.begin(), part.end());
      }
      const auto own = values_of(rank, count);
      std::vector<float> out(every.size());
      engine.run(call_of(Op::all_gather, count, own.data(), out.data()));
      ASSERT_EQ(out, every);
      const int root = 2;
      out.assign(every.size(), 0);
      engine.run(call_of(Op::gather, count, own.data(), out.data(), root));
      if (rank == root) {
        ASSERT_EQ(out, every);
      }
      std::vector<float> part(count);
      engine.run(call_of(Op::scatter, count, every.data(), part.data(), root));
      ASSERT_EQ(part, own);
      // Rank q sends its elements r * count ... to rank r.
      const auto in = values_of(rank, every.size());
      engine.run(call_of(Op::all_to_all, count, in.data(), out.data()));
      for (int q = 0; q < n; ++q) {
        const auto expected = values_of(q, count, static_cast<std::size_t>(rank) * count);
        ASSERT_TRUE(std::equal(expected.begin(), expected.end(),
                               out.begin() + q * static_cast<std::ptrdiff_t>(count)));
      }
    }
  });
}

TEST_P(MessageLevelsTest, parts_of_different_sizes) {
  run_message_ranks(n, [&](Engine& engine) {
    for (const std::size_t most : {2, 50, 900}) {
      std::vector<std::size_t> counts;
      std::vector<float> every;
      for (int r = 0; r < n; ++r) {
        counts.push_back(most * static_cast<std::size_t>(r) / n_ranks);
        const auto part = values_of(r, counts.back());
        every.insert(every.end(), part.begin(), part.end());
      }
      const auto own = values_of(engine.rank(), counts[static_cast<std::size_t>(engine.rank())]);
      std::vector<float> out(every.size());
      Call call = call_of(Op::all_gather, own.size(), own.data(), out.data());
      call.counts = counts;
      engine.run(call);
      ASSERT_EQ(out, every);
    }
  });
}

TEST_P(MessageLevelsTest, without_comparing_calls) {
  run_message_ranks(n, [&](Engine& engine) {
    for (const std::size_t count : kCounts) {
      auto data = values_of(engine.rank(), count);
      Call call = call_of(Op::all_reduce, count, data.data(), data.data());
      call.check = Check::off;
      engine.run(call);
      expect_sums(data, n);
    }
  });
}

TEST_P(MessageLevelsTest, split_and_messages_between_two_ranks) {
  run_message_ranks(n, [&](Engine& engine) {
    const int rank = engine.rank();
    const auto part = engine.split(call_of(Op::split, 0, nullptr, nullptr), rank % 2, -rank);
    ASSERT_EQ(part->size(), (n + 1 - rank % 2) / 2);
    std::vector<float> one{1};
    part->run(call_of(Op::all_reduce, 1, one.data(), one.data()));
    ASSERT_EQ(one[0], static_cast<float>(part->size()));
    for (const std::size_t count : {1, 1'000, 4'096, 4'097}) {
      std::vector<float> data = values_of(rank, count);
      if (rank == 0) engine.run(call_of(Op::send, count, data.data(), nullptr, n - 1));
      if (rank == n - 1) {
        engine.run(call_of(Op::recv, count, nullptr, data.data(), 0));
        ASSERT_EQ(data, values_of(0, count));
      }
    }
    engine.run(call_of(Op::barrier, 0, nullptr, nullptr));
  });
}

/// The text of the E that `run` throws.
template <class E, class Run>
std::string error_of(const Run& run) {
  try {
    run();
  } catch (const E& error) {
    return error.text();
  }
  throw std::runtime_error("no error of the expected type");
}

TEST_P(MessageLevelsTest, every_rank_gets_the_table_of_different_calls) {
  std::mutex mutex;
  std::vector<std::string> texts;
  run_message_ranks(n, [&](Engine& engine) {
    std::vector<float> data(100);
    const auto count = engine.rank() == 1 ? std::size_t{100} : std::size_t{10};
    const std::string text = error_of<MismatchError>(
        [&] { engine.run(call_of(Op::all_reduce, count, data.data(), data.data())); });
    const std::lock_guard lock(mutex);
    texts.push_back(text);
  });
  for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
  test::expect_contains(texts[0], "100");
}

TEST_P(MessagePartsTest, the_table_of_parts_that_disagree_has_every_rank) {
  std::mutex mutex;
  std::vector<std::string> texts;
  run_message_ranks(n, [&](Engine& engine) {
    std::vector<float> data(100);
    const bool is_other = engine.rank() / 8 == 1;
    const std::string text = error_of<MismatchError>([&] {
      // What has completed on some ranks of the other part fails in their next call.
      for (;;) {
        engine.run(call_of(Op::all_reduce, is_other ? data.size() : 10U, data.data(), data.data()));
      }
    });
    const std::lock_guard lock(mutex);
    texts.push_back(text);
  });
  const auto range = [](int first, int last) {
    return first == last ? std::to_string(first) : fmt::format("{}-{}", first, last);
  };
  const std::string others = range(8, std::min(n, 16) - 1);
  const int end = std::min(n, 64);  // of the leaders that have compared
  const std::string rest = n <= 16 ? "0-7" : "0-7, " + range(16, end - 1);
  for (const std::string& text : texts) {
    EXPECT_EQ(text, texts[0]);
    test::expect_contains(text, "\n  " + others + " ");
    test::expect_contains(text, "\n  " + rest + " ");
  }
}

TEST_P(MessageLevelsTest, a_send_beside_a_collective_is_a_mismatch) {
  // Rank 0 sends to rank 2, which calls the barrier as all others.
  run_message_ranks(n, [&](Engine& engine) {
    float data = 0;
    const std::string text = error_of<MismatchError>([&] {
      engine.run(engine.rank() == 0 ? call_of(Op::send, 1, &data, nullptr, /*root=*/2)
                                    : call_of(Op::barrier, 0, nullptr, nullptr));
    });
    test::expect_contains(text, "send");
    test::expect_contains(text, "barrier");
  });
}

TEST_P(MessageLevelsTest, late_ranks_are_named_not_those_that_wait_for_them) {
  // At least two wait. With levels, in two parts.
  const std::vector<int> late = n == 3   ? std::vector{1}
                                : n < 16 ? std::vector{1, 2}
                                         : std::vector{1, n - 1};
  const int n_late = static_cast<int>(late.size());
  MessageNetwork network(n);
  network.end_calls_when_all_wait([](int rank) { return rank == 0; });
  std::atomic<int> n_failed = 0;
  run_message_ranks(
      n,
      [&](Engine& engine) {
        if (std::ranges::find(late, engine.rank()) != late.end()) {
          network.stop();
          EXPECT_TRUE(test::wait_until([&] { return n_failed == n - n_late; }));
          return;
        }
        const std::string text =
            error_of<TimeoutError>([&] { engine.run(call_of(Op::barrier, 0, nullptr, nullptr)); });
        ++n_failed;
        const std::string named = n_late == 1
                                      ? "waited 60 s for rank 1 of"
                                      : fmt::format("waited 60 s for ranks 1, {} of", late[1]);
        test::expect_contains(text, named);
      },
      &network);
}

TEST_P(MessageLevelsTest, a_rank_that_stops_in_a_call_is_named) {
  MessageNetwork network(n);
  std::atomic<int> n_failed = 0;
  // Its second start: where there are levels, others have completed the first call, or still wait
  // for what it would pass on.
  const int stopped = n > 8 ? 8 : 1;
  network.on_start([&](int rank, int n_started) {
    if (rank != stopped || n_started != (n > 8 ? 2 : 1)) return;
    network.stop();
    EXPECT_TRUE(test::wait_until([&] { return n_failed == n - 1; }));
  });
  network.end_calls_when_all_wait([](int rank) { return rank % 2 == 0; });
  run_message_ranks(
      n,
      [&](Engine& engine) {
        const Call call = call_of(Op::barrier, 0, nullptr, nullptr);
        // Some may complete the first: no message of that rank is missing there.
        const std::string text = error_of<TimeoutError>([&] {
          for (;;) engine.run(call);
        });
        ++n_failed;
        test::expect_contains(text, fmt::format("waited 60 s for rank {} of", stopped));
      },
      &network);
}

TEST_P(MessageLevelsTest, a_rank_that_left_is_named) {
  std::atomic<bool> has_left = false;
  run_message_ranks(n, [&](Engine& engine) {
    if (engine.rank() == 1) {
      engine.leave("no more sheets");
      has_left = true;
      return;
    }
    const std::string text =
        error_of<PeerFailed>([&] { engine.run(call_of(Op::barrier, 0, nullptr, nullptr)); });
    EXPECT_EQ(text, "rank 1 failed: no more sheets");
  });
}

/// What the rank with the most messages sends, or receives, in a short call: the first of a part,
/// to its part and back, and on each level between parts.
std::uint64_t most_messages(int n) {
  if (n <= 8) return static_cast<std::uint64_t>(n - 1);
  return 2 * 7 + most_messages((n + 7) / 8);
}

TEST_P(MessageLevelsTest, messages_grow_with_the_logarithm_of_ranks) {
  for (const Op op : {Op::barrier, Op::all_reduce, Op::reduce, Op::broadcast, Op::all_gather,
                      Op::gather, Op::scatter, Op::reduce_scatter, Op::all_to_all}) {
    if (op == Op::all_to_all && n > 64) continue;  // what a leader passes on is long
    MessageNetwork network(n);
    run_message_ranks(
        n,
        [&](Engine& engine) {
          std::vector<float> in(2 * n_ranks), out(in.size());
          engine.run(call_of(op, op == Op::barrier ? 0 : 2, in.data(), out.data()));
        },
        &network);
    EXPECT_LE(network.most().n_messages, most_messages(n)) << name_of(op);
  }
}

TEST_P(MessageManyPartsTest, long_data_goes_from_each_to_each) {
  // 512 B of each rank are the most that levels pass on.
  for (const std::size_t count : {128, 129}) {
    MessageNetwork network(n);
    run_message_ranks(
        n,
        [&](Engine& engine) {
          std::vector<float> in(count * n_ranks), out(count);
          engine.run(call_of(Op::reduce_scatter, count, in.data(), out.data()));
        },
        &network);
    const bool is_direct = network.most().n_messages >= static_cast<std::uint64_t>(n - 1);
    EXPECT_EQ(is_direct, count == 129) << network.most().n_messages;
  }
}

TEST_P(MessageLevelsTest, without_status_queries_each_sends_to_each) {
  MessageNetwork network(n, /*answers=*/false);
  run_message_ranks(
      n,
      [&](Engine& engine) {
        std::vector<float> data = values_of(engine.rank(), 2);
        engine.run(call_of(Op::all_reduce, data.size(), data.data(), data.data()));
        expect_sums(data, n);
      },
      &network);
  EXPECT_EQ(network.most().n_messages, static_cast<std::uint64_t>(n - 1));
}

TEST_P(MessageLevelsTest, up_to_eight_ranks_send_16_kib_behind_the_header) {
  if (n > 8) return;
  constexpr std::size_t kHeader = 64;
  const auto n_others = static_cast<std::uint64_t>(n - 1);
  const auto traffic_of = [&](Op op, std::size_t n_bytes) {
    MessageNetwork network(n);
    run_message_ranks(
        n,
        [&](Engine& engine) {
          std::vector<std::byte> in(n_bytes * n_ranks, std::byte(engine.rank())), out(in.size());
          Call call = call_of(op, n_bytes, in.data(), out.data(), /*root=*/1);
          if (op == Op::broadcast || op == Op::all_reduce || op == Op::reduce) call.in = call.out;
          call.dtype = DType::u8;
          engine.run(call);
        },
        &network);
    return network.most();
  };
  for (const Op op : {Op::all_reduce, Op::all_gather, Op::broadcast, Op::reduce, Op::gather,
                      Op::scatter, Op::reduce_scatter, Op::all_to_all}) {
    const bool is_in_slices =
        n > 2 && (op == Op::all_reduce || op == Op::broadcast || op == Op::reduce);
    for (const std::size_t n_bytes : {0, 1, 1'000, 16 << 10}) {
      if (is_in_slices && n_bytes == 16 << 10) continue;
      const test::Traffic traffic = traffic_of(op, n_bytes);
      EXPECT_EQ(traffic.n_messages, n_others) << name_of(op) << n_bytes;
      EXPECT_EQ(traffic.n_bytes, n_others * (kHeader + n_bytes)) << name_of(op) << n_bytes;
    }
    EXPECT_GT(traffic_of(op, (16 << 10) + 1).n_messages, n_others) << name_of(op);
  }
}

TEST_P(MessageLevelsTest, a_long_message_beside_a_short_one_is_a_mismatch) {
  constexpr std::size_t kLongest = 4'096;
  for (const std::size_t count : {kLongest, kLongest + 1}) {
    run_message_ranks(n, [&](Engine& engine) {
      std::vector<float> data(count);
      const bool is_other = engine.rank() == 1;
      error_of<MismatchError>([&] {
        engine.run(call_of(is_other ? Op::all_reduce : Op::barrier, is_other ? count : 0,
                           data.data(), data.data()));
      });
    });
    run_message_ranks(n, [&](Engine& engine) {
      std::vector<float> data(count);
      if (engine.rank() > 1) return;
      error_of<MismatchError>([&] {
        engine.run(engine.rank() == 0 ? call_of(Op::send, count, data.data(), nullptr, 1)
                                      : call_of(Op::recv, count - 1, nullptr, data.data(), 0));
      });
    });
  }
}

/// Starts of exchanges before long data: of a rank that is not the first of its part; of rank 0.
int n_starts_before(int n) { return n <= 8 ? 1 : 2; }
int n_starts_of_0_before(int n) { return n <= 8 ? 1 : 2 + n_starts_of_0_before((n + 7) / 8); }

/// Long enough for windows, between few ranks: the test has the memory of all.
class MessageWindowsTest : public MessageLevelsTest {};
INSTANTIATE_TEST_SUITE_P(Ranks, MessageWindowsTest, ::testing::Values(3, 8, 9, 16, 21),
                         [](const auto& of) { return "ranks_" + std::to_string(of.param); });
constexpr std::size_t kInWindows = 17'000;  // floats of a message

TEST_P(MessageWindowsTest, long_messages_are_sent_in_windows) {
  MessageNetwork network(n);
  std::atomic<int> most_started = 0;
  network.on_start([&](int rank, int n_started) {
    if (rank == 0) most_started = n_started;
  });
  const auto run = [&](Op op, std::size_t count) {
    run_message_ranks(
        n,
        [&](Engine& engine) {
          const int rank = engine.rank();
          auto in = values_of(rank, op == Op::all_reduce ? count : count * n_ranks);
          std::vector<float> out(in.size());
          const bool is_in_place = op == Op::all_reduce;
          engine.run(call_of(op, count, in.data(), is_in_place ? in.data() : out.data()));
          if (is_in_place) return expect_sums(in, n);
          for (int q = 0; q < n; ++q) {
            const auto expected = values_of(q, count, static_cast<std::size_t>(rank) * count);
            ASSERT_TRUE(std::equal(expected.begin(), expected.end(),
                                   out.begin() + q * static_cast<std::ptrdiff_t>(count)));
          }
        },
        &network);
  };
  const int n_windows = n <= 8 ? 1 : (n + 7) / 8;
  run(Op::all_to_all, kInWindows);
  EXPECT_EQ(most_started, n_starts_of_0_before(n) + n_windows);
  const int before = most_started;
  run(Op::all_reduce, kInWindows * n_ranks);
  EXPECT_EQ(most_started - before, n_starts_of_0_before(n) + 2 * n_windows);
}

TEST_P(MessageWindowsTest, a_rank_that_stops_between_windows_is_named) {
  MessageNetwork network(n);
  std::atomic<int> n_failed = 0;
  network.on_start([&](int rank, int n_started) {
    if (rank != 1 || n_started != n_starts_before(n) + (n > 8 ? 2 : 1)) return;
    network.stop();
    EXPECT_TRUE(test::wait_until([&] { return n_failed == n - 1; }));
  });
  network.end_calls_when_all_wait([](int rank) { return rank == 0; });
  run_message_ranks(
      n,
      [&](Engine& engine) {
        std::vector<float> data(kInWindows * n_ranks);
        const Call call = call_of(Op::all_reduce, data.size(), data.data(), data.data());
        const std::string text = error_of<TimeoutError>([&] { engine.run(call); });
        ++n_failed;
        test::expect_contains(text, "waited 60 s for rank 1 of");
      },
      &network);
}

// Hosts of two ranks, whose leaders have levels of their own.
TEST(MessageLevelsHostsTest, hosts_and_levels_are_nodes_of_one_tree) {
  constexpr int kRanks = 22;
  std::vector<int> hosts;
  for (int r = 0; r < kRanks; ++r) hosts.push_back(r / 2 * 2);
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const std::size_t count : {std::size_t{67}, std::size_t{5'000}}) {
      const test::Bytes expected =
          test::reduced(dtype, ReduceOp::mean, count, /*seed=*/count, kRanks);
      MessageNetwork network(kRanks);
      std::vector<std::jthread> ranks;
      for (int rank = 0; rank < kRanks; ++rank) {
        ranks.emplace_back([&, rank] {
          const Call barrier = call_of(Op::barrier, 0, nullptr, nullptr);
          const auto engine =
              hierarchical::make(make("network", network.transport(rank)), hosts, barrier);
          test::Bytes data = test::values(dtype, count, /*seed=*/count, rank);
          Call call = call_of(Op::all_reduce, count, data.data(), data.data());
          call.dtype = dtype;
          call.reduce = ReduceOp::mean;
          engine->run(call);
          EXPECT_EQ(data, expected) << name_of(dtype) << ' ' << count << " rank " << rank;
          engine->run(barrier);
        });
      }
    }
  }
}

// Each has little room behind its header.
TEST(MessageLevelsManyTest, a_split_of_more_than_512_ranks) {
  constexpr int kRanks = 520, kParts = 130;
  run_message_ranks(kRanks, [](Engine& engine) {
    const int rank = engine.rank(), color = rank % kParts;
    const auto part = engine.split(call_of(Op::split, 0, nullptr, nullptr), color, rank);
    ASSERT_EQ(part->size(), kRanks / kParts);
    ASSERT_EQ(part->rank(), rank / kParts);
    std::vector<float> one{static_cast<float>(rank)};
    part->run(call_of(Op::all_reduce, 1, one.data(), one.data()));
    ASSERT_EQ(one[0], static_cast<float>(4 * color + 6 * kParts));
  });
}

TEST(MessageLevelsLateTest, ranks_in_later_calls_name_the_rank_that_the_root_waits_for) {
  constexpr int kRanks = 16, kLate = 9, kRoot = 5;
  for (const Check check : {Check::light, Check::off}) {
    MessageNetwork network(kRanks);
    std::atomic<int> n_failed = 0;
    // It has sent the slices of a reduce, and not its sum.
    const int n_before = check == Check::off ? 0 : n_starts_before(kRanks);
    network.on_start([&](int rank, int n_started) {
      if (rank != kLate || n_started != 2 + n_before) return;
      network.stop();
      EXPECT_TRUE(test::wait_until([&] { return n_failed == kRanks - 1; }));
    });
    network.end_calls_when_all_wait([](int rank) { return rank != kRoot; });
    run_message_ranks(
        kRanks,
        [&](Engine& engine) {
          std::vector<float> data(4'097);
          Call call = call_of(Op::reduce, data.size(), data.data(), data.data(), kRoot);
          call.check = check;
          const std::string text = error_of<TimeoutError>([&] {
            for (;;) engine.run(call);
          });
          ++n_failed;
          test::expect_contains(text, "waited 60 s for rank 9 of");
        },
        &network);
  }
}

TEST_P(MessageWindowsTest, a_rank_that_fails_between_windows_is_named) {
  MessageNetwork network(n);
  network.on_start([&](int rank, int n_started) {
    if (rank == 1 && n_started == n_starts_before(n) + (n > 8 ? 2 : 1)) {
      throw std::runtime_error("no more sheets");
    }
  });
  run_message_ranks(
      n,
      [&](Engine& engine) {
        std::vector<float> data(kInWindows * n_ranks);
        const Call call = call_of(Op::all_reduce, data.size(), data.data(), data.data());
        if (engine.rank() == 1) {
          EXPECT_THROW(engine.run(call), std::runtime_error);
          engine.abandon("no more sheets");  // as the group does
          return;
        }
        const std::string text = error_of<PeerFailed>([&] { engine.run(call); });
        EXPECT_EQ(text, "rank 1 failed: no more sheets");
      },
      &network);
}

TEST_P(MessageLevelsTest, a_root_does_not_send_its_data_to_every_rank) {
  for (const Op op : {Op::broadcast, Op::reduce}) {
    const std::size_t count = 16 << 10;
    MessageNetwork network(n);
    run_message_ranks(
        n,
        [&](Engine& engine) {
          std::vector<float> data(count);
          engine.run(call_of(op, count, data.data(), data.data()));
        },
        &network);
    EXPECT_LE(network.most().n_bytes, 2 * count * sizeof(float) + n_ranks * 256) << name_of(op);
  }
}

}  // namespace
}  // namespace lockstep::message
