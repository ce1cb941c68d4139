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

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/boot_clock.hpp"
#include "engines/shared/bootstrap/job.hpp"
#include "helpers.hpp"
#include "support/expect.hpp"
#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"

namespace {

/// Set in a process that shall stand still inside its first long write.
bool stops_in_a_long_write = false;
std::chrono::milliseconds time_per_mib{0};
constexpr std::size_t kLongWrite = 50'000;

}  // namespace

/// In place of libc's, which does the same otherwise.
extern "C" ssize_t write(int fd, const void* data, std::size_t n_bytes) {
  if (stops_in_a_long_write && n_bytes > kLongWrite) {
    ::syscall(SYS_write, fd, data, kLongWrite);
    for (;;) ::pause();
  }
  std::this_thread::sleep_for(time_per_mib * (n_bytes >> 20U));
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
  std::string path(const std::string& name) const { return folder_ / name; }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

 private:
  test::TemporaryFolder folder_;
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

TEST_F(CheckpointTest, non_regular_file_is_not_replaced) {
  const std::string fifo = path("fifo");
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  on_ranks(2, [&](int) {
    const std::string text = usage_error([&] {
      save_checkpoint(fifo, [](auto& archive) { archive.write("value", at::ones({1})); });
    });
    test::expect_contains(text, "replace (not a regular file) " + fifo);
  });
  EXPECT_TRUE(std::filesystem::is_fifo(fifo));
  EXPECT_EQ(files(), std::vector<std::string>{"fifo"});
}

// The others of the job may have gone on, and written a newer one.
TEST_F(CheckpointTest, is_not_replaced_by_a_host_without_a_lease) {
  const std::string file = path("training.pt");
  shared::Job job(1, {}, /*is_elastic=*/true);
  const pid_t child = ::fork();
  if (child == 0) {
    for (const char* name : {"RANK", "LOCAL_RANK"}) ::setenv(name, "0", 1);
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) ::setenv(name, "1", 1);
    ::setenv("LOCKSTEP_SEGMENT", job.environment().c_str(), 1);
    init_dist();
    const auto save = [&] {
      save_checkpoint(file, [](auto& archive) { archive.write("value", at::ones({1})); });
    };
    save();
    const auto written = std::filesystem::last_write_time(file);
    job.set_lease(base::BootClock::now());
    test::expect_contains(test::thrown<Error>(save),
                          "the launcher of this host hears nothing from node 0");
    EXPECT_EQ(std::filesystem::last_write_time(file), written);
    EXPECT_EQ(files(), std::vector<std::string>{"training.pt"});
    ::_exit(HasFailure() ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
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
    test::expect_contains(test::thrown<UsageError>([&] { load_checkpoint(file, read); }),
                          file + " is damaged");
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
    test::expect_contains(test::thrown<UsageError>([&] {
                            load_training(file, {resumed.optimizer, resumed.net, resumed.epoch});
                          }),
                          "has a module, an optimizer, an object, a number, a number, "
                          "expected an optimizer, a module, a number");
    DistributedDataParallel model(resumed.net);
    save_training(file, {model, *resumed.net, resumed.net});
    load_training(file, {model, *resumed.net, resumed.net});
  });
}

using torch::nn::Linear;

/// Two layers and an optimizer that has momenta.
struct TwoLayers {
  torch::nn::Sequential net{Linear(4, 8), torch::nn::ReLU(), Linear(8, 2)};
  torch::optim::SGD optimizer{net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};
  TwoLayers() { step(); }
  void step() {
    optimizer.zero_grad();
    net->forward(torch::ones({2, 4})).sum().backward();
    optimizer.step();
  }
};

/// Every value in the archive, as text.
void collect_values(torch::serialize::InputArchive& archive, const std::string& prefix,
                    std::map<std::string, std::string>& values) {
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    torch::serialize::InputArchive child;
    std::ostringstream text;
    if (archive.try_read(key, child)) {
      collect_values(child, prefix + "." + key, values);
    } else if (archive.try_read(key, value)) {
      text << value;
      values[prefix + "." + key] = text.str();
    }
  }
}

