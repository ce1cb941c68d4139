#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"
#include "train/data.hpp"
#include "train/train.hpp"

namespace train {
namespace {

constexpr int kStepsPerEpoch = 180;  // 1440 digits, 8 a step
constexpr int kWatchdogMs = 120'000;
constexpr double kRounding = 1e-9;
const std::string kF64 = "--precision f64 --metrics-every 1";
const std::string kInShards = "--shards 4 --metrics-every 1";

std::string contents_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The metrics of a training in a pipe that holds a page of them, so that the training is never
/// much further than who reads them.
class Metrics {
 public:
  explicit Metrics(const std::filesystem::path& path) {
    if (mkfifo(path.c_str(), 0600) != 0) throw std::runtime_error("no pipe at " + path.string());
    // Also for writing: no end of file between a training's death and the next one's start.
    fd_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd_ < 0 || fcntl(fd_, F_SETPIPE_SZ, 4096) < 0) throw std::runtime_error("no small pipe");
  }
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;
  ~Metrics() { close(fd_); }

  /// Whether there is room for more, so that no rank is in the midst of writing a line.
  bool has_room() const {
    int n_bytes = 0;
    if (ioctl(fd_, FIONREAD, &n_bytes) != 0) throw std::runtime_error("cannot ask the pipe");
    return n_bytes < 2048;
  }

  /// The next line.
  nlohmann::json next() {
    std::size_t end = 0;
    while ((end = buffer_.find('\n')) == std::string::npos) {
      pollfd ready{.fd = fd_, .events = POLLIN, .revents = 0};
      if (poll(&ready, 1, kWatchdogMs) != 1) throw std::runtime_error("no more metrics");
      char bytes[64];  // no reading ahead
      const ssize_t n = read(fd_, bytes, sizeof bytes);
      if (n <= 0) throw std::runtime_error("cannot read metrics");
      buffer_.append(bytes, static_cast<std::size_t>(n));
    }
    auto line = nlohmann::json::parse(buffer_.substr(0, end));
    buffer_.erase(0, end + 1);
    return line;
  }

 private:
  int fd_ = -1;
  std::string buffer_;
};

/// What a training told, by event.
struct Training {
  int exit_code = -1;
  std::vector<nlohmann::json> steps, epochs, generations;
  std::string errors;
};

/// Each step and each epoch once, with the same numbers.
void expect_the_same(const Training& training, const Training& expected, double rounding) {
  ASSERT_EQ(training.steps.size(), expected.steps.size());
  for (std::size_t i = 0; i < expected.steps.size(); ++i) {
    EXPECT_EQ(training.steps[i]["step"], expected.steps[i]["step"]);
    EXPECT_NEAR(training.steps[i]["loss"], expected.steps[i]["loss"], rounding) << "step " << i + 1;
  }
  ASSERT_EQ(training.epochs.size(), expected.epochs.size());
  for (std::size_t i = 0; i < expected.epochs.size(); ++i) {
    EXPECT_EQ(training.epochs[i]["epoch"], expected.epochs[i]["epoch"]);
    EXPECT_EQ(training.epochs[i]["step"], expected.epochs[i]["step"]);
    EXPECT_EQ(training.epochs[i]["test_accuracy"], expected.epochs[i]["test_accuracy"]);
    EXPECT_NEAR(training.epochs[i]["loss"], expected.epochs[i]["loss"], rounding);
  }
}

class RecoveryTest : public testing::Test {
 protected:
  using OnLine = std::function<void(const nlohmann::json& line, const Metrics& metrics)>;

  /// A training of two epochs; `launch` and `flags` are options of `lockstep run` and of
  /// lockstep-train. `on_line` gets each line of the metrics as it comes.
  Training train(const std::string& name, const std::string& launch, const std::string& flags,
                 const OnLine& on_line) {
    const std::string base = directory_ / name;
    Metrics metrics(base + ".jsonl");
    // Each rank notes its process's number, then becomes the training.
    const std::string command =
        std::string(LOCKSTEP_CLI) + " run " + launch + " -- sh -c 'echo $$ > " + base +
        ".pid-$RANK-$LOCKSTEP_RESTART; exec \"$@\"' sh " + LOCKSTEP_TRAIN + " --data " +
        LOCKSTEP_DIGITS + " --batch 8 --epochs 2 --threads 1 --metrics " + base + ".jsonl --save " +
        base + ".pt " + flags + " >" + base + ".out 2>" + base +
        ".err; status=$?; echo '{\"event\": \"end\"}' >" + base + ".jsonl; exit $status";
    auto status =
        std::async(std::launch::async, [command] { return std::system(command.c_str()); });
    Training training;
    for (auto line = metrics.next(); line["event"] != "end"; line = metrics.next()) {
      if (line["event"] == "steps") training.steps.push_back(line);
      if (line["event"] == "epoch") training.epochs.push_back(line);
      if (line["event"] == "generation") training.generations.push_back(line);
      on_line(line, metrics);
    }
    const int ended = status.get();
    training.exit_code = WIFEXITED(ended) ? WEXITSTATUS(ended) : -1;
    training.errors = contents_of(base + ".err");
    return training;
  }

