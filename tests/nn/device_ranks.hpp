#pragma once

#include <ATen/ATen.h>

#include <string>

#include "helpers.hpp"

/// Ranks that are processes and train on one device: this binary, started with the arguments
/// `device_ranks BACKEND DEVICE` in place of GoogleTest's.
namespace lockstep::nn::device_ranks {

struct LayerCase {
  at::ScalarType type;
  bool is_channels_last;
  testing::Shares shares;  ///< samples of each rank
};

/// Compares SyncBatchNorm over the default group with BatchNorm on the whole batch in float64.
/// Returns what differs; empty: nothing.
std::string layer_differs(const LayerCase& c, const at::Device& device);

/// Compares SyncBatchNorm, training by its scope and DistributedDataParallel with a checkpoint, and
/// operations on tensors over the ranks with one rank that has the whole batch, on this device
/// ("cpu", "cuda"). Prints each case that differs; rank 0 then prints how many were right. Returns
/// the exit code: 1 if one differed on any rank.
int run(const std::string& backend, const std::string& device);

}  // namespace lockstep::nn::device_ranks
