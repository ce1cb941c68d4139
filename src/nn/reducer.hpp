#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <lockstep/group.hpp>
#include <lockstep/nn/distributed_data_parallel.hpp>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace lockstep::nn::detail {

/// Averages gradients in buckets while backward runs.
///
/// A bucket holds the gradients of some parameters of one type, and behind them one flag per
/// parameter: 1 where this rank has a gradient. The mean that reduces the bucket makes of the
/// flags the share of ranks that had one, so that no second message is needed to know it.
///
/// One backward: the first hook queues finish() for the end of backward and starts a step; each
/// hook moves its gradient into the bucket; a complete bucket is sent once all before it were, the
/// order being the same on all ranks; finish() sends the rest and waits for all.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(torch::nn::Module& module, const DistributedDataParallelOptions& options,
          std::source_location where);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  void before_forward();
  void on_gradient(std::size_t index);

  int n_no_sync = 0;  ///< guards alive

 private:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    std::shared_ptr<torch::autograd::Node> accumulator;  // libtorch itself keeps it weakly
    std::uintptr_t hook = 0;
    at::Tensor slice;  // its gradient in the bucket
    at::Tensor flag;
    std::size_t bucket = 0;
    bool ready = false;
  };
  struct Bucket {
    at::ScalarType type = at::kFloat;
    std::vector<std::size_t> parameters;
    SharedBuffer memory;
    Elements elements;
    std::size_t n_pending = 0;
    Work work;
  };

  void add_buckets(const DistributedDataParallelOptions& options, std::source_location where);
  void add_hooks();
  void start_step();
  void move_gradient(Parameter& parameter);
  void send_complete_buckets();
  void finish();

  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;
  std::size_t n_sent_ = 0;
  bool sync_ = false;     // of the last forward
  bool in_step_ = false;  // between the first hook and the end of finish()
  Group group_;           // after the buckets: it goes first, and its worker with it
};

}  // namespace lockstep::nn::detail
