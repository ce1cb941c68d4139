#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "temporary_directory.hpp"
#include "train/data.hpp"
#include "train/train.hpp"

namespace train {
namespace {

constexpr int kStepsPerEpoch = 180;  // 1440 digits, 8 a step
constexpr int kWatchdogMs = 120'000;

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

/// What a training of 2 epochs over 2 processes told, and saved.
struct Training {
  int exit_code = -1;
  std::vector<nlohmann::json> steps;
  std::string errors;
};

class RecoveryTest : public testing::Test {
 protected:
  /// `on_line` gets each line of the metrics as it comes.
  Training train(const std::string& name,
                 const std::function<void(const nlohmann::json&)>& on_line) {
    const std::string base = (directory_ / name).string();
    Metrics metrics(base + ".jsonl");
    // Each rank notes its process's number, then becomes the training.
    const std::string command =
        std::string(LOCKSTEP_CLI) + " run -n 2 --max-restarts 1 -- sh -c 'echo $$ > " + base +
        ".pid-$RANK-$LOCKSTEP_RESTART; exec \"$@\"' sh " + LOCKSTEP_TRAIN + " --data " +
        LOCKSTEP_DIGITS + " --batch 8 --epochs 2 --threads 1 --metrics-every 1 --metrics " + base +
        ".jsonl --save " + base + ".pt >" + base + ".out 2>" + base + ".err";
    auto status =
        std::async(std::launch::async, [command] { return std::system(command.c_str()); });
    Training training;
    for (nlohmann::json line; line["event"] != "summary";) {
      line = metrics.next();
      if (line["event"] == "steps") training.steps.push_back(line);
      on_line(line);
    }
    const int ended = status.get();
    training.exit_code = WIFEXITED(ended) ? WEXITSTATUS(ended) : -1;
    training.errors = contents_of(base + ".err");
    return training;
  }

  void kill_rank(const std::string& name, int rank) {
    const std::string pid =
        contents_of(directory_ / (name + ".pid-" + std::to_string(rank) + "-0"));
    ASSERT_FALSE(pid.empty());
    ASSERT_EQ(kill(std::stoi(pid), SIGKILL), 0);
  }

  TemporaryDirectory directory_;
};

TEST_F(RecoveryTest, kill_9_in_an_epoch_changes_nothing) {
  const Training straight = train("straight", [](const nlohmann::json&) {});
  ASSERT_EQ(straight.exit_code, 0) << straight.errors;
  ASSERT_EQ(straight.steps.size(), 2U * kStepsPerEpoch);

  // As a kill in a save leaves it.
  const auto part = directory_ / "disturbed.pt.part";
  std::ofstream(part) << "half of a checkpoint";
  bool killed = false;
  const Training disturbed = train("disturbed", [&](const nlohmann::json& line) {
    // In the second epoch: a page of metrics is less than half of one.
    if (killed || line["event"] != "steps" || line["step"] != kStepsPerEpoch + 1) return;
    killed = true;
    kill_rank("disturbed", /*rank=*/1);
  });
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
  Options options;
  options.batch = 8;
  const Dataset digits = read_dataset(LOCKSTEP_DIGITS);
  EXPECT_EQ(
      compare(options, digits, directory_ / "straight.pt", directory_ / "disturbed.pt").largest, 0);
}

}  // namespace
}  // namespace train
