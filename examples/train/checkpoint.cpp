#include "train/checkpoint.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <system_error>
#include <utility>
#include <vector>

namespace train {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_system(const fs::path& path, const char* what) {
  throw std::system_error(errno, std::generic_category(),
                          fmt::format("cannot save {}: {}", path.string(), what));
}

/// A file that is gone again unless it was renamed.
class TemporaryFile {
 public:
  explicit TemporaryFile(const fs::path& target)
      : target_(target),
        path_(fmt::format("{}.tmp.{}", target.string(), getpid())),
        fd_(open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
    if (fd_ < 0) fail_system(target_, "no file can be made beside it");
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    close(fd_);
    if (!renamed_) unlink(path_.c_str());
  }

  void write(const char* data, std::size_t n_bytes) {
    while (n_bytes > 0) {
      const ssize_t n = ::write(fd_, data, n_bytes);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail_system(target_, "write");
      data += n;
      n_bytes -= static_cast<std::size_t>(n);
    }
  }

  void commit() {
    if (fsync(fd_) != 0) fail_system(target_, "fsync");
    if (rename(path_.c_str(), target_.c_str()) != 0) fail_system(target_, "rename");
    renamed_ = true;
    // The rename itself is on the disk only once the directory is.
    const fs::path parent = target_.parent_path();
    const int directory = open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_CLOEXEC);
    if (directory < 0) fail_system(target_, "open its directory");
    const int synced = fsync(directory);
    close(directory);
    if (synced != 0) fail_system(target_, "fsync of its directory");
  }

 private:
  fs::path target_;
  std::string path_;
  int fd_;
  bool renamed_ = false;
};

/// What f reads of the file. Whatever it throws becomes a std::runtime_error that names the file.
template <class F>
auto read_from(const fs::path& path, F f) {
  std::string why;
  try {
    return f();
  } catch (const c10::Error& error) {
    why = error.what_without_backtrace();
  } catch (const std::exception& error) {
    why = error.what();
  }
  throw std::runtime_error(fmt::format("cannot load {}: {}", path.string(), why));
}

torch::serialize::InputArchive open_archive(const fs::path& path) {
  constexpr const char* kExpected = "expected a checkpoint that --save wrote";
  if (!fs::is_regular_file(path)) throw std::runtime_error(fmt::format("absent, {}", kExpected));
  torch::serialize::InputArchive archive;
  try {
    archive.load_from(path.string());
  } catch (const c10::Error& error) {
    throw std::runtime_error(fmt::format("{}, {}", error.what_without_backtrace(), kExpected));
  }
  return archive;
}

std::int64_t read_int(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  archive.read(key, value);
  return value.toInt();
}

/// A number of images or steps.
std::size_t read_count(torch::serialize::InputArchive& archive, const std::string& key,
                       std::int64_t least) {
  constexpr std::int64_t kMost = std::int64_t{1} << 48;  // arithmetic with it overflows nowhere
  const std::int64_t count = read_int(archive, key);
  if (count < least || count > kMost) {
    throw std::runtime_error(
        fmt::format("its {} is {}, expected {} to {}", key, count, least, kMost));
  }
  return static_cast<std::size_t>(count);
}

Position read_position(torch::serialize::InputArchive& archive) {
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

void collect_tensors(torch::serialize::InputArchive& archive, const std::string& prefix,
                     std::vector<NamedTensor>& tensors) {
  for (const std::string& key : archive.keys()) {
    torch::Tensor tensor;
    torch::serialize::InputArchive child;
    // An archive does not say which of its tensors are buffers: ask for both.
    if (archive.try_read(key, tensor) || archive.try_read(key, tensor, /*is_buffer=*/true)) {
      tensors.push_back({prefix + key, tensor});
    } else if (archive.try_read(key, child)) {
      collect_tensors(child, prefix + key + ".", tensors);
    }
  }
}

/// Module::load takes whatever shape it finds.
std::vector<std::vector<std::int64_t>> shapes_of(const torch::nn::Module& model) {
  std::vector<std::vector<std::int64_t>> shapes;
  for (const torch::Tensor& tensor : model.parameters()) shapes.push_back(tensor.sizes().vec());
  for (const torch::Tensor& tensor : model.buffers()) shapes.push_back(tensor.sizes().vec());
  return shapes;
}

std::vector<NamedTensor> tensors_of(const fs::path& path) {
  return read_from(path, [&] {
    auto archive = open_archive(path);
    torch::serialize::InputArchive network;
    archive.read("network", network);
    std::vector<NamedTensor> tensors;
    collect_tensors(network, "", tensors);
    return tensors;
  });
}

}  // namespace

void save_checkpoint(const fs::path& path, const torch::nn::Module& model,
                     const torch::optim::SGD& optimizer, const Position& position) {
  torch::serialize::OutputArchive archive;
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
  TemporaryFile file(path);
  archive.save_to([&](const void* data, std::size_t n_bytes) {
    file.write(static_cast<const char*>(data), n_bytes);
    return n_bytes;
  });
  file.commit();
}

Position load_checkpoint(const fs::path& path, torch::nn::Module& model,
                         torch::optim::SGD& optimizer, const Position& expected) {
  return read_from(path, [&] {
    auto archive = open_archive(path);
    Position position = read_position(archive);
    if (position.model != expected.model || position.precision != expected.precision) {
      throw std::runtime_error(
          fmt::format("it holds a {} in {}, expected a {} in {}; give --model and --precision",
                      position.model, position.precision, expected.model, expected.precision));
    }
    const auto shapes = shapes_of(model);
    torch::serialize::InputArchive network;
    archive.read("network", network);
    model.load(network);
    if (shapes_of(model) != shapes) {
      throw std::runtime_error(
          "its network is for images of other channels or classes than --data");
    }
    torch::serialize::InputArchive momenta;
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
