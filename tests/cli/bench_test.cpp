#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/bench/wire.hpp"
#include "cli/command.hpp"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;

Ended bench(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "bench");
  return Command(StartOptions{.arguments = std::move(arguments)}).wait();
}

/// A folder of one test, gone after it.
class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "bench-test-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~Folder() { fs::remove_all(path_); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

nlohmann::json read_json(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

/// On a busy machine the placement may differ before and after every block: then that is said.
void expect_times(const nlohmann::json& row) {
  if (row.value("error", "") == "the machine moved during every block") return;
  EXPECT_GT(row["p50_us"], 0) << row;
  EXPECT_GE(row["p99_us"], row["p50_us"]) << row;
}

TEST(BenchTest, every_verb_with_processes_and_threads) {
  const Folder folder;
  const Ended ended = bench({"-n",         "3",
                             "--verb",     "barrier",
                             "all_reduce", "broadcast",
                             "all_gather", "reduce_scatter",
                             "all_to_all", "--threads",
                             "--min",      "12",
                             "--max",      "12KiB",
                             "--factor",   "1024",
                             "--blocks",   "1",
                             "--block-ms", "1",
                             "--json",     folder / "figures.json"});
  ASSERT_EQ(ended.exit_code, 0) << ended.err << ended.out;
  EXPECT_NE(ended.out.find("all_to_all"), std::string::npos) << ended.out;
  const nlohmann::json figures = read_json(folder / "figures.json");
  EXPECT_EQ(figures["ranks"], 3);
  ASSERT_EQ(figures["rows"].size(), 2U + 5U * 2U * 2U);
  for (const auto& row : figures["rows"]) expect_times(row);
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
  EXPECT_NE(shared.out.find("touch buffers in shared memory"), std::string::npos) << shared.out;
}

TEST(BenchTest, beside_mpi) {
  const Folder folder;
  for (const char* peer : {"openmpi", "mpich"}) {
    const Ended ended = bench({"--unpinned", "--peer", peer, "--min", "64", "--max", "64",
                               "--blocks", "1", "--block-ms", "1", "--json",
                               folder / "figures.json", "--svg", folder / "figures.svg"});
    if (ended.err.find("built without it") != std::string::npos) GTEST_SKIP() << ended.err;
    ASSERT_EQ(ended.exit_code, 0) << ended.err << ended.out;
    EXPECT_NE(ended.out.find("best peer / ours"), std::string::npos) << ended.out;
    const nlohmann::json figures = read_json(folder / "figures.json");
    EXPECT_EQ(figures["rows"][1]["family"], peer);
    expect_times(figures["rows"][1]);
    std::ifstream picture(folder / "figures.svg");
    std::stringstream text;
    text << picture.rdbuf();
    EXPECT_NE(text.str().find("<svg"), std::string::npos);
  }
}

TEST(BenchTest, wrong_command_lines) {
  const auto expect_refused = [](const std::vector<std::string>& arguments,
                                 const std::string& text) {
    const Ended ended = bench(arguments);
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_NE(ended.err.find(text), std::string::npos) << ended.err;
    EXPECT_EQ(ended.out, "");
  };
  expect_refused({"--peer", "carrier_pigeon"}, "carrier_pigeon");
  expect_refused({"--verb", "jump"}, "jump");
  expect_refused({"--min", "8KiB", "--max", "4KiB"}, "--min not above --max");
  expect_refused({"--type", "f64", "--min", "4"}, "the size of one f64");
  expect_refused({"-n", "0"}, "-n");
}

/// Does nothing, so that every buffer keeps what its own rank wrote.
class Idle : public bench::Contestant {
 public:
  void barrier() override {}
  void call(const bench::Block& /*block*/, void* /*in*/, void* /*out*/) override {}
};

TEST(BenchTest, wrong_results_are_not_timed) {
  Idle idle;
  bench::Block block{};
  block.verb = bench::Verb::all_reduce;
  block.type = bench::Type::f32;
  block.count = 5;
  block.n_samples = 1;
  block.calls_per_sample = 1;
  bench::Buffers buffers(idle, block, /*rank=*/0, /*n_ranks=*/2);
  EXPECT_THROW(bench::measure(idle, block, buffers), std::runtime_error);
  bench::Buffers alone(idle, block, /*rank=*/0, /*n_ranks=*/1);
  EXPECT_EQ(bench::measure(idle, block, alone).size(), 1U);
}

TEST(BenchTest, tune_prints_a_setting_that_is_taken) {
  const Ended ended = bench({"--tune", "--unpinned", "--blocks", "1", "--block-ms", "1"});
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  ASSERT_EQ(ended.out.rfind("LOCKSTEP_TUNE=flat=", 0), 0U) << ended.out;
  const std::string value = ended.out.substr(14, ended.out.size() - 15);
  Command with_it(StartOptions{
      .arguments = {"bench", "--unpinned", "--max", "4", "--blocks", "1", "--block-ms", "1"},
      .variables = {{"LOCKSTEP_TUNE", value}}});
  EXPECT_EQ(with_it.wait().exit_code, 0);
}

}  // namespace
}  // namespace lockstep::test