/// Loads into the parts, and returns what the UsageError says. Expects that it names this file,
/// that nothing is changed, and that all ranks get it.
std::string refusal_of(const std::string& file, std::initializer_list<TrainingPart> parts) {
  const auto saved = [&] {
    std::map<std::string, std::string> values;
    for (const TrainingPart& part : parts) {
      torch::serialize::OutputArchive archive;
      part.save(archive);
      std::stringstream stream;
      archive.save_to(stream);
      torch::serialize::InputArchive all;
      all.load_from(stream);
      collect_values(all, std::to_string(values.size()), values);
    }
    return values;
  };
  const auto before = saved();
  std::string text = "no error";
  try {
    load_training(file, parts);
  } catch (const UsageError& error) {
    text = error.text();
    test::expect_contains(error.context().where.file_name(), "checkpoint_test.cpp");
    EXPECT_EQ(error.context().operation, "load_training");
  }
  EXPECT_TRUE(saved() == before) << text;
  for (const char* raw : {"INTERNAL ASSERT", "frame #", "report a bug"}) {
    EXPECT_EQ(text.find(raw), std::string::npos) << text;
  }
  barrier();
  return text;
}

TEST_F(CheckpointTest, another_architecture_is_refused_and_nothing_is_changed) {
  const std::string file = path("training.pt");
  on_ranks(2, [&](int) {
    TwoLayers training;
    save_training(file, {training.net});
    const auto load = [&](auto... layers) {
      torch::nn::Sequential other(layers...);
      return refusal_of(file, {other});
    };
    test::expect_contains(load(Linear(4, 9), torch::nn::ReLU(), Linear(9, 2)),
                          {"'0.weight'", "[8, 4]", "[9, 4]", "part 0, a module"});
    test::expect_contains(load(Linear(4, 8), torch::nn::ReLU(), Linear(8, 3)),
                          {"'2.weight'", "[2, 8]", "[3, 8]"});
    test::expect_contains(load(Linear(4, 8)),
                          {"the file has '2.bias', Float [2], which this module does not have"});
    test::expect_contains(load(Linear(4, 8), torch::nn::ReLU(), Linear(8, 2), Linear(2, 1)),
                          {"does not have '3.weight'", "[1, 2]"});
    torch::nn::Sequential doubles(Linear(4, 8), torch::nn::ReLU(), Linear(8, 2));
    doubles->to(torch::kDouble);
    test::expect_contains(refusal_of(file, {doubles}), {"'0.weight'", "Float", "Double"});
    load_training(file, {training.net});
  });
}

TEST_F(CheckpointTest, another_optimizer_is_refused_and_nothing_is_changed) {
  const std::string file = path("training.pt");
  const std::string alone = path("optimizer.pt");
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  on_ranks(2, [&](int) {
    TwoLayers training;
    save_training(file, {training.net, training.optimizer});
    save_training(alone, {training.optimizer});
    TwoLayers other;
    auto parameters = other.net->parameters();
    std::reverse(parameters.begin(), parameters.end());
    torch::optim::SGD reversed(parameters, options);
    test::expect_contains(refusal_of(file, {other.net, reversed}),
                          {"part 1, an optimizer", "parameter 0",
                           "'0.weight' of part 0, Float [8, 4]", "'2.bias' of part 0, Float [2]"});
    test::expect_contains(refusal_of(alone, {reversed}), {"part 0, an optimizer", "[8, 4]", "[2]"});
    torch::optim::SGD fewer({parameters[0]}, options);
    test::expect_contains(refusal_of(file, {other.net, fewer}), {"4 parameters", "expected 1"});
    const auto in_order = other.net->parameters();
    torch::optim::SGD two_groups({in_order[0]}, options);
    two_groups.add_param_group({{in_order[1], in_order[2], in_order[3]}});
    test::expect_contains(refusal_of(file, {other.net, two_groups}), {"parameter group"});
    torch::optim::Adam adam(other.net->parameters(), torch::optim::AdamOptions(0.1));
    test::expect_contains(refusal_of(file, {other.net, adam}), {"momentum", "betas"});

    // Of the same values, what comes next is the same.
    load_training(file, {training.net, training.optimizer});
    load_training(file, {other.net, other.optimizer});
    training.step();
    other.step();
    for (const auto& item : training.net->named_parameters()) {
      EXPECT_TRUE(item->equal(other.net->named_parameters()[item.key()])) << item.key();
    }
  });
}

