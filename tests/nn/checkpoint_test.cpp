#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/checkpoint.hpp>
#include <lockstep/nn/convert.hpp>
#include <lockstep/nn/distributed_data_parallel.hpp>
#include <lockstep/nn/distributed_sampler.hpp>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "helpers.hpp"
#include "support/waiting.hpp"

namespace {

/// Set in a process that shall stand still inside its first long write.
bool stops_in_a_long_write = false;
constexpr std::size_t kLongWrite = 50'000;

}  // namespace

/// In place of libc's, which does the same otherwise.
extern "C" ssize_t write(int fd, const void* data, std::size_t n_bytes) {
  if (stops_in_a_long_write && n_bytes > kLongWrite) {
    ::syscall(SYS_write, fd, data, kLongWrite);
    for (;;) ::pause();
  }
  return ::syscall(SYS_write, fd, data, n_bytes);
}

namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::on_ranks;
using testing::Random;
using testing::usage_error;

/// A folder of its own for each test, gone after it.
class CheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "checkpoint-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

 private:
  std::filesystem::path folder_;
};

struct Training {
  torch::nn::Sequential net{torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4),
                            torch::nn::Linear(4, 2)};
  torch::optim::SGD optimizer{net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};
  Training() { convert_sync_batchnorm(net); }

  void step(int i) {
    DistributedDataParallel model(net);
    const auto seed = static_cast<std::uint64_t>(10 * i + get_rank());
    optimizer.zero_grad();
    model(Random(seed).normal({3, 3}, at::kFloat)).square().mean().backward();
    optimizer.step();
  }
  void save(torch::serialize::OutputArchive& archive) const {
    torch::serialize::OutputArchive of_net, of_optimizer;
    net->save(of_net);
    optimizer.save(of_optimizer);
    archive.write("net", of_net);
    archive.write("optimizer", of_optimizer);
  }
  void load(torch::serialize::InputArchive& archive) {
    torch::serialize::InputArchive of_net, of_optimizer;
    archive.read("net", of_net);
    archive.read("optimizer", of_optimizer);
    net->load(of_net);
    optimizer.load(of_optimizer);
  }
};

TEST_F(CheckpointTest, resumes_with_the_same_next_step) {
  const std::string file = path("training.pt");
  on_ranks(3, [&](int rank) {
    Training training;
    for (int i = 0; i < 3; ++i) training.step(i);
    save_checkpoint(file, [&](auto& archive) { training.save(archive); });
    EXPECT_TRUE(std::filesystem::exists(file)) << "on every rank";
    training.step(3);

    Training resumed;  // other parameters
    load_checkpoint(rank == 0 ? file : "no such file here",
                    [&](auto& archive) { resumed.load(archive); });
    resumed.step(3);
    for (const auto& item : training.net->named_parameters()) {
      EXPECT_TRUE(item->equal(resumed.net->named_parameters()[item.key()])) << item.key();
    }
    for (const auto& item : training.net->named_buffers()) {
      EXPECT_TRUE(item->equal(resumed.net->named_buffers()[item.key()])) << item.key();
    }
  });
  EXPECT_EQ(files(), std::vector<std::string>{"training.pt"});
}

void write_zeros(torch::serialize::OutputArchive& archive, std::int64_t n) {
  archive.write("zeros", at::zeros({n}));
}
std::int64_t n_zeros_in(const std::string& path) {
  Tensor zeros;
  load_checkpoint(path, [&](auto& archive) { archive.read("zeros", zeros); });
  return zeros.numel();
}

TEST_F(CheckpointTest, a_kill_in_the_middle_leaves_the_old_one_whole) {
  const std::string file = path("training.pt");
  const auto save = [&](std::int64_t n) {
    save_checkpoint(file, [n](auto& archive) { write_zeros(archive, n); });
  };
  save(1000);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);  // the watchdog
    stops_in_a_long_write = true;
    save(25'000);  // 100 kB
    ::_exit(0);
  }
  const std::string part = path("training.pt.part");
  const auto is_inside = [&] {
    std::error_code none;
    return std::filesystem::file_size(part, none) == kLongWrite;
  };
  EXPECT_TRUE(test::wait_until(is_inside, std::chrono::seconds(60)));
  ::kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  EXPECT_EQ(std::filesystem::file_size(part), kLongWrite);
  EXPECT_EQ(n_zeros_in(file), 1000);
  save(2000);  // the rest of the file does not matter
  EXPECT_EQ(n_zeros_in(file), 2000);
  EXPECT_EQ(files(), std::vector<std::string>{"training.pt"});
}

