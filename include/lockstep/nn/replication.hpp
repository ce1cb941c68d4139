#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <concepts>
#include <exception>
#include <map>
#include <memory>
#include <source_location>
#include <span>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <typeinfo>
#include <utility>
#include <vector>

namespace lockstep::nn {

/// A handle of a module: a ModuleHolder such as torch::nn::Sequential, or a shared_ptr.
template <class M>
concept ModuleHandle = requires(M& module) {
  { *module } -> std::convertible_to<torch::nn::Module&>;
};

namespace detail {
/// Rejects an M that is not a ModuleHandle with one clear message.
template <class M>
consteval bool require_module_handle() {
  static_assert(ModuleHandle<M>,
                "lockstep: this takes a ModuleHolder (as made by TORCH_MODULE) or a "
                "std::shared_ptr to a torch::nn::Module; of a torch::jit::Module make a "
                "lockstep::nn::ScriptModule");
  return true;
}
}  // namespace detail

class CallbackContext;

/// Optional information about a replication.
struct ReplicationInfo {
  /// The module that was copied.
  std::shared_ptr<torch::nn::Module> original{};
  /// The device of each copy; empty: the devices of the copies' parameters and buffers.
  std::vector<at::Device> devices{};
};

/// Calls on_replicate of every ReplicationCallback in the copies of a module. There is one context
/// per submodule of copy 0 (a submodule that occurs twice has one); contexts live until the call
/// returns, states with another owner longer. Throws UsageError, before any callback runs, if there
/// is no copy, a null copy, or a copy (or the original) of a different structure from copy 0, or if
/// `devices` does not have one entry per copy. Threads: not while a copy is in use.
void execute_replication_callbacks(std::span<const std::shared_ptr<torch::nn::Module>> replicas,
                                   const ReplicationInfo& about = {},
                                   std::source_location where = std::source_location::current());

/// Shared by the copies of one submodule during execute_replication_callbacks.
class CallbackContext {
 public:
  /// The number of copies of this submodule.
  int n_copies() const { return n_copies_; }
  /// Device of the called copy: that of its first parameter or buffer, the CPU if it has none.
  at::Device device() const { return device_; }
  /// The submodule that this one is a copy of; null if the original was not given.
  torch::nn::Module* original() const { return original_; }

  /// This submodule's T, created on the first call; the reference is valid as long as the context.
  template <std::default_initializable T>
  T& state() {
    auto& slot = states_[typeid(T)];
    if (!slot) slot = std::make_shared<T>();
    return *static_cast<T*>(slot.get());
  }

 private:
  friend void execute_replication_callbacks(std::span<const std::shared_ptr<torch::nn::Module>>,
                                            const ReplicationInfo&, std::source_location);

  int n_copies_ = 0;
  at::Device device_ = at::kCPU;
  torch::nn::Module* original_ = nullptr;
  std::map<std::type_index, std::shared_ptr<void>> states_;
};

/// Base class, in addition to Module, of modules that need to know which copy they are.
class ReplicationCallback {
 public:
  virtual ~ReplicationCallback() = default;

  /// Called after every replication, on one thread: first for copy 0's modules, then copy 1's, ...
  virtual void on_replicate(CallbackContext& context, int copy_id) = 0;

  /// Called on the copy's thread after the forward of this module's copy has thrown `error`.
  /// Must release the copies that wait for this one. Must not throw.
  virtual void on_failure([[maybe_unused]] const std::exception_ptr& error) {}
};

/// The same for copies of a known type.
template <ModuleHandle M>
requires(!std::same_as<M, std::shared_ptr<torch::nn::Module>>) void execute_replication_callbacks(
    const std::vector<M>& replicas, const ReplicationInfo& about = {},
    std::source_location where = std::source_location::current()) {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  for (M replica : replicas) {  // copies the handle: a const handle gives a const module
    torch::nn::Module& module = *replica;
    modules.push_back(module.shared_from_this());
  }
  execute_replication_callbacks(modules, about, where);
}

/// For code that runs copies itself: calls on_failure of every ReplicationCallback in `replica`
/// after its forward has thrown, so that no other copy waits. Call it on the copy's thread.
void execute_failure_callbacks(torch::nn::Module& replica, const std::exception_ptr& error);

namespace detail {

struct AnyCall {
  void operator()();
};
template <class F>
struct WithAnyCall : F, AnyCall {};
/// A class with a call operator, which may be overloaded or a template: with two bases that have
/// one, the name operator() is ambiguous.
template <class F>
concept FunctionObject = std::is_class_v<F> &&
    (std::is_final_v<F> || !requires { &WithAnyCall<F>::operator(); });

/// The module of the first argument, if that is a ModuleHandle.
template <class... Args>
std::shared_ptr<torch::nn::Module> original_of(Args&... args) {
  std::shared_ptr<torch::nn::Module> module;
  if constexpr (sizeof...(Args) > 0) {
    auto& first = std::get<0>(std::tie(args...));
    if constexpr (ModuleHandle<std::remove_cvref_t<decltype(first)>>) {
      auto handle = first;  // a const handle gives a const module
      torch::nn::Module& its = *handle;
      module = its.shared_from_this();
    }
  }
  return module;
}

}  // namespace detail

/// A function or a function object.
template <class F>
concept ReplicateFunction = std::is_function_v<std::remove_pointer_t<std::remove_cvref_t<F>>> ||
    detail::FunctionObject<std::remove_cvref_t<F>>;

/// Wraps your replicate function, which returns a vector of the copies, and calls the callbacks
/// after it. If its first argument is the module, that is CallbackContext::original.
template <class Replicate>
auto patch_replication_callback(Replicate replicate) {
  static_assert(ReplicateFunction<Replicate>,
                "patch_replication_callback takes a function that makes the copies of a module");
  return [replicate = std::move(replicate)](auto&&... args) {
    const ReplicationInfo about{.original = detail::original_of(args...)};
    auto replicas = replicate(std::forward<decltype(args)>(args)...);
    static_assert(
        requires { execute_replication_callbacks(replicas, about); },
        "the function given to patch_replication_callback must return a std::vector of the "
        "copies: of ModuleHolders or of std::shared_ptr to modules");
    execute_replication_callbacks(replicas, about);
    return replicas;
  };
}

}  // namespace lockstep::nn
