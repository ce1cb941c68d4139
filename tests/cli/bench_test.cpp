#include <gtest/gtest.h>
#include <sched.h>

#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/bench/meter.hpp"
#include "cli/command.hpp"
#include "support/expect.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {

/// With a watchdog for a busy machine, where ranks that measure wait for a core in every call.
StartOptions of_bench(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "bench");
  return {.arguments = std::move(arguments), .watchdog = std::chrono::minutes(10)};
}

StartOptions of_compare(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"--programs", BENCH_PROGRAMS});
  return {.arguments = std::move(arguments),
          .watchdog = std::chrono::minutes(10),
          .program = BENCH_COMPARE};
}

Ended bench(const std::vector<std::string>& arguments) {
  return Command(of_bench(arguments)).wait();
}

Ended compare(const std::vector<std::string>& arguments) {
  return Command(of_compare(arguments)).wait();
}

class BenchCompareTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(BENCH_PROGRAMS).empty()) GTEST_SKIP() << "built without the benchmarks";
  }
};

nlohmann::json read_json(const std::string& path) {
  return nlohmann::json::parse(contents_of(path));
}

void expect_times(const nlohmann::json& figures) {
  EXPECT_GT(figures["p50_us"], 0) << figures;
  EXPECT_GE(figures["p99_us"], figures["p50_us"]) << figures;
}

TEST(BenchTest, every_operation_with_processes_and_threads) {
  const TemporaryFolder folder;
  const Ended ended = bench({"-n",
                             "3",
                             "--operation",
                             "barrier",
                             "all_reduce",
                             "broadcast",
                             "all_gather",
                             "reduce_scatter",
                             "all_to_all",
                             "--threads",
                             "--unpinned",
                             "--min",
                             "12",
                             "--max",
                             "12KiB",
                             "--factor",
                             "1024",
                             "--blocks",
                             "1",
                             "--block-ms",
                             "1",
                             "--json",
                             folder / "figures.json"});
  ASSERT_EQ(ended.exit_code, 0) << ended.err << ended.out;
  expect_contains(ended.out, "all_to_all");
  const nlohmann::json figures = read_json(folder / "figures.json");
  EXPECT_EQ(figures["ranks"], 3);
  ASSERT_EQ(figures["rows"].size(), 2U + 5U * 2U * 2U);
  for (const auto& row : figures["rows"]) expect_times(row);
  EXPECT_EQ(figures["rows"][0]["ranks"], "processes");
  EXPECT_EQ(figures["rows"][11]["ranks"], "threads");
}

TEST(BenchTest, every_type_and_mode) {
  for (const char* type : {"u8", "i32", "i64", "f16", "bf16", "f64"}) {
    const Ended ended = bench({"--unpinned", "--type", type, "--mode", "fresh", "--min", "4KiB",
                               "--max", "4KiB", "--blocks", "1", "--block-ms", "1"});
    EXPECT_EQ(ended.exit_code, 0) << type << ended.err;
  }
  const Ended shared = bench({"--shared", "--mode", "touch", "--min", "1MiB", "--max", "1MiB",
                              "--blocks", "1", "--block-ms", "1"});
  EXPECT_EQ(shared.exit_code, 0) << shared.err;
  expect_contains(shared.out, "touch buffers in shared memory");
}