TEST_F(CheckpointTest, a_failure_reaches_every_rank_and_changes_nothing) {
  const std::string file = path("training.pt");
  const auto number = [](double value) {
    return [value](torch::serialize::OutputArchive& archive) {
      archive.write("number", at::full({}, value));
    };
  };
  const auto read = [](torch::serialize::InputArchive& archive) {
    Tensor value = at::zeros({});
    archive.read("number", value);
    EXPECT_EQ(value.item<double>(), 7);
  };
  on_ranks(2, [&](int) {
    save_checkpoint(file, number(7));
    try {
      save_checkpoint(file, [](auto&) { throw std::runtime_error("no more ink"); });
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_EQ(error.text(), "rank 0 failed: no more ink");
    }
    EXPECT_THROW(save_checkpoint(path("no/such/folder.pt"), number(8)), UsageError);
    EXPECT_THROW(save_checkpoint(path(""), number(8)), UsageError);
    EXPECT_THROW(load_checkpoint(path("missing.pt"), read), UsageError);
    load_checkpoint(file, read);  // as it was, and the group too
  });
  EXPECT_EQ(files(), std::vector<std::string>{"training.pt"});
  std::ofstream(path("text.pt")) << "hello";
  on_ranks(2, [&](int) { EXPECT_THROW(load_checkpoint(path("text.pt"), read), UsageError); });
}

TEST_F(CheckpointTest, what_is_no_regular_file_is_not_replaced) {
  const std::string fifo = path("fifo");
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  on_ranks(2, [&](int) {
    const std::string text = usage_error([&] {
      save_checkpoint(fifo, [](auto& archive) { archive.write("value", at::ones({1})); });
    });
    EXPECT_NE(text.find("replace what is no regular file: " + fifo), std::string::npos) << text;
  });
  EXPECT_TRUE(std::filesystem::is_fifo(fifo));
  EXPECT_EQ(files(), std::vector<std::string>{"fifo"});
}

/// Inside a tensor, where libtorch does not look.
TEST_F(CheckpointTest, a_damaged_tensor_is_reported_on_every_rank) {
  const std::string file = path("training.pt");
  const auto value = at::full({4096}, 7, at::kFloat);
  const auto read = [](torch::serialize::InputArchive& archive) {
    Tensor got = at::zeros({4096});
    archive.read("value", got);
    EXPECT_TRUE(got.eq(7).all().item<bool>());
  };
  save_checkpoint(file, [&](auto& archive) { archive.write("value", value); });
  load_checkpoint(file, read);
  torch::serialize::InputArchive archive;
  archive.load_from(file);  // libtorch's own reader
  read(archive);
  {
    std::string bytes(std::filesystem::file_size(file), 0);
    std::ifstream(file, std::ios::binary).read(bytes.data(), static_cast<long>(bytes.size()));
    const std::string sevens(reinterpret_cast<const char*>(value.data_ptr()), 64);
    const std::size_t at = bytes.find(sevens);
    ASSERT_NE(at, std::string::npos);
    for (std::size_t i = 0; i < 64; ++i) bytes[at + i] = static_cast<char>(~bytes[at + i]);
    std::ofstream(file, std::ios::binary) << bytes;
  }
  on_ranks(2, [&](int) {
    try {
      load_checkpoint(file, read);
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_NE(error.text().find(file + " is damaged"), std::string::npos) << error.text();
    }
    barrier();
  });
}

struct WholeTraining {
  torch::nn::Sequential net{torch::nn::Linear(3, 4), torch::nn::Linear(4, 2)};
  torch::optim::Adam optimizer{net->parameters(), torch::optim::AdamOptions(0.1)};
  DistributedSampler sampler{20};
  int epoch = 0;
  double best = 0;

  void run_epoch() {
    DistributedDataParallel model(net);
    sampler.reset();
    while (const auto batch = sampler.next(5)) {
      const auto seed = static_cast<std::uint64_t>(batch->front());
      optimizer.zero_grad();
      model(Random(seed).normal({3, 3}, at::kFloat)).square().mean().backward();
      optimizer.step();
    }
    auto& options = optimizer.param_groups()[0].options();
    options.set_lr(options.get_lr() / 2);
    ++epoch;
    best += 0.25;
  }
};

TEST_F(CheckpointTest, a_training_goes_on_with_the_same_bits) {
  const std::string file = path("training.pt");
  on_ranks(2, [&](int) {
    WholeTraining training, resumed;
    training.run_epoch();
    save_training(
        file, {training.net, training.optimizer, training.sampler, training.epoch, training.best});
    training.run_epoch();
    load_training(file,
                  {resumed.net, resumed.optimizer, resumed.sampler, resumed.epoch, resumed.best});
    EXPECT_EQ(resumed.epoch, 1);
    EXPECT_EQ(resumed.best, 0.25);
    resumed.run_epoch();
    for (const auto& item : training.net->named_parameters()) {
      EXPECT_TRUE(item->equal(resumed.net->named_parameters()[item.key()])) << item.key();
    }
    EXPECT_EQ(resumed.optimizer.param_groups()[0].options().get_lr(), 0.025);
    try {
      load_training(file, {resumed.optimizer, resumed.net, resumed.epoch});
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_NE(error.text().find("has a module, an optimizer, an object, a number, a number, "
                                  "expected an optimizer, a module, a number"),
                std::string::npos)
          << error.text();
    }
    DistributedDataParallel model(resumed.net);
    save_training(file, {model, *resumed.net, resumed.net});
    load_training(file, {model, *resumed.net, resumed.net});
  });
}

}  // namespace
}  // namespace lockstep::nn
