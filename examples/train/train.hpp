#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "data.hpp"

namespace train {

/// The command line; main.cpp describes each option.
struct Options {
  std::string data;
  std::string model = "convnet";
  std::string precision = "f32";
  bool sync_bn = true;
  std::size_t epochs = 10, max_steps = 0, batch = 64;
  std::uint64_t seed = 1;
  int threads = 0;
  std::size_t data_parallel = 1;
  int shards = 0;
  std::string backend = "auto";
  std::string save, load, metrics;
  std::size_t metrics_every = 0;
  std::vector<std::string> compare;
  std::string dump;
  int n_restarts = 0;  ///< by `lockstep run --max-restarts`; not an option
};

struct EpochResult {
  std::size_t step = 0;      ///< number of the last step, since the first epoch
  double loss = 0;           ///< mean over all ranks' images
  double test_accuracy = 0;  ///< 0 .. 1, with the running statistics
  double seconds = 0;        ///< training time, without the test
  double images_per_second = 0;
};

/// Trains over the ranks of the world, which this joins; a thread of run_ranks is in one. Rank 0
/// writes to the terminal and to files. Collective. Goes on after lost ranks under
/// `lockstep run --elastic`. Returns the epochs that this rank completed, the same on all ranks
/// except for the speed. Throws std::invalid_argument for options that do not fit the data, the
/// ranks or the checkpoint, lockstep::UsageError for a checkpoint that cannot be read or written.
std::vector<EpochResult> run(const Options& options, const Dataset& data);

struct Difference {
  double largest = 0;  ///< NaN if a value is NaN in one of them
  std::string name;    ///< of the parameter or buffer that has it
};

/// The largest absolute difference between the networks in two checkpoints of trainings with these
/// options. Throws lockstep::UsageError if their --model or --precision is another.
Difference compare(const Options& options, const std::string& a, const std::string& b);

/// The bytes of the parameters and buffers in a checkpoint. Throws as compare.
std::string dump(const Options& options, const std::string& path);

}  // namespace train