TEST(BenchTest, killed_it_leaves_nothing) {
  const TemporaryFolder folder;
  Command command(
      StartOptions{.arguments = {"bench", "--unpinned", "--max", "4", "--blocks", "1000"},
                   .variables = {{"TMPDIR", folder.path()}}});
  command.wait_for_processes(4);  // itself, which is a `lockstep run`, its guard, and two ranks
  command.send(SIGKILL);
  EXPECT_EQ(command.wait().signal, SIGKILL);
  command.expect_nothing_left();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(BenchTest, wrong_command_lines) {
  const auto expect_refused = [](const std::vector<std::string>& arguments,
                                 const std::string& text) {
    const Ended ended = bench(arguments);
    EXPECT_EQ(ended.exit_code, 2);
    expect_contains(ended.err, text);
    EXPECT_EQ(ended.out, "");
  };
  expect_refused({"--operation", "jump"}, "jump");
  expect_refused({"--min", "8KiB", "--max", "4KiB"}, "--min not above --max");
  expect_refused({"--type", "f64", "--min", "4"}, "the size of one f64");
  expect_refused({"-n", "0"}, "-n");
  expect_refused({"--min", "-4"}, "got '-4', below 0");
  expect_refused({"--tune", "--json", "figures.json"}, "--json excludes --tune");
  expect_refused({"--tune", "-n", "1"}, "at least two ranks");
}

/// Does nothing, so that every buffer keeps what its own rank wrote.
class Idle : public bench::Collectives {
 public:
  void barrier() override {}
  void call(const bench::Block& /*block*/, void* /*in*/, void* /*out*/) override {}
};

TEST(BenchTest, wrong_results_are_not_timed) {
  Idle idle;
  const bench::Request request{bench::Operation::all_reduce, DType::f32, bench::Mode::warm,
                               /*in_shared_memory=*/0, /*n_bytes=*/20};
  bench::Meter of_two(idle, /*rank=*/0, /*n_ranks=*/2);
  EXPECT_THROW(of_two.measure(request), std::runtime_error);
  bench::Meter alone(idle, /*rank=*/0, /*n_ranks=*/1);
  EXPECT_EQ(alone.measure(request).size(), 3U);
}

TEST(BenchTest, tune_prints_a_setting_that_is_taken) {
  const Ended ended = bench({"--tune", "--unpinned", "--blocks", "1", "--block-ms", "1"});
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  ASSERT_EQ(ended.out.rfind("LOCKSTEP_TUNE=inline=", 0), 0U) << ended.out;
  const std::string value = ended.out.substr(14, ended.out.size() - 15);
  Command with_it(StartOptions{
      .arguments = {"bench", "--unpinned", "--max", "4", "--blocks", "1", "--block-ms", "1"},
      .variables = {{"LOCKSTEP_TUNE", value}}});
  EXPECT_EQ(with_it.wait().exit_code, 0);
}

// Unpinned where times are wanted: then there is no probe, by which a block would not count.

TEST_F(BenchCompareTest, beside_mpi) {
  const TemporaryFolder folder;
  for (const char* peer : {"openmpi", "mpich", "intelmpi"}) {
    const Ended ended = compare({"--unpinned", "--peer", peer, "--min", "64", "--max", "64",
                                 "--blocks", "1", "--block-ms", "1", "--json",
                                 folder / "figures.json", "--svg", folder / "figures.svg"});
    if (contains(ended.err, "built without it") || contains(ended.err, "./dev setup peers")) {
      GTEST_SKIP() << ended.err;
    }
    ASSERT_EQ(ended.exit_code, 0) << ended.err << ended.out;
    expect_contains(ended.out, "best peer / lockstep");
    const nlohmann::json figures = read_json(folder / "figures.json");
    EXPECT_EQ(figures["rows"][1]["library"], peer);
    expect_times(figures["rows"][1]);
    EXPECT_TRUE(contains(contents_of(folder / "figures.svg"), "<svg"));
  }
}

TEST_F(BenchCompareTest, beside_limits) {
  const TemporaryFolder folder;
  const Ended ended =
      compare({"--unpinned",  "--peer",     "minimum",    "--peer", "unchecked",
               "--operation", "barrier",    "all_reduce", "--min",  "4",
               "--max",       "256KiB",     "--factor",   "16",     "--blocks",
               "1",           "--block-ms", "1",          "--json", folder / "figures.json"});
  if (contains(ended.err, "built without it")) GTEST_SKIP() << ended.err;
  ASSERT_EQ(ended.exit_code, 0) << ended.err << ended.out;
  const nlohmann::json rows = read_json(folder / "figures.json")["rows"];
  ASSERT_EQ(rows.size(), (1U + 5U) * 3U);
  const std::array<std::string, 3> libraries = {"lockstep", "minimum", "unchecked"};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i]["library"], libraries.at(i % 3));
    expect_times(rows[i]);
  }
  const Ended three = compare({"-n", "3", "--peer", "minimum"});
  EXPECT_EQ(three.exit_code, 1);
  EXPECT_TRUE(contains(three.err, "minimum: supports 2 ranks, not 3")) << three.err;
}

TEST_F(BenchCompareTest, every_block_is_in_a_placement_or_moved) {
  cpu_set_t cores;
  ASSERT_EQ(::sched_getaffinity(0, sizeof cores, &cores), 0);
  if (CPU_COUNT(&cores) < 2) GTEST_SKIP() << "one core: there is nothing to probe";
  const TemporaryFolder folder;
  const Ended ended = compare({"--threads", "--min", "4", "--max", "64", "--blocks", "2",
                               "--block-ms", "1", "--json", folder / "figures.json"});
  ASSERT_EQ(ended.exit_code, 0) << ended.err << ended.out;
  const nlohmann::json rows = read_json(folder / "figures.json")["rows"];
  ASSERT_EQ(rows.size(), 3U * 2U);
  for (const auto& row : rows) {
    std::size_t n_blocks = row.value("moved", 0U);
    const nlohmann::json placements = row.value("placements", nlohmann::json::object());
    for (const auto& [placement, figures] : placements.items()) {
      EXPECT_TRUE(placement == "same core" || placement == "same L3" || placement == "other L3")
          << row;
      expect_times(figures);
      for (const nlohmann::json& block : figures["blocks"]) {
        expect_times(block);
        EXPECT_GT(block["one_way_ns"], 0) << row;
        EXPECT_LE(block["foreign"], 1.5) << row;
      }
      n_blocks += figures["blocks"].size();
    }
    if (row.contains("error")) {
      EXPECT_EQ(row["error"], "the core placement changed during every block");
    } else {
      EXPECT_EQ(row["p50_us"], row["placements"][row["placement"]]["p50_us"]) << row;
    }
    EXPECT_GE(n_blocks, 1U) << row;
  }
}

TEST_F(BenchCompareTest, killed_it_leaves_nothing) {
  const TemporaryFolder folder;
  StartOptions start = of_compare({"--unpinned", "--max", "4", "--blocks", "1000"});
  start.variables = {{"TMPDIR", folder.path()}};
  Command command(start);
  command.wait_for_processes(5);  // itself, and a `lockstep run` of two ranks with its guard
  command.send(SIGKILL);
  EXPECT_EQ(command.wait().signal, SIGKILL);
  command.expect_nothing_left();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST_F(BenchCompareTest, wrong_command_lines) {
  const Ended ended = compare({"--peer", "carrier_pigeon"});
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.err, "carrier_pigeon")) << ended.err;
  EXPECT_EQ(ended.out, "");
}

}  // namespace
}  // namespace lockstep::test
