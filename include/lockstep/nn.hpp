#pragma once

/// The libtorch layer. CMake target lockstep::nn.
#include <lockstep/nn/assert_in_sync.hpp>
#include <lockstep/nn/checkpoint.hpp>
#include <lockstep/nn/convert.hpp>
#include <lockstep/nn/data_parallel.hpp>
#include <lockstep/nn/distributed_data_parallel.hpp>
#include <lockstep/nn/distributed_sampler.hpp>
#include <lockstep/nn/elastic.hpp>
#include <lockstep/nn/functional.hpp>
#include <lockstep/nn/parameter_modules.hpp>
#include <lockstep/nn/replication.hpp>
#include <lockstep/nn/sync_batch_norm.hpp>
#include <lockstep/nn/sync_batch_norm_scope.hpp>
#include <lockstep/nn/tensor_async.hpp>
#include <lockstep/nn/tensor_objects.hpp>
#include <lockstep/nn/tensor_ops.hpp>
#include <lockstep/nn/tensor_trees.hpp>
#include <lockstep/nn/zero_redundancy_optimizer.hpp>
