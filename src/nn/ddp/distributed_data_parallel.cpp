#include <lockstep/nn/distributed_data_parallel.hpp>

#include <ATen/ATen.h>

#include <lockstep/nn/tensor_ops.hpp>

#include <lockstep/error.hpp>

#include "nn/ddp/reducer.hpp"
#include "nn/ddp/shards.hpp"

namespace lockstep::nn {
std::shared_ptr<detail::Synchroniser> detail::make_synchroniser(
    torch::nn::Module& module, const DistributedDataParallelOptions& options,
    std::source_location where) {
  if (options.shards != 0) return std::make_shared<Shards>(module, options, where);
  return std::make_shared<Reducer>(module, options, where);
}

std::vector<at::Tensor> detail::copies_of_rows(const at::Tensor& tensor,
                                               const std::vector<std::int64_t>& sizes) {
  std::vector<at::Tensor> rows;
  std::int64_t first = 0;
  for (const std::int64_t n : sizes) {
    rows.push_back(tensor.narrow(0, first, n).clone());
    first += n;
  }
  return rows;
}

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

}  // namespace lockstep::nn
