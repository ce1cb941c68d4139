#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/expect.hpp"
#include "support/hosts.hpp"
#include "support/namespaces.hpp"
#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"

// Machines of two ranks each, started by `lockstep run --nnodes`: Gloo between them.
namespace lockstep::test {
namespace {

TEST(HostsTest, hierarchical_over_gloo_sends_once_per_host) {
  for (const int n : {2, 3}) {
    const Namespaces machines(n, "400mbit");
    if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
    expect_once_per_host(read_hosts(run_on_machines(n, {{HOSTS_PROGRAM, "auto"}})[0]),
                         read_hosts(run_on_machines(n, {{HOSTS_PROGRAM, "gloo"}})[0]), n);
  }
}

TEST(HostsTest, one_program_over_two_machines) {
  const Namespaces machines(2);
  if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
  const std::vector<Ended> ends = run_on_machines(2, {{EVALUATE_PROGRAM}});
  for (const Ended& ended : ends) EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_EQ(ends[0].out + ends[1].out,
            "items 1001, sum 333833500, mean 333500.000, largest 1000000, agreed, in order\n");
  test::expect_contains(ends[1].err,
                        "rank 3 of 4, local 1 of 2, by lockstep run, over hierarchical");
}

/// EVALUATE_PROGRAM on two machines, with a variable in its environment.
void evaluate_with(const std::string& variable) {
  const Namespaces machines(2);
  if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
  const std::vector<Ended> ends = run_on_machines(2, {{"env", variable, EVALUATE_PROGRAM}});
  for (const Ended& ended : ends) EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  test::expect_contains(ends[1].err, "over hierarchical");
}

TEST(HostsTest, a_module_for_mpi_in_the_environment_leaves_gloo_between_machines) {
  evaluate_with("LOCKSTEP_MPI=" EVALUATE_PROGRAM);  // a file that exists
}

TEST(HostsTest, every_operation_is_right_where_init_dist_checks_them) {
  evaluate_with("LOCKSTEP_CHECK=full");
}

TEST(HostsTest, a_cut_cable_is_blamed_on_no_rank_of_the_own_host) {
  const Namespaces machines(2);
  if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
  expect_cut_cable_blames_the_other_machine(HOSTS_PROGRAM, /*ucx=*/"off");
}

/// First and last moment of one collective on one host.
struct Span {
  std::int64_t last_start_ns = INT64_MIN;
  std::int64_t first_end_ns = INT64_MAX;
};

TEST(HostsTest, a_trace_of_two_machines_with_other_clocks_shows_one_moment) {
  const Namespaces machines(2);
  if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
  if (const auto why = missing_time_namespaces(); !why.empty()) GTEST_SKIP() << why;
  constexpr int kAheadSeconds = 100;
  const TemporaryFolder folder;
  const std::vector<Ended> ends = run_on_machines(
      2, {{HOSTS_PROGRAM, "auto"}, {"--trace", folder / "t.json"}, {0, kAheadSeconds}});
  for (const Ended& ended : ends) ASSERT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  Command merge({.arguments = {"trace", "merge", folder / "merged.json", folder / "t.node-0.json",
                               folder / "t.node-1.json"}});
  const Ended merged = merge.wait();
  ASSERT_EQ(merged.exit_code, 0) << merged.err;
  const auto trace = nlohmann::json::parse(contents_of(folder / "merged.json"));

  // What the clocks keep to, and the rounding of times: far below what is corrected.
  constexpr std::int64_t kSlackNs = 10'000'000;
  const auto& corrections = trace["otherData"]["clock_corrections"];
  ASSERT_EQ(corrections.size(), 1U);
  const auto added_ns = corrections[0]["added_ns"].get<std::int64_t>();
  const auto within_ns = corrections[0]["within_ns"].get<std::int64_t>();
  EXPECT_GE(within_ns, 0);
  EXPECT_LE(std::abs(added_ns + kAheadSeconds * 1'000'000'000LL), within_ns + kSlackNs);

  std::map<std::uint64_t, std::array<Span, 2>> spans;  // by number, then host
  std::map<std::uint64_t, int> n_ranks;
  for (const auto& event : trace["traceEvents"]) {
    if (event["name"] != "all_reduce" || event["args"]["group"] != "world") continue;
    const auto number = event["args"]["collective"].get<std::uint64_t>();
    Span& span = spans[number].at(event["pid"].get<std::size_t>() / 2);
    const auto start_ns = std::llround(event["ts"].get<double>() * 1000);
    span.last_start_ns = std::max<std::int64_t>(span.last_start_ns, start_ns);
    span.first_end_ns = std::min<std::int64_t>(
        span.first_end_ns, start_ns + std::llround(event["dur"].get<double>() * 1000));
    ++n_ranks[number];
  }
  EXPECT_EQ(spans.size(), 8U);  // of little data and of much
  for (const auto& [number, hosts] : spans) {
    EXPECT_EQ(n_ranks[number], 4) << number;
    EXPECT_LE(hosts[0].last_start_ns, hosts[1].first_end_ns + kSlackNs) << number;
    EXPECT_LE(hosts[1].last_start_ns, hosts[0].first_end_ns + kSlackNs) << number;
  }
}

}  // namespace
}  // namespace lockstep::test