/// As 0.1.0 saved it: without the parameters' names and shapes.
TEST_F(CheckpointTest, an_older_file_of_another_order_is_refused) {
  const std::string file = path("training.pt");
  TwoLayers training;
  save_checkpoint(file, [&](torch::serialize::OutputArchive& archive) {
    torch::serialize::OutputArchive part;
    detail::save_optimizer(training.optimizer, part);
    archive.write("part_0", part);
    archive.write("kinds", c10::IValue("o"));
  });
  TwoLayers other;
  auto parameters = other.net->parameters();
  std::reverse(parameters.begin(), parameters.end());
  torch::optim::SGD reversed(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  test::expect_contains(refusal_of(file, {reversed}),
                        {"momentum_buffer of parameter 0", "Float [8, 4]", "Float [2]"});
  load_training(file, {other.optimizer});
}

/// A part that changes before it fails.
struct Fragile {
  std::int64_t value = 1;
  bool fails = false;
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("value", c10::IValue(value));
  }
  void load(torch::serialize::InputArchive& archive) {
    c10::IValue saved;
    archive.read("value", saved);
    value = saved.toInt();
    if (std::exchange(fails, false)) throw std::runtime_error("too fragile");
  }
};

TEST_F(CheckpointTest, what_fails_last_changes_nothing_on_any_rank) {
  const std::string file = path("training.pt");
  on_ranks(2, [&](int rank) {
    TwoLayers training;
    Fragile fragile{.value = 7};
    int epoch = 3;
    save_training(file, {training.net, training.optimizer, epoch, fragile});
    TwoLayers other;
    Fragile mine{.fails = rank == 1};
    int mine_epoch = 1;
    test::expect_contains(refusal_of(file, {other.net, other.optimizer, mine_epoch, mine}),
                          {"rank 1", "part 3, an object", "too fragile"});
    load_training(file, {other.net, other.optimizer, mine_epoch, mine});
    EXPECT_EQ(mine.value, 7);
    EXPECT_EQ(mine_epoch, 3);

    // Nor does a rank whose net is another.
    torch::nn::Sequential wider(Linear(4, 9), torch::nn::ReLU(), Linear(9, 2));
    save_training(file, {training.net});
    test::expect_contains(rank == 0 ? refusal_of(file, {training.net}) : refusal_of(file, {wider}),
                          {"rank 1", "'0.weight'", "[8, 4]", "[9, 4]"});
  });
}

template <class From, class To>
std::string load_number_as(const std::string& file, From from, To to) {
  save_training(file, {from});
  return refusal_of(file, {to});
}
template <class From, class To>
void expect_loads_as(const std::string& file, From from, To expected) {
  save_training(file, {from});
  To got{};
  load_training(file, {got});
  EXPECT_EQ(got, expected);
}

