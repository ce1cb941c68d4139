// A batch-normalised network that is trained on several hosts of two ranks each becomes that of one
// rank with the whole batch. The hosts are network namespaces, with Gloo or MPI between them.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/hosts.hpp"
#include "support/namespaces.hpp"
#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"
#include "train/data.hpp"
#include "train/train.hpp"

namespace train {
namespace {

using lockstep::test::Command;
using lockstep::test::Ended;
using lockstep::test::Mpi;

constexpr std::size_t kHostsSteps = 30;
constexpr int kRanksOfHost = 2;
constexpr double kHostsSame = 1e-9;
constexpr std::chrono::minutes kHostsWatchdog{10};  // eight libtorchs start on a busy machine

/// What a training wrote to its metrics.
struct Metered {
  std::vector<double> losses;  ///< of each step
  int n_ranks = 0;
};

/// A training on hosts, and its equal on one rank.
class HostsTraining : public testing::Test {
 protected:
  explicit HostsTraining(int n_hosts) : n_hosts_(n_hosts), machines_(n_hosts) {}

  void SetUp() override {
    if (!machines_.missing().empty()) GTEST_SKIP() << machines_.missing();
  }

  /// The training `name`, to which its files belong.
  std::vector<std::string> command_line(const std::string& name) const {
    // No number of ranks here divides the batch, so that the ranks' parts differ.
    return {LOCKSTEP_TRAIN,
            "--data=" LOCKSTEP_DIGITS,
            "--batch=13",
            fmt::format("--max-steps={}", kHostsSteps),
            "--precision=" + precision_,
            "--threads=1",
            "--save=" + checkpoint(name),
            "--metrics=" + metrics(name),
            "--metrics-every=1"};
  }
  std::vector<std::string> command_line_on_hosts() const {
    std::vector<std::string> words = command_line("hosts");
    words.insert(words.end(), on_hosts_.begin(), on_hosts_.end());
    return words;
  }

  void train_by_launchers(const std::string& ucx, int n_ranks = kRanksOfHost) const {
    std::vector<std::string> program = command_line_on_hosts();
    program.insert(program.begin(), "--");
    const std::vector<Ended> ends = lockstep::test::run_on_machines(
        n_hosts_, {.program = program, .watchdog = kHostsWatchdog, .ucx = ucx, .n_ranks = n_ranks});
    for (const Ended& ended : ends) EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  }

  void train_over(const Mpi& mpi) const {
    const std::string program = fmt::format("{}", fmt::join(command_line_on_hosts(), " "));
    Command command =
        lockstep::test::start_by_mpirun(mpi, n_hosts_, machines_, folder_, program, kHostsWatchdog);
    if (!mpi.ends) {
      // The summary is the last line, after the checkpoint.
      const auto is_done = [&] {
        const std::string lines = lockstep::test::contents_of(metrics("hosts"));
        return lockstep::test::contains(lines, "\"summary\"") && lines.back() == '\n';
      };
      const auto has_ended = [&] { return lockstep::test::thread_state(command.pid()) == 'Z'; };
      EXPECT_TRUE(
          lockstep::test::wait_until([&] { return is_done() || has_ended(); }, kHostsWatchdog));
      if (is_done()) return;
    }
    const Ended ended = command.wait();
    EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
    command.expect_nothing_left();
  }

  /// Compares what was trained on the hosts with one rank, up to `same`.
  void expect_one_rank(double same = kHostsSame, int n_ranks = kRanksOfHost) const {
    ASSERT_FALSE(HasFailure());
    std::vector<std::string> alone = {"-n", "1", "--"};
    const std::vector<std::string> words = command_line("alone");
    alone.insert(alone.end(), words.begin(), words.end());
    alone.insert(alone.end(), alone_.begin(), alone_.end());
    const Ended ended = lockstep::test::run(
        lockstep::test::StartOptions{.arguments = alone, .watchdog = kHostsWatchdog});
    ASSERT_EQ(ended.exit_code, 0) << ended.out << ended.err;

    const Metered expected = read_metrics("alone");
    const Metered got = read_metrics("hosts");
    EXPECT_EQ(expected.n_ranks, 1);
    EXPECT_EQ(got.n_ranks, n_ranks * n_hosts_);
    ASSERT_EQ(expected.losses.size(), kHostsSteps);
    ASSERT_EQ(got.losses.size(), kHostsSteps);
    for (std::size_t i = 0; i < kHostsSteps; ++i) {
      EXPECT_NEAR(got.losses[i], expected.losses[i], same) << "step " << i + 1;
    }
    Options options;
    options.precision = precision_;
    const Difference difference = compare(options, checkpoint("alone"), checkpoint("hosts"));
    EXPECT_LE(difference.largest, same) << difference.name;
  }

