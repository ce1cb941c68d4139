#include "train/checkpoint.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <lockstep/nn/checkpoint.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "temporary_directory.hpp"

namespace train {
namespace {

using torch::serialize::OutputArchive;

const std::vector<std::string> kKeys = {"network", "optimizer", "model", "precision",
                                        "seed",    "batch",     "step",  "epoch_loss_sum"};

class CheckpointTest : public testing::Test {
 protected:
  Position load() { return load_checkpoint(path_, *model_, optimizer_, usual_); }

  /// What load says of the file: a sentence about it, with nothing of libtorch's backtrace.
  std::string refusal() {
    try {
      load();
      return "no error";
    } catch (const std::runtime_error& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.rfind("cannot load " + path_.string() + ": ", 0), 0U) << text;
      EXPECT_EQ(text.find("frame #"), std::string::npos) << text;
      return text;
    }
  }

  /// A checkpoint in which `value` stands at `key`; nothing does where it is none.
  void write_other(const std::string& key, const c10::IValue& value) {
    OutputArchive archive;
    const auto write = [&](const std::string& name, const c10::IValue& usual) {
      if (name != key) archive.write(name, usual);
    };
    OutputArchive network(archive.compilation_unit());
    model_->save(network);
    if (key != "network") archive.write("network", network);
    OutputArchive momenta(archive.compilation_unit());
    optimizer_.save(momenta);
    if (key != "optimizer") archive.write("optimizer", momenta);
    write("model", usual_.model);
    write("precision", usual_.precision);
    write("seed", 7);
    write("batch", 8);
    write("step", 9);
    write("epoch_loss_sum", 0.5);
    if (!value.isNone()) archive.write(key, value);
    archive.save_to(path_.string());
  }

  TemporaryDirectory directory_;
  std::filesystem::path path_ = directory_ / "checkpoint.pt";
  Position usual_{.model = "convnet",
                  .precision = "f32",
                  .seed = 7,
                  .batch = 8,
                  .step = 9,
                  .epoch_loss_sum = 0.5};
  torch::nn::Sequential model_{torch::nn::Linear(2, 1), torch::nn::BatchNorm1d(1)};
  torch::optim::SGD optimizer_{model_->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};
};

TEST_F(CheckpointTest, counts_that_none_can_be) {
  write_other("seed", 7);
  EXPECT_EQ(load().step, 9U);
  write_other("step", -3);
  EXPECT_NE(refusal().find("its step is -3, expected 0 to"), std::string::npos);
  write_other("step", std::int64_t{1} << 62);
  EXPECT_NE(refusal().find("its step is 4611686018427387904"), std::string::npos);
  write_other("batch", 0);
  EXPECT_NE(refusal().find("its batch is 0, expected 1 to"), std::string::npos);
}

TEST_F(CheckpointTest, other_types_in_the_header) {
  const std::vector<c10::IValue> values = {
      {}, 1, 0.5, "text", true, torch::ones({2}), c10::List<std::int64_t>()};
  int n_refused = 0;
  for (const std::string& key : kKeys) {
    for (const c10::IValue& value : values) {
      write_other(key, value);
      if (refusal() != "no error") ++n_refused;
    }
  }
  // Not: the 0.5, which one of the numbers is, and the 1, which seed, batch and step may be.
  EXPECT_EQ(n_refused, static_cast<int>(kKeys.size() * values.size()) - 4);
}

TEST_F(CheckpointTest, data_that_changed_in_the_file) {
  const auto fill = [&](float first) {
    float value = first;
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& tensor : model_->parameters()) tensor.fill_(value += 1);
    for (torch::Tensor& tensor : model_->buffers()) {
      if (tensor.is_floating_point()) tensor.fill_(value += 1);
    }
    return value;
  };
  const float n_values = fill(1000.5F) - 1000.5F;
  // A step, so that there are momenta.
  model_->forward(torch::randn({4, 2})).sum().backward();
  optimizer_.step();
  fill(1000.5F);
  float n_momenta = 0;
  for (auto& [parameter, state] : optimizer_.state()) {
    n_momenta += 1;
    static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer().fill_(2000.5F + n_momenta);
  }
  lockstep::nn::save_checkpoint(
      path_.string(),
      [&](OutputArchive& archive) { write_checkpoint(archive, *model_, optimizer_, usual_); },
      lockstep::Group());
  EXPECT_EQ(load().step, 9U);

  std::ifstream file(path_, std::ios::binary);
  const std::string good{std::istreambuf_iterator<char>(file), {}};
  const auto expect_damage_is_seen_at = [&](std::size_t at) {
    std::string bytes = good;
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    std::ofstream(path_, std::ios::binary) << bytes;
    EXPECT_NE(refusal().find(path_.string() + " is damaged"), std::string::npos) << at;
  };
  const auto expect_damage_is_seen = [&](float value) {
    std::string pattern(sizeof value, '\0');
    std::memcpy(pattern.data(), &value, sizeof value);
    const std::size_t at = good.find(pattern);
    ASSERT_NE(at, std::string::npos) << value;
    expect_damage_is_seen_at(at);
  };
  // Nor is what describes the values parsed before.
  const std::size_t end = good.rfind("lockstep");
  ASSERT_NE(end, std::string::npos);
  for (std::size_t at = 0; at < end; at += end / 97) expect_damage_is_seen_at(at);
  for (float i = 1; i <= n_values; ++i) expect_damage_is_seen(1000.5F + i);
  EXPECT_EQ(n_momenta, 4);
  for (float i = 1; i <= n_momenta; ++i) expect_damage_is_seen(2000.5F + i);
}

TEST_F(CheckpointTest, what_is_not_a_file_is_not_waited_for) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_NE(refusal().find("not a regular file"), std::string::npos);
  std::filesystem::remove(path_);
  std::filesystem::create_directory(path_);
  EXPECT_NE(refusal().find("not a regular file"), std::string::npos);
}

TEST_F(CheckpointTest, a_path_that_cannot_be_written) {
  const auto refusal_to_save = [](const std::filesystem::path& path) -> std::string {
    try {
      check_can_save(path);
      return "no error";
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
  };
  EXPECT_EQ(refusal_to_save(path_), "no error");
  EXPECT_EQ(refusal_to_save("checkpoint.pt"), "no error");
  write_other("seed", 7);
  EXPECT_EQ(refusal_to_save(path_), "no error");
  EXPECT_EQ(refusal_to_save(path_ / "in-a-file"),
            fmt::format("--save {0}/in-a-file: {0} is not a folder", path_.string()));
  EXPECT_NE(refusal_to_save(directory_ / "none" / "it").find("none: No such file"),
            std::string::npos);
  EXPECT_NE(refusal_to_save(directory_.path()).find("this is not a regular file"),
            std::string::npos);
}

TEST_F(CheckpointTest, comparison_with_something_else) {
  torch::nn::Module empty;
  empty.register_parameter("weight", torch::ones({0}));
  OutputArchive archive;
  OutputArchive network(archive.compilation_unit());
  empty.save(network);
  archive.write("network", network);
  archive.save_to(path_.string());
  EXPECT_EQ(compare_checkpoints(path_, path_).largest, 0);

  write_other("network", {});
  try {
    compare_checkpoints(path_, path_);
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(std::string(error.what()).find("frame #"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("network"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace train