TEST_F(CheckpointTest, a_number_that_does_not_fit_is_refused) {
  const std::string file = path("number.pt");
  constexpr auto kLarge = std::numeric_limits<std::uint64_t>::max() - 5;
  test::expect_contains(load_number_as(file, std::int64_t{5'000'000'000}, 3),
                        {"5000000000", "int", "2147483647", "part 0, a number"});
  test::expect_contains(load_number_as(file, 200, std::int8_t{0}), {"200", "127"});
  test::expect_contains(load_number_as(file, -1, std::size_t{0}), {"-1"});
  test::expect_contains(load_number_as(file, kLarge, std::int64_t{0}), {"18446744073709551610"});
  test::expect_contains(load_number_as(file, 2, false), {"2"});
  test::expect_contains(load_number_as(file, 0.5, 3), {"0.5"});
  test::expect_contains(load_number_as(file, 0.1, 3.F), {"0.1"});
  test::expect_contains(load_number_as(file, 1e300, 3.F), {"1e+300"});
  test::expect_contains(load_number_as(file, std::int64_t{1} << 60 | 1, 3.),
                        {"1152921504606846977"});
  expect_loads_as(file, kLarge, kLarge);
  expect_loads_as(file, std::int64_t{-5'000'000'000}, std::int64_t{-5'000'000'000});
  expect_loads_as(file, true, true);
  expect_loads_as(file, 3, 3.0);
  expect_loads_as(file, 0.25F, 0.25);
  expect_loads_as(file, 0.25, 0.25F);
}

TEST_F(CheckpointTest, a_byte_that_changed_anywhere_is_reported) {
  const std::string file = path("training.pt");
  TwoLayers training;
  save_training(file, {training.net, training.optimizer});
  std::string good(std::filesystem::file_size(file), 0);
  std::ifstream(file, std::ios::binary).read(good.data(), static_cast<long>(good.size()));
  const std::size_t end = good.rfind("lockstep");  // what tells that a checksum follows
  ASSERT_NE(end, std::string::npos);
  for (std::size_t at = 0; at < end; at += end / 97) {
    std::string bytes = good;
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    std::ofstream(file, std::ios::binary) << bytes;
    test::expect_contains(refusal_of(file, {training.net, training.optimizer}),
                          {"training.pt is damaged"});
  }
}

TEST_F(CheckpointTest, a_part_of_another_type_is_refused) {
  const std::string file = path("training.pt");
  TwoLayers training;
  int epoch = 3;
  const std::vector<std::string> keys = {"kinds", "part_0", "part_1", "part_2"};
  const auto save_with = [&](const std::string& key, const c10::IValue& value) {
    save_checkpoint(file, [&](torch::serialize::OutputArchive& archive) {
      std::size_t i = 1;
      for (const TrainingPart& part :
           {TrainingPart(training.net), TrainingPart(training.optimizer), TrainingPart(epoch)}) {
        torch::serialize::OutputArchive saved;
        part.save(saved);
        if (keys[i] != key) archive.write(keys[i], saved);
        ++i;
      }
      if (key != "kinds") archive.write("kinds", c10::IValue("mon"));
      if (!value.isNone()) archive.write(key, value);
    });
  };
  save_with("", {});
  load_training(file, {training.net, training.optimizer, epoch});
  for (const std::string& key : keys) {
    for (const c10::IValue& value : std::vector<c10::IValue>{
             {}, 1, 0.5, "text", true, at::ones({2}), c10::List<std::int64_t>()}) {
      save_with(key, value);
      test::expect_contains(refusal_of(file, {training.net, training.optimizer, epoch}),
                            {"cannot load"});
    }
  }
}

TEST_F(CheckpointTest, a_callback_of_load_checkpoint_fails_as_a_usage_error) {
  const std::string file = path("training.pt");
  save_checkpoint(file, [](auto& archive) { archive.write("value", at::ones({1})); });
  const std::string text = usage_error([&] {
    load_checkpoint(file, [](auto& archive) {
      Tensor tensor;
      archive.read("other", tensor);
    });
  });
  test::expect_contains(text, {file, "other"});
  EXPECT_EQ(text.find("frame #"), std::string::npos) << text;
}

TEST_F(CheckpointTest, only_a_regular_file_is_read) {
  const std::string fifo = path("fifo");
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  std::filesystem::create_directory(path("folder"));
  on_ranks(2, [&](int) {
    int epoch = 0;
    test::expect_contains(refusal_of(fifo, {epoch}), {"fifo", "not a regular file"});
    test::expect_contains(refusal_of(path("folder"), {epoch}), {"folder", "not a regular file"});
    test::expect_contains(refusal_of(path("none"), {epoch}), {"none", "No such file"});
  });
}

TEST_F(CheckpointTest, a_link_stays_one) {
  std::filesystem::create_directory(path("runs"));
  std::filesystem::create_symlink("runs/3.pt", path("latest.pt"));
  int epoch = 3;
  for (int i = 0; i < 2; ++i) {  // the target is made, then replaced
    save_training(path("latest.pt"), {epoch});
    EXPECT_TRUE(std::filesystem::is_symlink(path("latest.pt")));
    EXPECT_TRUE(std::filesystem::is_regular_file(path("runs/3.pt")));
    epoch = 4;
  }
  int loaded = 0;
  load_training(path("runs/3.pt"), {loaded});
  EXPECT_EQ(loaded, 4);
}

TEST_F(CheckpointTest, a_path_with_a_nul_is_refused) {
  std::string file = path("training.pt");
  file += '\0';
  file += "more";
  int epoch = 3;
  test::expect_contains(usage_error([&] { save_training(file, {epoch}); }), {"NUL"});
  test::expect_contains(refusal_of(file, {epoch}), {"NUL"});
  EXPECT_EQ(files(), std::vector<std::string>{});
}

/// 72 MiB take longer to write than an operation may.
TEST_F(CheckpointTest, peers_wait_as_long_as_rank_0_writes) {
  const std::string file = path("training.pt");
  time_per_mib = std::chrono::milliseconds(70);
  run_ranks(
      2, [&](int) { save_checkpoint(file, [](auto& archive) { write_zeros(archive, 18 << 20); }); },
      {.timeout = std::chrono::seconds(4)});
  time_per_mib = {};
  EXPECT_EQ(n_zeros_in(file), 18 << 20);
}

}  // namespace
}  // namespace lockstep::nn