  void expect_one_rank_over(const Mpi& mpi) const {
    if (mpi.module.empty()) GTEST_SKIP() << "built without " << mpi.name;
    train_over(mpi);
    expect_one_rank();
  }

 private:
  std::string checkpoint(const std::string& name) const { return folder_ / (name + ".pt"); }
  std::string metrics(const std::string& name) const { return folder_ / (name + ".jsonl"); }

  Metered read_metrics(const std::string& name) const {
    Metered metered;
    const std::string text = lockstep::test::contents_of(metrics(name));
    for (const std::string& line : lockstep::test::lines_of(text)) {
      const auto event = nlohmann::json::parse(line);
      if (event["event"] == "steps") metered.losses.push_back(event["loss"].get<double>());
      if (event["event"] == "summary") metered.n_ranks = event["ranks"].get<int>();
    }
    return metered;
  }

  int n_hosts_;
  lockstep::test::Namespaces machines_;
  lockstep::test::TemporaryFolder folder_;

 protected:
  std::string precision_ = "f64";
  // Of the command line.
  std::vector<std::string> on_hosts_ = {"--sync-bn=on", "--backend=hierarchical"};
  std::vector<std::string> alone_ = {"--sync-bn=off"};  ///< libtorch's own BatchNorm
};

/// The parameter: the number of hosts.
class TrainingHostsTest : public HostsTraining, public testing::WithParamInterface<int> {
 protected:
  TrainingHostsTest() : HostsTraining(GetParam()) {}
};

INSTANTIATE_TEST_SUITE_P(Hosts, TrainingHostsTest, testing::Values(2, 4),
                         [](const auto& n_hosts) { return fmt::to_string(n_hosts.param); });

TEST_P(TrainingHostsTest, over_gloo_is_one_rank) {
  train_by_launchers("off");
  expect_one_rank();
}

TEST_P(TrainingHostsTest, over_open_mpi_is_one_rank) {
  expect_one_rank_over(lockstep::test::open_mpi(OPENMPI_MODULE));
}

TEST_P(TrainingHostsTest, over_mpich_is_one_rank) {
  expect_one_rank_over(lockstep::test::mpich(MPICH_MODULE));
}

struct Ranks {
  int n_hosts, n_on_each;
};

/// In eight shards, which are a node of the tree on each host, or on none.
class ShardsHostsTest : public HostsTraining, public testing::WithParamInterface<Ranks> {
 protected:
  ShardsHostsTest() : HostsTraining(GetParam().n_hosts) {
    precision_ = "f32";
    alone_ = on_hosts_ = {"--sync-bn=on", "--shards=8"};
  }
};
INSTANTIATE_TEST_SUITE_P(Hosts, ShardsHostsTest, testing::Values(Ranks{2, 2}, Ranks{3, 1}),
                         [](const auto& ranks) {
                           return fmt::format("{}x{}", ranks.param.n_hosts, ranks.param.n_on_each);
                         });

TEST_P(ShardsHostsTest, over_ucx_have_the_bits_of_one_rank) {
  if (std::string(UCX_MODULE).empty()) GTEST_SKIP() << "built without UCX";
  train_by_launchers(UCX_MODULE, GetParam().n_on_each);
  expect_one_rank(0, GetParam().n_on_each);
}

TEST_P(ShardsHostsTest, over_gloo_have_the_bits_of_one_rank) {
  train_by_launchers("off", GetParam().n_on_each);
  expect_one_rank(0, GetParam().n_on_each);
}

}  // namespace
}  // namespace train
