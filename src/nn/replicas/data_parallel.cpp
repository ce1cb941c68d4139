#include <lockstep/nn/data_parallel.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <pthread.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <condition_variable>
#include <lockstep/error.hpp>
#include <lockstep/nn/sync_batch_norm.hpp>
#include <mutex>
#include <stop_token>
#include <string>
#include <system_error>
#include <thread>
#include <typeinfo>

#include "group/root_cause.hpp"

namespace lockstep::nn::detail {
namespace {

using at::Tensor;
using torch::nn::Module;
using ModulePtr = std::shared_ptr<Module>;
namespace autograd = torch::autograd::impl;

/// One thread per replica, asleep between rounds.
class Workers {
 public:
  Workers(std::size_t n, std::source_location where) {
    threads_.reserve(n);
    for (std::size_t i = 0; i < n; ++i) {
      try {
        threads_.emplace_back([this, i](const std::stop_token& stop) { work(i, stop); });
      } catch (const std::system_error& error) {
        throw SystemError({"DataParallel", "", -1, 0, where}, error.code().value(),
                          fmt::format("cannot start thread {} of {}; raise the limit of processes "
                                      "(ulimit -u) or use fewer devices",
                                      i + 1, n));
      }
      ::pthread_setname_np(threads_.back().native_handle(), fmt::format("replica-{}", i).c_str());
    }
  }

  /// body(i) on thread i, for i < n; returns when all are done. The body must not throw.
  void run(std::size_t n, const std::function<void(std::size_t)>& body) {
    std::unique_lock lock(mutex_);
    body_ = &body;
    n_wanted_ = n_running_ = n;
    ++round_;
    start_.notify_all();
    done_.wait(lock, [this] { return n_running_ == 0; });
  }

  bool is_one_of_them() const {
    return std::any_of(threads_.begin(), threads_.end(), [](const std::jthread& thread) {
      return thread.get_id() == std::this_thread::get_id();
    });
  }

