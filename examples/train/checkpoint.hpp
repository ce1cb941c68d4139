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

/// Where a training stands: with it, the parameters and the momenta, the next step follows. The
/// order of the images is a function of seed and epoch, so there is no other generator's state.
struct Position {
  std::string model;
  std::string precision;
  std::uint64_t seed = 0;
  std::size_t batch = 0;
  std::size_t step = 0;       ///< done since the first epoch
  double epoch_loss_sum = 0;  ///< of the epoch under way, over its samples
};

/// Of all that a training goes on from. libtorch's archives hold a checksum of each tensor, which
/// it does not look at.
std::int64_t checksum_of(const torch::nn::Module& model, const torch::optim::SGD& optimizer,
                         const Position& position);

/// Throws std::invalid_argument where no checkpoint can be written to that path.
void check_can_save(const std::filesystem::path& path);

/// What lockstep::nn::save_checkpoint brings to the file.
void write_checkpoint(torch::serialize::OutputArchive& archive, const torch::nn::Module& model,
                      const torch::optim::SGD& optimizer, const Position& position);

/// Fills model and optimizer, also where it then throws. `model` and `precision` of `expected` must
/// be the checkpoint's. Throws std::runtime_error naming the file and what it holds instead.
Position load_checkpoint(const std::filesystem::path& path, torch::nn::Module& model,
                         torch::optim::SGD& optimizer, const Position& expected);

struct Difference {
  double largest = 0;  ///< NaN where a value is NaN in one of them
  std::string name;    ///< of the parameter or buffer that has it
};

/// The largest absolute difference between the parameters and buffers of two checkpoints.
/// Throws std::runtime_error where they are not of the same network.
Difference compare_checkpoints(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace train
