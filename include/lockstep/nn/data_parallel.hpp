#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/nn/convert.hpp>
#include <lockstep/nn/replication.hpp>
#include <lockstep/nn/tensor_trees.hpp>

namespace lockstep::nn {

namespace detail {

class Replicas;

/// Scatters the inputs of one call to the replicas and gathers their outputs.
class ScatterGather {
 public:
  explicit ScatterGather(const Replicas& replicas) : replicas_(&replicas) {}

  void check_size(const at::Tensor& tensor);  ///< of every input tensor, before any other call
  std::size_t n_chunks() const;
  std::vector<at::Tensor> scatter(const at::Tensor& tensor) const;
  at::Tensor gather(std::vector<at::Tensor> parts) const;
  [[noreturn]] void throw_structure_mismatch() const;

 private:
  const Replicas* replicas_;
  std::optional<std::int64_t> size_;
};

std::shared_ptr<Replicas> make_replicas(torch::nn::Module& module, std::vector<at::Device> devices,
                                        std::optional<at::Device> output_device, std::int64_t dim,
                                        std::source_location where);
/// Calls body(i, copy i of the module) on replica i's thread, for i < n_chunks.
using ReplicaBody = std::function<void(std::size_t replica, torch::nn::Module& copy)>;
void run_replicas(Replicas& replicas, std::size_t n_chunks, const ReplicaBody& body);
void refresh_replicas(Replicas& replicas);

/// Returns `converted`, which must be `module`; throws UsageError otherwise.
std::shared_ptr<torch::nn::Module> in_place(const char* operation, const torch::nn::Module& module,
                                            std::shared_ptr<torch::nn::Module> converted,
                                            std::source_location where);

template <class T>
void check_size(ScatterGather& batch, const T& value) {
  for (const at::Tensor& tensor : tensors_of(value)) batch.check_size(tensor);
}
/// Returns one value per chunk: tensors are scattered, everything else is copied.
template <class T>
std::vector<T> scatter(const ScatterGather& batch, const T& value) {
  std::vector<T> chunks(batch.n_chunks(), value);
  if constexpr (kHasTensors<T>) {
    Tree<T>::visit(pointers_to(chunks), [&batch](const std::vector<at::Tensor*>& tensors) {
      std::vector<at::Tensor> parts = batch.scatter(*tensors[0]);
      for (std::size_t i = 0; i < tensors.size(); ++i) *tensors[i] = std::move(parts[i]);
    });
  }
  return chunks;
}
template <class T>
T gather(const ScatterGather& batch, std::vector<T> parts) {
  static_assert((Tree<T>::kHolds & kOthers) == 0,
                "DataParallel gathers tensors only: forward must return a tensor or a container "
                "of tensors");
  const bool are_alike =
      Tree<T>::visit(pointers_to(parts), [&batch](const std::vector<at::Tensor*>& tensors) {
        std::vector<at::Tensor> per_replica;
        for (const at::Tensor* tensor : tensors) per_replica.push_back(*tensor);
        *tensors[0] = batch.gather(std::move(per_replica));
      });
  if (!are_alike) batch.throw_structure_mismatch();
  return std::move(parts[0]);
}

}  // namespace detail

/// Data parallelism over several devices of this process: the batch is split along `dim`, each
/// device's copy of the module processes its chunk on a separate thread, and the outputs are joined
/// on the output device (default: the first). {at::kCPU, at::kCPU}: two CPU workers.
///
/// Tensors are split as by Tensor::chunk: a small batch uses fewer devices, the last chunks may be
/// smaller, and a batch of one chunk is passed to the module itself on the calling thread. Tensors
/// inside std::vector, array, map, unordered_map, pair, tuple and torch::OrderedDict, at any depth,
/// are split and joined too. Anything else, and undefined tensors and those without dimensions, are
/// passed to every replica unchanged. Outputs without dimensions are stacked.
///
/// CPU copies are kept between calls and share the parameters' memory: only buffers are copied.
/// Gradients accumulate in the module's own parameters. Buffer updates by copy 0 (the running
/// statistics of a BatchNorm) are copied to the module's own buffers, those by other copies are
/// lost. Changes of the training flag and changed or replaced parameters and submodules take effect
/// at the next forward; for other members call refresh(). What forward writes to members that are
/// not buffers stays in the copy. Copies are made with Module::clone. Weights of torch's layers
/// that are tied by assignment (head->weight = embedding->weight) are tied in the copies too; any
/// other member that holds a tensor is what clone() makes of it, so register the tensors of your
/// classes.
///
/// ReplicationCallbacks are called before every forward of two or more chunks, so SyncBatchNorm
/// (convert_sync_batchnorm) normalises over the whole batch, in backward too. All copies must call
/// such modules in the same order.
///
/// Workers inherit the caller's grad mode, inference mode and autocast, but not its default group.
/// Each worker gets its share of the caller's at::get_num_threads(). Workers draw random numbers
/// from torch's shared generator in an unspecified order.
/// Errors: UsageError (tensors of unequal size along `dim`, a module that cannot be cloned, outputs
/// of different structure). A replica's exception becomes PeerFailed with the replica's index in
/// context().rank and the original nested (std::rethrow_if_nested), after all have stopped. With
/// one device it propagates unchanged. Threads: calls from several threads are serialised. Copyable
/// handle.
template <class M>
class DataParallel {
  static_assert(detail::require_module_handle<M>());