  /// 0 if it has not begun yet. A rank has the number of its place: a replacement that of the rank
  /// that it replaces.
  pid_t pid_of(const std::string& name, int rank) const {
    const std::string pid =
        contents_of(directory_ / (name + ".pid-" + std::to_string(rank) + "-0"));
    return pid.empty() ? 0 : std::stoi(pid);
  }

  pid_t kill_rank(const std::string& name, int rank) const {
    const pid_t pid = pid_of(name, rank);
    EXPECT_GT(pid, 0);
    EXPECT_EQ(kill(pid, SIGKILL), 0);
    return pid;
  }

  /// While the training waits for its metrics to be read: until one of these places has another
  /// process, which waits for the others.
  void await_replacement(const std::string& name, const std::map<int, pid_t>& killed) const {
    EXPECT_TRUE(lockstep::test::wait_until([&] {
      return std::ranges::any_of(killed, [&](const auto& place) {
        const pid_t pid = pid_of(name, place.first);
        return pid != 0 && pid != place.second && lockstep::test::is_asleep(pid);
      });
    }));
  }

  double difference(const std::string& a, const std::string& b, const std::string& precision) {
    Options options;
    options.batch = 8;
    options.precision = precision;
    return compare(options, directory_ / a, directory_ / b).largest;
  }

  /// That this training went as on one rank that nothing disturbs: in shards to the last bit.
  void expect_one_rank(const std::string& name, const Training& training,
                       const std::string& flags = kF64) {
    EXPECT_EQ(training.exit_code, 0) << training.errors;
    const Training alone = train("alone", "-n 1", flags, [](const auto&...) {});
    EXPECT_EQ(alone.steps.size(), 2U * kStepsPerEpoch);
    const double rounding = flags == kF64 ? kRounding : 0;
    expect_the_same(training, alone, rounding);
    EXPECT_LE(difference("alone.pt", name + ".pt", flags == kInShards ? "f32" : "f64"), rounding);
  }

  /// Of four ranks one is killed in the first epoch, and one at its end, which is replaced.
  void kill_two_of_four(const std::string& flags);

