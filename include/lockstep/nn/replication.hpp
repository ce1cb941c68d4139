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

/// What holds a module: a ModuleHolder such as torch::nn::Sequential, or a shared_ptr.
template <class M>
concept ModuleHandle = requires(M& module) {
  { *module } -> std::convertible_to<torch::nn::Module&>;
};

namespace detail {
/// A mistake in the place of a ModuleHandle, answered in one sentence.
template <class M>
consteval bool require_module_handle() {
  static_assert(ModuleHandle<M>,
                "lockstep: this takes a ModuleHolder (as TORCH_MODULE makes it) or a "
                "std::shared_ptr to a torch::nn::Module; for a torch::jit::Module write a "
                "torch::nn::Module that registers its parameters and calls it (docs/ddp.md)");
  return true;
}
}  // namespace detail

class CallbackContext;

/// What is known of a replication besides its copies.
struct ReplicationInfo {
  /// The module that the copies were made of.
  std::shared_ptr<torch::nn::Module> original{};
  /// Of each copy; empty: those of the copies' parameters and buffers.
  std::vector<at::Device> devices{};
};

/// Tells every ReplicationCallback in the copies of a module who it is. There is one context for
/// each submodule of copy 0 (a submodule that stands in two places is one); they live until the
/// call returns, states that somebody shares live on.
/// Throws UsageError where there is no copy, a null one, or one (or the original) that is built
/// unlike copy 0, or `devices` are not one for each; no callback has run then. Threads: not while a
/// copy is in use.
void execute_replication_callbacks(std::span<const std::shared_ptr<torch::nn::Module>> replicas,
                                   const ReplicationInfo& about = {},
                                   std::source_location where = std::source_location::current());

/// What the copies of one submodule share while they are told who they are.
class CallbackContext {
 public:
  int n_copies() const { return n_copies_; }
  /// Of the copy that is told: of its first parameter or buffer, the CPU where it has none.
  at::Device device() const { return device_; }
  /// The submodule that this one is a copy of; null where nobody said what was copied.
  torch::nn::Module* original() const { return original_; }

  /// This position's T, made on the first call; the reference lives as long as the context.
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

/// A module that wants to know which copy it is derives from it as well.
class ReplicationCallback {
 public:
  virtual ~ReplicationCallback() = default;

  /// Called after every replication, on one thread: copy 0's modules first, then copy 1's, ...
  virtual void on_replicate(CallbackContext& context, int copy_id) = 0;

  /// The copy that this module belongs to has thrown `error` in its forward; on its thread.
  /// Release the copies that wait for this one. Must not throw.
  virtual void on_failure([[maybe_unused]] const std::exception_ptr& error) {}
};

/// The same for copies of a known type.
template <ModuleHandle M>
requires(!std::same_as<M, std::shared_ptr<torch::nn::Module>>) void execute_replication_callbacks(
    const std::vector<M>& replicas, const ReplicationInfo& about = {},
    std::source_location where = std::source_location::current()) {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  for (M replica : replicas) {  // a handle; a const one gives no module to change
    torch::nn::Module& module = *replica;
    modules.push_back(module.shared_from_this());
  }
  execute_replication_callbacks(modules, about, where);
}

/// For those who run copies by themselves: tells every ReplicationCallback in `replica` that its
/// forward has thrown, so that no other copy waits for it. Call it on the copy's thread.
void execute_failure_callbacks(torch::nn::Module& replica, const std::exception_ptr& error);

namespace detail {

struct AnyCall {
  void operator()();
};
template <class F>
struct WithAnyCall : F, AnyCall {};
/// A class with a call operator, overloaded or a template as it may be: AnyCall's is then
/// ambiguous.
template <class F>
concept FunctionObject = std::is_class_v<F> &&
    (std::is_final_v<F> || !requires { &WithAnyCall<F>::operator(); });

/// The module of the first argument, if that is a handle of one.
template <class... Args>
std::shared_ptr<torch::nn::Module> original_of(Args&... args) {
  std::shared_ptr<torch::nn::Module> module;
  if constexpr (sizeof...(Args) > 0) {
    auto& first = std::get<0>(std::tie(args...));
    if constexpr (ModuleHandle<std::remove_cvref_t<decltype(first)>>) {
      auto handle = first;  // a const one gives no module to change
      torch::nn::Module& its = *handle;
      module = its.shared_from_this();
    }
  }
  return module;
}

}  // namespace detail

/// A function, or an object that can be called like one.
template <class F>
concept ReplicateFunction = std::is_function_v<std::remove_pointer_t<std::remove_cvref_t<F>>> ||
    detail::FunctionObject<std::remove_cvref_t<F>>;

/// Your own replicate with the callbacks called after it: it returns a vector of the copies, and
/// where its first argument is the module, that is CallbackContext::original.
template <class Replicate>
auto patch_replication_callback(Replicate replicate) {
  static_assert(ReplicateFunction<Replicate>,
                "patch_replication_callback takes your function that makes the copies of a module");
  return [replicate = std::move(replicate)](auto&&... args) {
    const ReplicationInfo about{.original = detail::original_of(args...)};
    auto replicas = replicate(std::forward<decltype(args)>(args)...);
    static_assert(
        requires { execute_replication_callbacks(replicas, about); },
        "the function given to patch_replication_callback returns a std::vector of the "
        "copies: of ModuleHolders or of std::shared_ptr to modules");
    execute_replication_callbacks(replicas, about);
    return replicas;
  };
}

}  // namespace lockstep::nn
