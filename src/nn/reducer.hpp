#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <lockstep/group.hpp>
#include <lockstep/nn/distributed_data_parallel.hpp>
#include <memory>
#include <span>
#include <string>
#include <utility>
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
/// order being the same on all ranks; finish() sends the rest and waits for all. The first finish()
/// then makes the buckets anew in the order in which rank 0's gradients came.
///
/// With a hook, the flags go in a message of their own: a hook may do anything with numbers.
///
/// join: every forward in it begins with an all_gather of what each rank is about to do. A rank out
/// of data says so, and does what the others do with a batch of no samples, until all say so.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(torch::nn::Module& module, const DistributedDataParallelOptions& options,
          std::source_location where);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  void before_forward();
  void on_gradient(std::size_t index);
  void join(const std::function<void()>& body);
  bool wants_shadow() const { return joining_ || !shadow; }

  std::function<at::Tensor()> shadow;  ///< a forward of no samples

  int n_no_sync = 0;  ///< guards alive

 private:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    // libtorch itself keeps it weakly. The kind of pointer depends on its version.
    decltype(torch::autograd::impl::grad_accumulator(
        std::declval<const at::Tensor&>())) accumulator;
    std::uintptr_t hook = 0;
    at::Tensor slice;  // its gradient in the bucket
    at::Tensor flag;
    std::size_t bucket = 0;
    bool ready = false;
    bool touched = false;  // some backward since the last averaging gave it a gradient
    bool used = true;      // of a static graph: false where it got no gradient in the first step
  };
  struct Bucket {
    at::ScalarType type = at::kFloat;
    std::vector<std::size_t> parameters;
    SharedBuffer memory;
    Elements gradients, flags;
    std::size_t n_pending = 0;
    Work work;
    std::function<void()> complete;  // the hook's
  };
  /// What a rank is about to do, in join.
  enum class Turn : std::int32_t { joined = 0, accumulate = 1, synchronise = 2 };

  bool has_new_parameters() const;
  /// Collective: compares the modules, gives all rank 0's values of new parameters.
  void take_parameters(std::source_location where);
  void add_buckets(std::span<const std::int64_t> order, std::source_location where);
  void rebuild_buckets();
  void add_hooks();
  void remove_hooks();
  void prepare();
  Turn announce(Turn mine);
  void drop_gradients();
  void take_state_of(int rank);
  void start_step();
  void move_gradient(Parameter& parameter);
  void give_gradient(Parameter& parameter);
  void check_same_gradients();
  void send_complete_buckets();
  void finish();

  torch::nn::Module& module_;  // DistributedDataParallel holds it, and only it calls on us for it
  const DistributedDataParallelOptions options_;
  std::vector<Parameter> parameters_;
  std::vector<std::int64_t> order_;     // of the parameters in the buckets
  std::vector<std::int64_t> arrivals_;  // of gradients, in the step
  std::vector<Bucket> buckets_;
  std::size_t n_sent_ = 0;
  bool sync_ = false;     // of the last forward
  bool in_step_ = false;  // between the first hook and the end of finish()
  bool rebuilt_ = false;
  bool joining_ = false;
  int n_active_ = 0;      // ranks that have data, in join
  int last_active_ = -1;  // the first of those, as last heard
  Group group_;           // after the buckets: it goes first, and its worker with it
};

}  // namespace lockstep::nn::detail
