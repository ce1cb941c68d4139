#include "train/checkpoint.hpp"

#include <fmt/format.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <lockstep/error.hpp>
#include <lockstep/nn/checkpoint.hpp>
#include <optional>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

namespace train {
namespace {

namespace fs = std::filesystem;

using torch::serialize::InputArchive;

/// Returns what f reads from the file; nothing of it is parsed if it is damaged. The exceptions
/// become std::runtime_error with the file name.
template <class F>
auto read_from(const fs::path& path, F f) {
  std::optional<std::invoke_result_t<F, InputArchive&>> result;
  const auto read = [&](InputArchive& archive) {
    try {
      result = f(archive);
    } catch (const c10::Error& error) {
      throw std::runtime_error(error.what_without_backtrace());
    }
  };
  std::string why;
  try {
    lockstep::nn::load_checkpoint(path.string(), read, lockstep::Group());
    return *std::move(result);
  } catch (const lockstep::Error& error) {
    why = error.text() + "; expected a checkpoint that --save wrote";
  } catch (const std::exception& error) {
    why = error.what();
  }
  throw std::runtime_error(fmt::format("cannot load {}: {}", path.string(), why));
}

std::int64_t read_int(InputArchive& archive, const std::string& key) {
  c10::IValue value;
  archive.read(key, value);
  return value.toInt();
}

/// A number of images or steps.
std::size_t read_count(InputArchive& archive, const std::string& key, std::int64_t least) {
  constexpr std::int64_t kMost = std::int64_t{1} << 48;  // small enough to avoid overflow
  const std::int64_t count = read_int(archive, key);
  if (count < least || count > kMost) {
    throw std::runtime_error(
        fmt::format("its {} is {}, expected {} to {}", key, count, least, kMost));
  }
  return static_cast<std::size_t>(count);
}

Position read_position(InputArchive& archive) {
  c10::IValue model;
  c10::IValue precision;
  c10::IValue loss;
  archive.read("model", model);
  archive.read("precision", precision);
  archive.read("epoch_loss_sum", loss);
  return {.model = model.toStringRef(),
          .precision = precision.toStringRef(),
          .seed = static_cast<std::uint64_t>(read_int(archive, "seed")),
          .batch = read_count(archive, "batch", /*least=*/1),
          .step = read_count(archive, "step", /*least=*/0),
          .epoch_loss_sum = loss.toDouble()};
}

struct NamedTensor {
  std::string name;
  torch::Tensor tensor;
};

void collect_tensors(InputArchive& archive, const std::string& prefix,
                     std::vector<NamedTensor>& tensors) {
  for (const std::string& key : archive.keys()) {
    torch::Tensor tensor;
    InputArchive child;
    // An archive does not tell which of its tensors are buffers: try both.
    if (archive.try_read(key, tensor) || archive.try_read(key, tensor, /*is_buffer=*/true)) {
      tensors.push_back({prefix + key, tensor});
    } else if (archive.try_read(key, child)) {
      collect_tensors(child, prefix + key + ".", tensors);
    }
  }
}

/// Needed because Module::load accepts any shape.
std::vector<std::vector<std::int64_t>> shapes_of(const torch::nn::Module& model) {
  std::vector<std::vector<std::int64_t>> shapes;
  for (const torch::Tensor& tensor : model.parameters()) shapes.push_back(tensor.sizes().vec());
  for (const torch::Tensor& tensor : model.buffers()) shapes.push_back(tensor.sizes().vec());
  return shapes;
}

std::vector<NamedTensor> tensors_of(const fs::path& path) {
  return read_from(path, [&](InputArchive& archive) {
    InputArchive network;
    archive.read("network", network);
    std::vector<NamedTensor> tensors;
    collect_tensors(network, "", tensors);
    return tensors;
  });
}

}  // namespace

void check_can_save(const fs::path& path) {
  const auto reject = [&](const std::string& why) {
    throw std::invalid_argument(fmt::format("--save {}: {}", path.string(), why));
  };
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  if (fs::exists(status) && !fs::is_regular_file(status)) reject("this is not a regular file");
  const fs::path folder = path.has_parent_path() ? path.parent_path() : ".";
  if (fs::exists(folder, ignored) && !fs::is_directory(folder, ignored)) {
    reject(fmt::format("{} is not a folder", folder.string()));
  }
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    reject(fmt::format("cannot write to the folder {}: {}", folder.string(), std::strerror(errno)));
  }
}

void write_checkpoint(torch::serialize::OutputArchive& archive, const torch::nn::Module& model,
                      const torch::optim::SGD& optimizer, const Position& position) {
  torch::serialize::OutputArchive network(archive.compilation_unit());
  model.save(network);
  archive.write("network", network);
  torch::serialize::OutputArchive momenta(archive.compilation_unit());
  optimizer.save(momenta);
  archive.write("optimizer", momenta);
  archive.write("model", position.model);
  archive.write("precision", position.precision);
  archive.write("seed", static_cast<std::int64_t>(position.seed));
  archive.write("batch", static_cast<std::int64_t>(position.batch));
  archive.write("step", static_cast<std::int64_t>(position.step));
  archive.write("epoch_loss_sum", position.epoch_loss_sum);
}

Position load_checkpoint(const fs::path& path, torch::nn::Module& model,
                         torch::optim::SGD& optimizer, const Position& expected) {
  return read_from(path, [&](InputArchive& archive) {
    Position position = read_position(archive);
    if (position.model != expected.model || position.precision != expected.precision) {
      throw std::runtime_error(
          fmt::format("it holds a {} in {}, expected a {} in {}; give --model and --precision",
                      position.model, position.precision, expected.model, expected.precision));
    }
    const auto shapes = shapes_of(model);
    InputArchive network;
    archive.read("network", network);
    model.load(network);
    if (shapes_of(model) != shapes) {
      throw std::runtime_error(
          "its network is for images with other channels or classes than those of --data");
    }
    InputArchive momenta;
    archive.read("optimizer", momenta);
    optimizer.load(momenta);
    return position;
  });
}

Difference compare_checkpoints(const fs::path& a, const fs::path& b) {
  const auto left = tensors_of(a);
  const auto right = tensors_of(b);
  Difference difference;
  for (std::size_t i = 0; i < std::max(left.size(), right.size()); ++i) {
    if (i >= left.size() || i >= right.size() || left[i].name != right[i].name ||
        left[i].tensor.sizes() != right[i].tensor.sizes()) {
      throw std::runtime_error(
          fmt::format("cannot compare {} with {}: they hold different networks, expected the "
                      "checkpoints of one --model",
                      a.string(), b.string()));
    }
    const torch::Tensor differences =
        (left[i].tensor.to(torch::kFloat64) - right[i].tensor.to(torch::kFloat64)).abs();
    const double largest = differences.numel() == 0 ? 0 : differences.max().item<double>();
    if (i == 0 || largest > difference.largest || std::isnan(largest)) {
      difference = {largest, left[i].name};
      if (std::isnan(largest)) break;
    }
  }
  return difference;
}

}  // namespace train
