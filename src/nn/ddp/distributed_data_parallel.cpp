#include <lockstep/nn/distributed_data_parallel.hpp>

#include <ATen/ATen.h>

#include <lockstep/nn/tensor_ops.hpp>

#include "nn/ddp/reducer.hpp"

namespace lockstep::nn {
namespace detail {

std::shared_ptr<Reducer> make_reducer(torch::nn::Module& module,
                                      const DistributedDataParallelOptions& options,
                                      std::source_location where) {
  return std::make_shared<Reducer>(module, options, where);
}
std::optional<lockstep::detail::Collective> before_forward(
    Reducer& reducer, const std::optional<std::source_location>& where) {
  return reducer.before_forward(where);
}
void after_forward(Reducer& reducer, const std::vector<at::Tensor>& outputs) {
  reducer.after_forward(outputs);
}
bool wants_outputs(const Reducer& reducer) { return reducer.wants_outputs(); }
void set_shadow(Reducer& reducer, std::function<at::Tensor()> shadow) {
  reducer.shadow = std::move(shadow);
}
bool wants_shadow(const Reducer& reducer) { return reducer.wants_shadow(); }
void join(Reducer& reducer, const std::function<void()>& body, const JoinOptions& options,
          std::function<at::Tensor()> example, std::source_location where) {
  reducer.join(body, options, std::move(example), where);
}

}  // namespace detail

namespace {

CommunicationHook compression(at::ScalarType type) {
  return [type](const GradientBucket& bucket) -> std::function<void()> {
    const at::Tensor values =
        bucket.gradients.is_complex() ? at::view_as_real(bucket.gradients) : bucket.gradients;
    const at::Tensor small = values.to(type, /*non_blocking=*/false, /*copy=*/true);
    Work work = bucket.group.all_reduce_async(elements_of(small), ReduceOp::mean);
    return [work, small, values]() mutable {
      work.wait();
      values.copy_(small);
    };
  };
}

}  // namespace

CommunicationHook f16_compression() { return compression(at::kHalf); }
CommunicationHook bf16_compression() { return compression(at::kBFloat16); }

NoSync::NoSync(std::shared_ptr<detail::Reducer> reducer) : reducer_(std::move(reducer)) {
  ++reducer_->n_no_sync;
}
NoSync::~NoSync() { --reducer_->n_no_sync; }

}  // namespace lockstep::nn