 private:
  void work(std::size_t i, const std::stop_token& stop) {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (start_.wait(lock, stop, [&] { return round_ != seen; })) {
      seen = round_;
      if (i >= n_wanted_) continue;
      lock.unlock();
      (*body_)(i);
      lock.lock();
      if (--n_running_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any start_;
  std::condition_variable done_;
  std::uint64_t round_ = 0;
  std::size_t n_wanted_ = 0;
  std::size_t n_running_ = 0;
  const std::function<void(std::size_t)>* body_ = nullptr;
  std::vector<std::jthread> threads_;  // last: joined before the rest is destroyed
};

/// A copy's parameters and buffers share the module's memory. Autograd continues from the copy to
/// the original's gradients, as in torch::nn::parallel::replicate; the shared version counter
/// detects an optimizer step between forward and backward.
void link(const Tensor& copy, const Tensor& original, const at::Device& device) {
  const at::AutoGradMode with_gradients(true);  // for the copy back from another device
  const Tensor source = original.device() == device ? original : original.to(device);
  autograd::set_gradient_edge(copy, {});
  copy.set_requires_grad(false);
  copy.set_data(source);
  autograd::set_version_counter(copy, autograd::version_counter(source));
  if (original.requires_grad()) {
    autograd::set_gradient_edge(copy, autograd::gradient_edge(source));
  }
}

/// Identifies whether a tensor's copies are still as link made them.
struct Identity {
  Tensor tensor;  ///< also keeps its address from being reused
  const void* data;
  at::ScalarType type;
  bool requires_grad;

  explicit Identity(const Tensor& of)
      : tensor(of),
        data(of.data_ptr()),
        type(of.scalar_type()),
        requires_grad(of.requires_grad()) {}
  bool operator==(const Identity& other) const {
    return tensor.is_same(other.tensor) && data == other.data && type == other.type &&
           requires_grad == other.requires_grad && tensor.sizes() == other.tensor.sizes();
  }
};

std::vector<Identity> identities(const std::vector<Tensor>& tensors) {
  return {tensors.begin(), tensors.end()};
}

std::string type_of(const Module& module) { return c10::demangle(typeid(module).name()); }

struct Copy {
  ModulePtr module;
  std::vector<ModulePtr> modules;
  std::vector<Tensor> parameters, buffers;
};

}  // namespace

class Replicas {
 public:
  Replicas(Module& module, std::vector<at::Device> devices, std::optional<at::Device> output_device,
           std::int64_t dim, std::source_location where)
      : module_(module.shared_from_this()), devices_(std::move(devices)), dim_(dim), where_(where) {
    if (devices_.empty()) throw usage("got no devices; {at::kCPU, at::kCPU} are two CPU workers");
    output_device_ = output_device.value_or(devices_[0]);
    check_device(module_->parameters());
    check_device(module_->buffers());
    name_layers(*module_);
    if (devices_.size() > 1) workers_ = std::make_unique<Workers>(devices_.size(), where_);
  }

  UsageError usage(const std::string& text) const { return {context(-1), text}; }
  const std::vector<at::Device>& devices() const { return devices_; }
  at::Device output_device() const { return output_device_; }
  std::int64_t dim() const { return dim_; }

  void run(std::size_t n, const ReplicaBody& body) {
    if (devices_.size() == 1) return body(0, *module_);  // the module itself, with its own errors
    if (workers_->is_one_of_them()) {
      throw usage(
          "called by one of its own replicas, which it would wait for; make an own "
          "DataParallel for the inner call");
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
    prepare(n);
    std::vector<ModulePtr> modules;
    for (std::size_t i = 0; i < n; ++i) modules.push_back(copies_[i].module);
    execute_replication_callbacks(
        modules,
        {.original = module_,
         .devices = {devices_.begin(), devices_.begin() + static_cast<std::ptrdiff_t>(n)}},
        where_);

    share_threads();
    const at::ThreadLocalState callers;
    workers_->run(n, [&](std::size_t i) {
      const at::ThreadLocalStateGuard as_the_caller(callers);
      const c10::OptionalDeviceGuard device(devices_[i].is_cpu() ? c10::optional<at::Device>()
                                                                 : devices_[i]);
      if (!attempt(errors[i], [&] { body(i, *copies_[i].module); })) {
        execute_failure_callbacks(*copies_[i].module, errors[i]);
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

  /// Makes n copies that match the module as it is now.
  void prepare(std::size_t n) {
    // Copies must support training, whatever mode the caller is in.
    const c10::InferenceMode no_inference(false);
    const at::NoGradGuard no_grad;
    const auto modules = module_->modules();
    const auto parameters = identities(module_->parameters());
    const auto buffers = identities(module_->buffers());
    if (modules != modules_ || parameters.size() != parameters_.size() ||
        buffers.size() != buffers_.size()) {
      copies_.clear();
    }
    std::vector<Copy> copies = std::exchange(copies_, {});  // none are left if this throws
    const std::size_t n_linked = copies.size();
    while (copies.size() < n) copies.push_back(make_copy(modules, parameters, buffers));
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const Copy& copy = copies[i];
      const at::Device device = devices_[i];
      const bool elsewhere = !device.is_cpu() && i != 0;  // its copies are valid for one call
      const auto refresh = [&](const Tensor& mine, std::size_t k, const auto& now,
                               const auto& before) {
        if (i >= n_linked || elsewhere || now[k] != before[k]) link(mine, now[k].tensor, device);
      };
      for (std::size_t k = 0; k < parameters.size(); ++k) {
        refresh(copy.parameters[k], k, parameters, parameters_);
      }
      for (std::size_t k = 0; k < buffers.size(); ++k) {
        if (i == 0) {
          refresh(copy.buffers[k], k, buffers, buffers_);
        } else {
          renew_buffer(copy.buffers[k], buffers[k].tensor, device);
        }
      }
      for (std::size_t k = 0; k < modules.size(); ++k) {
        const bool training = modules[k]->is_training();
        if (copy.modules[k]->is_training() != training) copy.modules[k]->train(training);
      }
    }
    modules_ = modules;
    parameters_ = parameters;
    buffers_ = buffers;
    copies_ = std::move(copies);
  }

  /// Copies other than the first have buffers of their own: two writers of one would race.
  static void renew_buffer(const Tensor& mine, const Tensor& original, const at::Device& device) {
    if (mine.sizes() == original.sizes() && mine.scalar_type() == original.scalar_type() &&
        mine.device() == device) {
      // Only if it changed: an earlier forward's graph may need its current value.
      const Tensor source = original.to(device);
      if (!mine.equal(source)) mine.copy_(source);
    } else {
      mine.set_data(original.detach().to(device, original.scalar_type(), /*non_blocking=*/false,
                                         /*copy=*/true));
    }
  }

  /// torch clones a class derived from its containers as the container, or as null.
  void check_copy(const Module& original, const ModulePtr& copy, const std::string& name) const {
    if (!copy || typeid(*copy) != typeid(original)) {
      throw usage(fmt::format(
          "cannot copy the module: the clone of {} is {}; a class derived from {} needs a clone() "
          "of its own that returns its type",
          name.empty() ? "the module itself, a " + type_of(original)
                       : "'" + name + "', a " + type_of(original) + ",",
          copy ? "a " + type_of(*copy) : "null", copy ? type_of(*copy) : "a container of torch's"));
    }
    const auto expected = original.named_children();
    const auto got = copy->named_children();
    // Sequential renumbers its modules; make_copy reports other differences.
    for (std::size_t i = 0; i < std::min(expected.size(), got.size()); ++i) {
      const std::string& key = expected[i].key();
      check_copy(*expected[i].value(), got[i].value(), name.empty() ? key : name + "." + key);
    }
  }

  Copy make_copy(const std::vector<ModulePtr>& modules, const std::vector<Identity>& parameters,
                 const std::vector<Identity>& buffers) const {
    Copy copy;
    try {
      // clone() draws initial values only to overwrite them: keep the random numbers that training
      // would otherwise draw.
      const RandomStateKept random_state_kept;
      copy.module = module_->clone();
    } catch (const c10::Error& error) {
      throw usage(fmt::format("cannot copy the module: {}", error.what_without_backtrace()));
    }
    check_copy(*module_, copy.module, "");
    copy.modules = copy.module->modules();
    copy.parameters = copy.module->parameters();
    copy.buffers = copy.module->buffers();
    if (copy.modules.size() != modules.size() || copy.parameters.size() != parameters.size() ||
        copy.buffers.size() != buffers.size()) {
      throw usage(fmt::format(
          "the module's clone() has {} modules, {} parameters and {} buffers, not {}, {} and {} as "
          "the module: its reset() must make what the module has, and tensors must be registered",
          copy.modules.size(), copy.parameters.size(), copy.buffers.size(), modules.size(),
          parameters.size(), buffers.size()));
    }
    return copy;
  }

  struct RandomStateKept {
    RandomStateKept() : generator(at::detail::getDefaultCPUGenerator()) {
      const std::lock_guard lock(generator.mutex());
      state = generator.get_state();
    }
    ~RandomStateKept() {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
    RandomStateKept(const RandomStateKept&) = delete;
    RandomStateKept& operator=(const RandomStateKept&) = delete;
    at::Generator generator;
    Tensor state;
  };

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
      std::throw_with_nested(failed("an exception that is no std::exception"));
    }
  }

  ModulePtr module_;
  std::vector<at::Device> devices_;
  at::Device output_device_ = at::kCPU;
  std::int64_t dim_;
  std::source_location where_;
  std::unique_ptr<Workers> workers_;  // none for one device
  std::mutex mutex_;                  // of a call; guards what follows
  std::vector<ModulePtr> modules_;
  std::vector<Identity> parameters_, buffers_;
  std::vector<Copy> copies_;
  int n_threads_shared_ = 0;  // the caller's number of threads when it was divided
};

void Cut::measure(const Tensor& tensor) {
  if (!tensor.defined() || tensor.dim() == 0) return;
  const std::int64_t dim = replicas_->dim();
  if (dim >= tensor.dim() || dim < -tensor.dim()) {
    throw replicas_->usage(
        fmt::format("cannot cut a tensor of size {} along dim {}", c10::str(tensor.sizes()), dim));
  }
  const std::int64_t size = tensor.size(dim);
  if (size_.value_or(size) != size) {
    throw replicas_->usage(
        fmt::format("tensors have {} and {} samples along dim {}; expected the same number in all",
                    *size_, size, dim));
  }
  size_ = size;
}

std::size_t Cut::n_pieces() const {
  const auto size = static_cast<std::size_t>(size_.value_or(0));
  if (size == 0) return 1;
  const std::size_t n_devices = replicas_->devices().size();
  const std::size_t of_piece = (size + n_devices - 1) / n_devices;  // as Tensor::chunk
  return (size + of_piece - 1) / of_piece;
}

std::vector<Tensor> Cut::scatter(const Tensor& tensor) const {
  const std::size_t n = n_pieces();
  std::vector<Tensor> pieces(n, tensor);
  if (!tensor.defined()) return pieces;
  if (tensor.dim() > 0 && n > 1) {
    pieces = tensor.chunk(static_cast<std::int64_t>(replicas_->devices().size()), replicas_->dim());
  }
  for (std::size_t i = 0; i < n; ++i) pieces[i] = pieces[i].to(replicas_->devices()[i]);
  return pieces;
}

Tensor Cut::gather(std::vector<Tensor> parts) const {
  for (Tensor& part : parts) {
    if (!part.defined() || part.dim() != parts[0].dim()) fail_unlike();
    part = part.to(replicas_->output_device());
  }
  if (parts.size() == 1) return parts[0];
  return parts[0].dim() == 0 ? at::stack(parts) : at::cat(parts, replicas_->dim());
}

void Cut::fail_unlike() const {
  throw replicas_->usage(
      "the replicas' outputs cannot be put together: lengths, keys or dimensions differ, or one is "
      "undefined; forward must return the same structure for every piece of the batch");
}

std::shared_ptr<Replicas> make_replicas(Module& module, std::vector<at::Device> devices,
                                        std::optional<at::Device> output_device, std::int64_t dim,
                                        std::source_location where) {
  return std::make_shared<Replicas>(module, std::move(devices), output_device, dim, where);
}

void run_replicas(Replicas& replicas, std::size_t n_pieces, const ReplicaBody& body) {
  replicas.run(n_pieces, body);
}

void refresh_replicas(Replicas& replicas) { replicas.refresh(); }

ModulePtr in_place(const char* operation, const Module& module, ModulePtr converted,
                   std::source_location where) {
  if (converted.get() == &module) return converted;
  throw UsageError({operation, "", -1, 0, where},
                   "the module of this DataParallel is itself what is to be replaced: convert it "
                   "before, and make the DataParallel of the result");
}

}  // namespace lockstep::nn::detail
