#include "train/checkpoint.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

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
  Position usual_{.model = "convnet", .precision = "f32", .batch = 8, .step = 9};
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
  // Not: one of the numbers is the 1, and one is the 0.5.
  EXPECT_EQ(n_refused, static_cast<int>(kKeys.size() * values.size()) - 4);
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
