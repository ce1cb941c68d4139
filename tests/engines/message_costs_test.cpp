#include "engines/message/costs.hpp"

#include <gtest/gtest.h>

#include <lockstep/error.hpp>
#include <string>
#include <vector>

#include "support/message_network.hpp"

namespace lockstep::message {
namespace message_costs_test {
namespace {

TEST(MessageCostsTest, the_defaults_are_those_of_a_network) {
  const Costs parsed = parse_costs("1.25us,25Gbit");
  EXPECT_DOUBLE_EQ(parsed.message_us, Costs().message_us);
  EXPECT_DOUBLE_EQ(parsed.round_us, Costs().round_us);
  EXPECT_DOUBLE_EQ(parsed.byte_us, Costs().byte_us);
  EXPECT_EQ(parse_costs({}), Costs());
}

TEST(MessageCostsTest, latency_is_not_cpu_time) {
  EXPECT_DOUBLE_EQ(parse_costs("5us,25Gbit").message_us, 2);
  const Costs far = parse_costs("20000us,0.5Gbit");
  EXPECT_DOUBLE_EQ(far.message_us, 10);
  EXPECT_DOUBLE_EQ(far.round_us, 20010);
  EXPECT_DOUBLE_EQ(far.byte_us, 16e-3);
}

TEST(MessageCostsTest, they_are_described_as_given) {
  for (const char* text : {"1.25us,25Gbit", "25us,100Gbit", "1500us,0.1Gbit"}) {
    EXPECT_EQ(describe(parse_costs(text)), text);
  }
}

TEST(MessageCostsTest, other_text_is_rejected) {
  for (const char* text :
       {"", "25us", "25us,", ",100Gbit", "100Gbit,25us", "25,100", "25ms,100Gbit", "0us,100Gbit",
        "25us,0Gbit", "-1us,1Gbit", "nanus,1Gbit", "infus,1Gbit", "1us,1e300Gbit", "25us;100Gbit",
        "25us, 100Gbit", "25us,100Gbit,", "25us,100Gbit,1us", "us,Gbit", "25usus,1Gbit"}) {
    try {
      parse_costs(text);
      ADD_FAILURE() << text << " was taken";
    } catch (const UsageError& error) {
      EXPECT_EQ(error.text().rfind("LOCKSTEP_NETWORK is '" + std::string(text) + "'", 0), 0U)
          << error.text();
    }
  }
}

/// Of the rank with the most bytes, in one call of `n_ranks` hosts on the network `text`.
std::uint64_t most_bytes(int n_ranks, Op op, std::size_t n_bytes, const char* text) {
  test::MessageNetwork network(n_ranks);
  test::run_message_ranks(
      n_ranks,
      [&](Engine& engine) {
        std::vector<std::byte> data(n_bytes, std::byte(engine.rank() == 0 ? 1 : 0));
        engine.run({.op = op,
                    .dtype = DType::u8,
                    .reduce = ReduceOp::max,
                    .root = op == Op::broadcast ? 0 : -1,
                    .count = n_bytes,
                    .in = data.data(),
                    .out = data.data(),
                    .group = "world",
                    .sequence = 1,
                    .timeout = std::chrono::minutes(1),
                    .where = std::source_location::current()});
        EXPECT_EQ(data, std::vector<std::byte>(n_bytes, std::byte{1})) << engine.rank();
      },
      &network, parse_costs(text));
  return network.most().n_bytes;
}

TEST(MessageCostsTest, a_broadcast_is_sliced_where_bytes_are_expensive) {
  constexpr std::size_t kBytes = 4096;
  // The root sends everything to all others, or a slice to each, twice.
  EXPECT_GE(most_bytes(4, Op::broadcast, kBytes, "25us,100Gbit"), 3 * kBytes);
  EXPECT_LT(most_bytes(4, Op::broadcast, kBytes, "1us,1Gbit"), 2 * kBytes);
}

TEST(MessageCostsTest, all_reduce_gathers_all_data_where_rounds_are_expensive) {
  constexpr std::size_t kBytes = 4096;
  EXPECT_GE(most_bytes(16, Op::all_reduce, kBytes, "25us,100Gbit"), 15 * kBytes);
  EXPECT_LT(most_bytes(16, Op::all_reduce, kBytes, "1us,1Gbit"), 5 * kBytes);
}

}  // namespace
}  // namespace message_costs_test
}  // namespace lockstep::message
