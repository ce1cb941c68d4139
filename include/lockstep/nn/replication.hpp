#pragma once

#include <torch/nn/module.h>

#include <concepts>
#include <exception>
#include <map>
#include <memory>
#include <source_location>
#include <span>
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

/// What the copies of one submodule share while they are told who they are.
class CallbackContext {
 public:
  /// This position's T, made on the first call; the reference lives as long as the context.
  template <std::default_initializable T>
  T& state() {
    auto& slot = states_[typeid(T)];
    if (!slot) slot = std::make_shared<T>();
    return *static_cast<T*>(slot.get());
  }

 private:
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

/// Tells every ReplicationCallback in the copies of a module who it is. There is one context for
/// each submodule of copy 0 (a submodule that stands in two places is one); they live until the
/// call returns, states that somebody shares live on.
/// Throws UsageError where there is no copy, a null one, or one that is built unlike copy 0; no
/// callback has run then. Threads: not while a copy is in use.
void execute_replication_callbacks(std::span<const std::shared_ptr<torch::nn::Module>> replicas,
                                   std::source_location where = std::source_location::current());

/// The same for copies of a known type.
template <ModuleHandle M>
requires(!std::same_as<M, std::shared_ptr<torch::nn::Module>>) void execute_replication_callbacks(
    const std::vector<M>& replicas, std::source_location where = std::source_location::current()) {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  for (M replica : replicas) {  // a handle; a const one gives no module to change
    torch::nn::Module& module = *replica;
    modules.push_back(module.shared_from_this());
  }
  execute_replication_callbacks(modules, where);
}

/// For those who run copies by themselves: tells every ReplicationCallback in `replica` that its
/// forward has thrown, so that no other copy waits for it. Call it on the copy's thread.
void execute_failure_callbacks(torch::nn::Module& replica, const std::exception_ptr& error);

/// Your own replicate (it returns a vector of the copies) with the callbacks called after it.
template <class Replicate>
auto patch_replication_callback(Replicate replicate) {
  return [replicate = std::move(replicate)](auto&&... args) {
    auto replicas = replicate(std::forward<decltype(args)>(args)...);
    execute_replication_callbacks(replicas);
    return replicas;
  };
}

}  // namespace lockstep::nn
