#pragma once

#include <string>

/// Ranks that are processes and train on one device: this binary, started with the arguments
/// `device_ranks BACKEND DEVICE` in place of GoogleTest's.
namespace lockstep::nn::device_ranks {

/// Compares SyncBatchNorm, its scope and DistributedDataParallel over the ranks with BatchNorm on
/// the whole batch on this device ("cpu", "cuda"). Prints each case that differs; rank 0 then
/// prints how many were right. Returns the exit code: 1 if one differed on any rank.
int run(const std::string& backend, const std::string& device);

}  // namespace lockstep::nn::device_ranks
