#include <lockstep/nn/data_parallel.hpp>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

#include <algorithm>
#include <lockstep/error.hpp>
#include <lockstep/nn/sync_batch_norm.hpp>
#include <mutex>
#include <string>

#include "group/root_cause.hpp"
#include "nn/batch_norm/inner_scopes.hpp"
#include "nn/replicas/module_copies.hpp"
#include "nn/replicas/replica_threads.hpp"

namespace lockstep::nn::detail {
namespace {

using at::Tensor;
using torch::nn::Module;
using ModulePtr = std::shared_ptr<Module>;

}  // namespace

class Replicas {
 public:
  Replicas(Module& module, std::vector<at::Device> devices, std::optional<at::Device> output_device,
           std::int64_t dim, std::source_location where)
      : module_(module.shared_from_this()),
        devices_(std::move(devices)),
        dim_(dim),
        where_(where),
        copies_(module_, devices_, where) {
    if (devices_.empty()) throw usage("got no devices; {at::kCPU, at::kCPU} are two CPU workers");
    output_device_ = output_device.value_or(devices_[0]);
    check_device(module_->parameters());
    check_device(module_->buffers());
    name_layers(*module_, Naming::on_this_rank);
    if (devices_.size() > 1)
      workers_ = std::make_unique<ReplicaThreads>(devices_.size(), "DataParallel", where_);
  }

  UsageError usage(const std::string& text) const {
    return {{"DataParallel", "", -1, 0, where_}, text};
  }
  const std::vector<at::Device>& devices() const { return devices_; }
  at::Device output_device() const { return output_device_; }
  std::int64_t dim() const { return dim_; }

  void run(std::size_t n, const ReplicaBody& body) {
    if (devices_.size() == 1) return body(0, *module_);  // the module itself, with its own errors
    if (workers_->is_worker_thread()) {
      throw usage(
          "called from one of its own replicas, which would deadlock; use a separate "
          "DataParallel for the nested call");
    }
    const std::lock_guard lock(mutex_);
    std::vector<std::exception_ptr> errors(n);
    if (n == 1) {
      attempt(errors[0], [&] { body(0, *module_); });
    } else {
      run_copies(n, body, errors);
    }
    rethrow(errors);
  }

  void refresh() {
    const std::lock_guard lock(mutex_);
    copies_.clear();
  }

 private:
  ErrorContext context(int replica) const { return {"DataParallel", "", replica, 0, where_}; }

  void check_device(const std::vector<Tensor>& tensors) const {
    for (const Tensor& tensor : tensors) {
      if (tensor.device().type() == devices_[0].type() &&
          (!devices_[0].has_index() || tensor.is_cpu() || tensor.device() == devices_[0])) {
        continue;
      }
      throw usage(
          fmt::format("expected the module on {}, the first of the devices, got a "
                      "parameter or buffer on {}: call to() first",
                      devices_[0].str(), tensor.device().str()));
    }
  }

  template <class F>
  static bool attempt(std::exception_ptr& error, const F& body) {
    try {
      body();
      return true;
    } catch (...) {
      error = std::current_exception();
      return false;
    }
  }

  void run_copies(std::size_t n, const ReplicaBody& body, std::vector<std::exception_ptr>& errors) {
    copies_.prepare(n);
    std::vector<ModulePtr> modules;
    for (std::size_t i = 0; i < n; ++i) modules.push_back(copies_[i]);
    execute_replication_callbacks(
        modules,
        {.original = module_,
         .devices = {devices_.begin(), devices_.begin() + static_cast<std::ptrdiff_t>(n)}},
        where_);

    share_threads();
    const at::ThreadLocalState callers;
    const auto scope = SyncBatchNormScope::active();
    workers_->run(n, [&](std::size_t i) {
      const at::ThreadLocalStateGuard as_the_caller(callers);
      const ReplicaScope in_scope(scope);
      const c10::OptionalDeviceGuard device(devices_[i].is_cpu() ? c10::optional<at::Device>()
                                                                 : devices_[i]);
      if (!attempt(errors[i], [&] { body(i, *copies_[i]); })) {
        execute_failure_callbacks(*copies_[i], errors[i]);
      }
    });
  }

  /// Otherwise every worker would start as many threads as the caller has. libtorch sets the number
  /// for the calling thread and the default of new threads; the latter is restored.
  void share_threads() {
#if AT_PARALLEL_OPENMP
    const int n_threads = at::get_num_threads();
    if (n_threads == n_threads_shared_) return;
    const int share = std::max(1, n_threads / static_cast<int>(devices_.size()));
    workers_->run(devices_.size(), [share](std::size_t) { at::set_num_threads(share); });
    at::set_num_threads(n_threads);
    n_threads_shared_ = n_threads;
#endif
  }