 public:
  /// The module must be on devices[0]. Throws UsageError if it is not, or if `devices` is empty.
  DataParallel(M module, std::vector<at::Device> devices,
               std::optional<at::Device> output_device = std::nullopt, std::int64_t dim = 0,
               std::source_location where = std::source_location::current())
      : module_(std::move(module)),
        replicas_(detail::make_replicas(*module_, std::move(devices), output_device, dim, where)) {}

  template <class... Args>
  auto forward(const Args&... args) {
    using Impl = std::remove_cvref_t<decltype(*module_)>;
    using Result = std::remove_cvref_t<decltype(module_->forward(Args(args)...))>;
    detail::ScatterGather batch(*replicas_);
    (detail::check_size(batch, args), ...);
    auto chunks = std::make_tuple(detail::scatter(batch, args)...);
    std::vector<std::optional<Result>> results(batch.n_chunks());
    detail::run_replicas(*replicas_, batch.n_chunks(), [&](std::size_t i, torch::nn::Module& copy) {
      results[i] = std::apply(
          [&](auto&... of_arg) {
            return dynamic_cast<Impl&>(copy).forward(Args(std::move(of_arg[i]))...);
          },
          chunks);
    });
    std::vector<Result> parts;
    for (auto& result : results) parts.push_back(std::move(*result));
    return detail::gather(batch, std::move(parts));
  }
  template <class... Args>
  auto operator()(const Args&... args) {
    return forward(args...);
  }

  /// Recreates the copies at the next forward.
  void refresh() { detail::refresh_replicas(*replicas_); }
  M& module() { return module_; }
  const M& module() const { return module_; }

 private:
  M module_;
  std::shared_ptr<detail::Replicas> replicas_;
};

/// convert_sync_batchnorm and revert_sync_batchnorm of the wrapped module, in place; takes effect
/// at the next forward. Throws UsageError if the wrapped module itself would be replaced.
template <ModuleHandle M>
std::shared_ptr<torch::nn::Module> convert_sync_batchnorm(
    DataParallel<M>& model, std::optional<Group> group = std::nullopt,
    std::source_location where = std::source_location::current()) {
  torch::nn::Module& module = *model.module();
  return detail::in_place(
      "convert_sync_batchnorm", module,
      convert_sync_batchnorm(module.shared_from_this(), std::move(group), where), where);
}
template <ModuleHandle M>
std::shared_ptr<torch::nn::Module> revert_sync_batchnorm(
    DataParallel<M>& model, std::source_location where = std::source_location::current()) {
  torch::nn::Module& module = *model.module();
  return detail::in_place("revert_sync_batchnorm", module,
                          revert_sync_batchnorm(module.shared_from_this(), where), where);
}

/// DataParallel under the name used by the well-known PyTorch implementation with callbacks.
template <class M>
class DataParallelWithCallback : public DataParallel<M> {
 public:
  DataParallelWithCallback(M module, std::vector<at::Device> devices,
                           std::optional<at::Device> output_device = std::nullopt,
                           std::int64_t dim = 0,
                           std::source_location where = std::source_location::current())
      : DataParallel<M>(std::move(module), std::move(devices), output_device, dim, where) {}
};

}  // namespace lockstep::nn
