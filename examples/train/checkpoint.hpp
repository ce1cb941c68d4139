#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class SGD;
}
namespace torch::serialize {
class OutputArchive;
}

namespace train {

/// The position in a training run. Training resumes from it, the parameters and the momenta: the
/// order of the images is a function of seed and epoch, so no generator state is needed.
struct Position {
  std::string model;
  std::string precision;
  std::uint64_t seed = 0;
  std::size_t batch = 0;
  std::size_t step = 0;       ///< number of steps done since the first epoch
  double epoch_loss_sum = 0;  ///< sum over the samples of the current epoch so far
};

/// Throws std::invalid_argument if no checkpoint can be written to that path.
void check_can_save(const std::filesystem::path& path);

/// The `write` function for lockstep::nn::save_checkpoint.
void write_checkpoint(torch::serialize::OutputArchive& archive, const torch::nn::Module& model,
                      const torch::optim::SGD& optimizer, const Position& position);

/// Loads model and optimizer, and may have changed them if it throws. `model` and `precision` of
/// `expected` must match the checkpoint, else std::runtime_error names the file and its contents.
Position load_checkpoint(const std::filesystem::path& path, torch::nn::Module& model,
                         torch::optim::SGD& optimizer, const Position& expected);

struct Difference {
  double largest = 0;  ///< NaN if a value is NaN in one of them
  std::string name;    ///< name of the parameter or buffer that has it
};

/// The largest absolute difference between the parameters and buffers of two checkpoints.
/// Throws std::runtime_error if they are not of the same network.
Difference compare_checkpoints(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace train