  lockstep::test::TemporaryFolder directory_;
};

TEST_F(RecoveryTest, kill_9_in_an_epoch_changes_nothing) {
  const std::string launch = "-n 2 --max-restarts 1", flags = "--metrics-every 1";
  const Training straight = train("straight", launch, flags, [](const auto&...) {});
  ASSERT_EQ(straight.exit_code, 0) << straight.errors;
  ASSERT_EQ(straight.steps.size(), 2U * kStepsPerEpoch);

  // As a kill in a save leaves it.
  const auto part = directory_ / "disturbed.pt.part";
  std::ofstream(part) << "half of a checkpoint";
  bool killed = false;
  const auto kill_one = [&](const nlohmann::json& line, const Metrics&) {
    // In the second epoch: a page of metrics is less than half of one.
    if (killed || line["event"] != "steps" || line["step"] != kStepsPerEpoch + 1) return;
    killed = true;
    kill_rank("disturbed", /*rank=*/1);
  };
  const Training disturbed = train("disturbed", launch, flags, kill_one);
  ASSERT_TRUE(killed);
  EXPECT_EQ(disturbed.exit_code, 0) << disturbed.errors;
  EXPECT_NE(disturbed.errors.find("was killed by SIGKILL"), std::string::npos) << disturbed.errors;
  EXPECT_NE(disturbed.errors.find("restart 1 of 1: starting all 2 ranks again"), std::string::npos)
      << disturbed.errors;

  // The second start begins with the second epoch, and takes the very steps of the other training.
  int last = 0;
  int n_starts = 1;
  for (const auto& line : disturbed.steps) {
    const int step = line["step"];
    if (step != last + 1) {
      ++n_starts;
      EXPECT_GT(last, kStepsPerEpoch);
      EXPECT_EQ(step, kStepsPerEpoch + 1);
    }
    EXPECT_EQ(line, straight.steps.at(static_cast<std::size_t>(step) - 1));
    last = step;
  }
  EXPECT_EQ(n_starts, 2);
  EXPECT_EQ(last, 2 * kStepsPerEpoch);
  EXPECT_FALSE(std::filesystem::exists(part));
  EXPECT_EQ(difference("straight.pt", "disturbed.pt", "f32"), 0);
}

void RecoveryTest::kill_two_of_four(const std::string& flags) {
  std::map<int, pid_t> killed;
  const auto kill_two = [&](const nlohmann::json& line, const Metrics& metrics) {
    const bool is_epoch = line["event"] == "epoch";
    if ((!is_epoch && line["event"] != "steps") || !metrics.has_room()) return;
    if (killed.empty() && line["step"] >= 40) {
      killed[2] = kill_rank("elastic", 2);
    } else if (killed.size() == 1 && line["step"] >= kStepsPerEpoch + (is_epoch ? 0 : 1)) {
      killed[0] = kill_rank("elastic", 0);  // it saves, or has begun the next epoch
      await_replacement("elastic", killed);
    }
  };
  const Training elastic = train("elastic", "-n 4 --elastic 2:3", flags, kill_two);
  ASSERT_EQ(killed.size(), 2U);
  ASSERT_GE(elastic.generations.size(), 2U) << elastic.errors;
  EXPECT_EQ(elastic.generations.front()["ranks"], 3);
  EXPECT_EQ(elastic.generations.back()["ranks"], 3);
  EXPECT_NE(elastic.errors.find(" again"), std::string::npos) << elastic.errors;
  expect_one_rank("elastic", elastic, flags);
}

TEST_F(RecoveryTest, elastic_ranks_of_which_two_are_killed_and_one_is_replaced_are_one_rank) {
  kill_two_of_four(kF64);
}

TEST_F(RecoveryTest, in_shards_they_have_its_bits) { kill_two_of_four(kInShards); }

TEST_F(RecoveryTest, in_shards_twenty_kills_leave_its_bits) {
  constexpr int kKills = 20, kStepsBetween = 15;
  int n_killed = 0;
  const auto kill_in_turn = [&](const nlohmann::json& line, const Metrics& metrics) {
    if (line["event"] != "steps" || line["step"] < kStepsBetween * (n_killed + 1)) return;
    if (n_killed == kKills || !metrics.has_room()) return;
    const int rank = n_killed++ % 4;
    await_replacement("elastic", {{rank, kill_rank("elastic", rank)}});
  };
  const Training elastic = train("elastic", "-n 4 --elastic 1:4", kInShards, kill_in_turn);
  EXPECT_EQ(n_killed, kKills) << elastic.errors;
  EXPECT_NE(elastic.errors.find("generation 20: "), std::string::npos) << elastic.errors;
  EXPECT_EQ(elastic.exit_code, 0) << elastic.errors;
  const Training alone = train("alone", "-n 1", kInShards, [](const auto&...) {});
  // A rank that is killed between a step and its line takes the line with it.
  int last = 0;
  for (const nlohmann::json& line : elastic.steps) {
    EXPECT_GT(line["step"], last);
    last = line["step"];
    EXPECT_EQ(line["loss"], alone.steps.at(static_cast<std::size_t>(last) - 1)["loss"]);
  }
  EXPECT_GT(elastic.steps.size(), alone.steps.size() - kKills);
  EXPECT_EQ(difference("alone.pt", "elastic.pt", "f32"), 0);
}

TEST_F(RecoveryTest, elastic_replacement_becomes_rank_0) {
  std::map<int, pid_t> killed;
  bool has_joined = false;
  const auto kill_rank_0 = [&](const nlohmann::json& line, const Metrics& metrics) {
    has_joined = has_joined || (line["event"] == "generation" && line["ranks"] == 2);
    if (line["event"] != "steps" || !metrics.has_room()) return;
    if (killed.empty() && line["step"] >= 40) {
      killed[0] = kill_rank("elastic", 0);
      await_replacement("elastic", killed);
    } else if (killed.size() == 1 && has_joined) {
      killed[1] = kill_rank("elastic", 1);
    }
  };
  const Training elastic = train("elastic", "-n 2 --elastic 1", kF64, kill_rank_0);
  ASSERT_EQ(killed.size(), 2U) << elastic.errors;
  expect_one_rank("elastic", elastic);
}

}  // namespace
}  // namespace train