  void rethrow(const std::vector<std::exception_ptr>& errors) const {
    const std::size_t replica = internal::root_cause_of(errors);
    if (replica == errors.size()) return;
    const auto failed = [&](const std::string& text) {
      return PeerFailed(context(static_cast<int>(replica)),
                        fmt::format("replica {} of {} failed: {}", replica, errors.size(), text));
    };
    try {
      std::rethrow_exception(errors[replica]);
    } catch (const c10::Error& error) {
      std::throw_with_nested(failed(error.what_without_backtrace()));
    } catch (const std::exception& error) {
      std::throw_with_nested(failed(error.what()));
    } catch (...) {
      std::throw_with_nested(failed("an exception that is not a std::exception"));
    }
  }

  ModulePtr module_;
  std::vector<at::Device> devices_;
  at::Device output_device_ = at::kCPU;
  std::int64_t dim_;
  std::source_location where_;
  std::unique_ptr<ReplicaThreads> workers_;  // none for one device
  std::mutex mutex_;                         // of a call; guards what follows
  ModuleCopies copies_;
  int n_threads_shared_ = 0;  // the caller's number of threads when it was divided
};

void ScatterGather::check_size(const Tensor& tensor) {
  if (!tensor.defined() || tensor.dim() == 0) return;
  const std::int64_t dim = replicas_->dim();
  if (dim >= tensor.dim() || dim < -tensor.dim()) {
    throw replicas_->usage(fmt::format("cannot split a tensor of size {} along dim {}",
                                       c10::str(tensor.sizes()), dim));
  }
  const std::int64_t size = tensor.size(dim);
  if (size_.value_or(size) != size) {
    throw replicas_->usage(
        fmt::format("tensors have {} and {} samples along dim {}; expected the same number in all",
                    *size_, size, dim));
  }
  size_ = size;
}

std::size_t ScatterGather::n_chunks() const {
  const auto size = static_cast<std::size_t>(size_.value_or(0));
  if (size == 0) return 1;
  const std::size_t n_devices = replicas_->devices().size();
  const std::size_t chunk_size = (size + n_devices - 1) / n_devices;  // as Tensor::chunk
  return (size + chunk_size - 1) / chunk_size;
}

std::vector<Tensor> ScatterGather::scatter(const Tensor& tensor) const {
  const std::size_t n = n_chunks();
  std::vector<Tensor> chunks(n, tensor);
  if (!tensor.defined()) return chunks;
  if (tensor.dim() > 0 && n > 1) {
    chunks = tensor.chunk(static_cast<std::int64_t>(replicas_->devices().size()), replicas_->dim());
  }
  for (std::size_t i = 0; i < n; ++i) chunks[i] = chunks[i].to(replicas_->devices()[i]);
  return chunks;
}

Tensor ScatterGather::gather(std::vector<Tensor> parts) const {
  for (Tensor& part : parts) {
    if (!part.defined() || part.dim() != parts[0].dim()) throw_structure_mismatch();
    part = part.to(replicas_->output_device());
  }
  if (parts.size() == 1) return parts[0];
  return parts[0].dim() == 0 ? at::stack(parts) : at::cat(parts, replicas_->dim());
}

void ScatterGather::throw_structure_mismatch() const {
  throw replicas_->usage(
      "cannot gather the replicas' outputs: lengths, keys or dimensions differ, or one is "
      "undefined; forward must return the same structure for every chunk of the batch");
}

std::shared_ptr<Replicas> make_replicas(Module& module, std::vector<at::Device> devices,
                                        std::optional<at::Device> output_device, std::int64_t dim,
                                        std::source_location where) {
  return std::make_shared<Replicas>(module, std::move(devices), output_device, dim, where);
}

void run_replicas(Replicas& replicas, std::size_t n_chunks, const ReplicaBody& body) {
  replicas.run(n_chunks, body);
}

void refresh_replicas(Replicas& replicas) { replicas.refresh(); }

ModulePtr in_place(const char* operation, const Module& module, ModulePtr converted,
                   std::source_location where) {
  if (converted.get() == &module) return converted;
  throw UsageError({operation, "", -1, 0, where},
                   "the wrapped module itself would be replaced: convert it first, then construct "
                   "the DataParallel from the result");
}

}  // namespace lockstep::nn::detail
