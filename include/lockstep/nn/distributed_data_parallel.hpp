#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/detail/collective.hpp>
#include <lockstep/group.hpp>
#include <lockstep/nn/parameter_modules.hpp>
#include <lockstep/nn/replication.hpp>
#include <lockstep/nn/tensor_trees.hpp>
#include <lockstep/world.hpp>

namespace lockstep::nn {

/// Argument of a communication hook: the gradients of one bucket, complete on this rank.
struct GradientBucket {
  at::Tensor gradients;   ///< 1-d, contiguous; the hook leaves the resulting gradients here
  std::size_t index = 0;  ///< in the order of communication, the same on all ranks
  Group group;            ///< DistributedDataParallel's own group, for the hook to use
};

/// Called in backward: starts the communication of a bucket and returns a function that completes
/// it, called before backward returns, bucket by bucket. Work on `group` may be pending in between.
using CommunicationHook = std::function<std::function<void()>(const GradientBucket&)>;

/// Hooks that send gradients as float16 or bfloat16: half the bytes of float32. The average is
/// computed in float32 and rounded once.
CommunicationHook f16_compression();
CommunicationHook bf16_compression();

/// Options of DistributedDataParallel. Names are PyTorch's where it has the option.
struct DistributedDataParallelOptions {
  std::optional<Group> group = {};  ///< unset: the default group when the module is wrapped
  double bucket_cap_mb = 25;        ///< MiB of gradients per bucket; 0: one parameter per bucket
  std::optional<double> bucket_size_mb = {};  ///< its former name; wins if set
  double first_bucket_cap_mb = 1;  ///< MiB; the first is small, so that communication starts early
  std::optional<double> first_bucket_size_mb = {};  ///< its former name; wins if set
  /// Broadcasts rank 0's buffers before every synchronised forward. Off, where PyTorch's default is
  /// on: the buffers of SyncBatchNorm are equal without it; those of a plain BatchNorm are not.
  bool broadcast_buffers = false;
  /// If a parameter got a gradient on some ranks only: true takes zero on the others; false throws
  /// MismatchError with its name on every rank.
  bool find_unused_parameters = false;
  /// Parameters that got no gradient on this rank in the first backward never get one, so their
  /// buckets need not wait for the end of backward. UsageError if one does get a gradient.
  bool static_graph = false;
  CommunicationHook comm_hook = {};  ///< replaces the all_reduce with mean
  CommunicationHook hook = {};       ///< its former name; wins if set
  /// In join(), gradients are averaged over the ranks that still have data, not over all.
  bool join_divides_by_active = false;
  /// Into how many shards each step is divided, for run_shards; the same bits for any number of
  /// ranks up to it. At most 512; 0: none.
  int shards = 0;
  /// Intra-op threads of each rank, with shards: their number decides how a kernel divides its
  /// sums. What they are is the program's to set (torch::set_num_threads); here it says so.
  int shard_threads = 1;
};

/// Options of DistributedDataParallel::join.
struct JoinOptions {
  /// An input of the module, for ranks that may have no batch at all; only shape and type matter.
  at::Tensor example_input = {};
  /// Instead of example_input, if forward takes other arguments: calls the wrapped module with
  /// inputs of 0 rows and returns a tensor of its output. Kept until join returns.
  std::function<at::Tensor()> example_forward = {};
  /// All optimizers with state (momentum, Adam): ranks out of data make no steps, and get the state
  /// of a rank that trained longest. In the same order on all ranks.
  std::vector<torch::optim::Optimizer*> optimizers = {};
};

namespace detail {
/// What is done around the forwards of a module whose gradients are averaged.
class Synchroniser {
 public:
  virtual ~Synchroniser() = default;
  /// `where`: the source line of the forward call, if known. Returns the guard of the module's
  /// forward, if a backward with messages follows it on the other ranks: a forward that throws is
  /// then a refused call.
  virtual std::optional<lockstep::detail::Collective> before_forward(
      const std::optional<std::source_location>& where) = 0;
  virtual bool wants_outputs() const = 0;
  /// Adds hooks to the outputs of a forward. Call only if wants_outputs().
  virtual void after_forward(const std::vector<at::Tensor>& outputs) = 0;
  virtual bool wants_shadow() const = 0;
  /// `shadow`: repeats the last forward with 0 samples.
  virtual void set_shadow(std::function<at::Tensor()> shadow) = 0;
  /// One guard more, or less.
  virtual void add_no_sync(int n) = 0;
  /// `example`: a forward with 0 samples, for this join only; may be empty.
  virtual void join(const std::function<void()>& body, const JoinOptions& options,
                    std::function<at::Tensor()> example, std::source_location where) = 0;
  /// A step in shards.
  struct ShardedStep {
    std::vector<at::Tensor> batch;  ///< of this rank's samples
    /// Divides the batch into shards of so many samples.
    std::function<void(const std::vector<std::int64_t>& sizes)> divide;
    /// The sum of the losses of the rank's i-th shard, on the shard's thread.
    std::function<at::Tensor(std::size_t i, torch::nn::Module& copy)> loss;
  };
  /// Forward and backward of each shard. Returns the mean loss over all samples.
  virtual double run_shards(const ShardedStep& step, std::source_location where) = 0;
};
std::shared_ptr<Synchroniser> make_synchroniser(torch::nn::Module& module,
                                                const DistributedDataParallelOptions& options,
                                                std::source_location where);

/// In place of an argument of forward that is not given.
struct NoArgument {
  explicit NoArgument() = default;  // not of {}
};
template <class T>
inline constexpr bool kIsGiven = !std::same_as<std::remove_cvref_t<T>, NoArgument>;

/// What DistributedDataParallel makes a module of.
template <class T>
inline constexpr bool kIsNoModule =
    std::same_as<T, torch::jit::Module> || std::same_as<T, std::vector<at::Tensor>> ||
    std::same_as<T, torch::OrderedDict<std::string, at::Tensor>>;

/// An exception that leaves f is a refused call of the options' group.
template <class F>
auto collectively(const DistributedDataParallelOptions& options, std::source_location where,
                  const F& f) {
  const Group group = options.group ? *options.group : default_group();
  return lockstep::detail::Collective("DistributedDataParallel", group, where).run(f);
}

/// The output of a forward that can be shadowed in join.
template <class T>
requires(std::same_as<T, at::Tensor> || std::same_as<T, at::IValue>) at::Tensor
    tensor_in(T output) {
  if constexpr (std::same_as<T, at::IValue>) {
    return tensor_of_output(output);
  } else {
    return output;
  }
}

template <class T>
T without_samples(T value) {
  for_each_tensor(value, [](at::Tensor& tensor) {
    if (tensor.defined() && tensor.dim() > 0) tensor = tensor.detach().narrow(0, 0, 0).clone();
  });
  return value;
}
/// Consecutive rows of a tensor in memory of their own, one for each of `sizes`.
std::vector<at::Tensor> copies_of_rows(const at::Tensor& tensor,
                                       const std::vector<std::int64_t>& sizes);
/// One value per shard.
template <class T>
std::vector<T> divide(const T& value, const std::vector<std::int64_t>& sizes) {
  std::vector<T> parts(sizes.size(), value);
  Tree<T>::visit(pointers_to(parts), [&sizes](const std::vector<at::Tensor*>& tensors) {
    const std::vector<at::Tensor> rows = copies_of_rows(*tensors[0], sizes);
    for (std::size_t i = 0; i < rows.size(); ++i) *tensors[i] = rows[i];
  });
  return parts;
}
}  // namespace detail

/// During its lifetime, forward passes of its DistributedDataParallel are not synchronised: their
/// backward only accumulates gradients on this rank.
class NoSync {
 public:
  explicit NoSync(std::shared_ptr<detail::Synchroniser> of) : of_(std::move(of)) {
    of_->add_no_sync(1);
  }
  ~NoSync() { of_->add_no_sync(-1); }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<detail::Synchroniser> of_;
};

/// Wraps a module (a ModuleHolder or a shared_ptr) and averages its gradients over the ranks. Also
/// takes a torch::jit::Module, whose forward it calls (`ddp(images).toTensor()`; open a
/// SyncBatchNormScope around it for its batch normalisations), and parameters without a module:
///
///     DistributedDataParallel ddp(parameters);   // std::vector<at::Tensor>, or named_parameters()
///     ddp.run([&] { return loss_of(parameters); }).backward();
///
/// Construction is collective over the group: names, shapes and types of parameters and buffers and
/// strides of parameters are compared (MismatchError on every rank, naming the first difference),
/// then rank 0's values are broadcast. A tensor with several names (tied weights) is averaged once;
/// it must have them on all ranks. Gradients use a separate group (Group::duplicate), so they never
/// interfere with modules that communicate in backward, such as SyncBatchNorm.
///
/// backward() returns with the same averaged gradients on every rank. The group's worker thread
/// reduces each bucket of gradients as soon as it is complete, overlapped with backward; gradients
/// are then views of the buckets, so nothing is copied back. One that the program has kept
/// (`auto g = p.grad()`) and dropped from the parameter keeps its values. With create_graph,
/// backward throws UsageError: averages have no graph; torch::autograd::grad gives the gradients
/// for a penalty on them. If the loss is a mean and the ranks have unequal parts of a batch, scale
/// it: sum over local samples / global batch * world size.
///
/// A parameter that got no gradient on any rank keeps what it has: none, or one that the program
/// has put there; for one that got none on this rank see find_unused_parameters. A rank with a loss
/// that depends on no parameter must not skip backward: the others wait for it. Parameters that do
/// not require gradients are ignored. A parameter that requires gradients or is registered later
/// (on all ranks alike), or was changed by torch::load, Module::to or set_data, is detected at the
/// next synchronised forward, and rank 0's values are broadcast. If backward is called before that
/// forward, it throws UsageError unless the gradients of the parameter are still averaged.
///
/// Gradients of a forward through the wrapped module itself are averaged too, but without the work
/// of this object's forward: no_sync, join, broadcast_buffers, detection of changed parameters. If
/// two live objects of this type share a parameter, backward throws UsageError.
///
/// After the first synchronised backward the buckets are rebuilt in the order in which rank 0's
/// gradients became ready.
///
/// If the module's forward throws in training mode, with gradients, outside no_sync and join, that
/// is a refused call of this object's group (see Group): on all ranks it costs nothing; on some
/// ranks only, every rank gets a MismatchError in backward or the next forward. An exception
/// between forward and backward is not detected: let it end the program, or throw it on all ranks.
///
/// Errors: backward() throws what the group's calls throw, with the line of the last forward (in
/// join: of join; after a forward of more than four arguments: of the construction) and the names
/// of the parameters concerned. After an exception in a synchronised backward the next forward
/// throws UsageError if there are other ranks, because ranks may be out of step: construct a new
/// object. Exception: after
/// the MismatchError of find_unused_parameters, zero the gradients and continue.
/// Parameters on several devices are a UsageError. Parameters on CUDA have their buckets on the
/// host: gradients are copied there and back.
/// Threads: use it from one thread. Copyable handle, like ModuleHolder.
template <class M>
class DistributedDataParallel {
  static_assert(detail::require_module_handle<M>());
  using Where = std::source_location;

 public:
  explicit DistributedDataParallel(M module, const DistributedDataParallelOptions& options = {},
                                   Where where = Where::current())
      : module_(std::move(module)),
        synchroniser_(detail::make_synchroniser(*module_, options, where)) {}
  /// Of a torch::jit::Module, or of parameters: M is ScriptModule or Parameters.
  template <class T>
  requires(detail::kIsNoModule<T>) explicit DistributedDataParallel(
      const T& wrapped, const DistributedDataParallelOptions& options = {},
      Where where = Where::current())
      : module_(detail::collectively(options, where, [&] { return M(wrapped); })),
        synchroniser_(detail::make_synchroniser(*module_, options, where)) {}

  /// The module's forward. A parameter pack cannot be followed by a defaulted `where`, so up to
  /// four arguments have parameters of their own.
  template <class A = detail::NoArgument, class B = detail::NoArgument,
            class C = detail::NoArgument, class D = detail::NoArgument>
  decltype(auto) forward(A&& a = A(), B&& b = B(), C&& c = C(), D&& d = D(),
                         Where where = Where::current()) {
    if constexpr (detail::kIsGiven<D>) {
      return forward_at(where, std::forward<A>(a), std::forward<B>(b), std::forward<C>(c),
                        std::forward<D>(d));
    } else if constexpr (detail::kIsGiven<C>) {
      return forward_at(where, std::forward<A>(a), std::forward<B>(b), std::forward<C>(c));
    } else if constexpr (detail::kIsGiven<B>) {
      return forward_at(where, std::forward<A>(a), std::forward<B>(b));
    } else if constexpr (detail::kIsGiven<A>) {
      return forward_at(where, std::forward<A>(a));
    } else {
      return forward_at(where);
    }
  }
  template <class... Args>
  requires(sizeof...(Args) > 4) decltype(auto) forward(Args&&... args) {
    return forward_at(std::nullopt, std::forward<Args>(args)...);
  }
  template <class A = detail::NoArgument, class B = detail::NoArgument,
            class C = detail::NoArgument, class D = detail::NoArgument>
  decltype(auto) operator()(A&& a = A(), B&& b = B(), C&& c = C(), D&& d = D(),
                            Where where = Where::current()) {
    return forward(std::forward<A>(a), std::forward<B>(b), std::forward<C>(c), std::forward<D>(d),
                   where);
  }
  template <class... Args>
  requires(sizeof...(Args) > 4) decltype(auto) operator()(Args&&... args) {
    return forward_at(std::nullopt, std::forward<Args>(args)...);
  }

  /// Runs `f` as the forward, for what is none: a loss computed from parameters, or another
  /// function of the module. Returns what f returns; a backward of it follows, as after forward. In
  /// join a rank out of data needs JoinOptions::example_forward.
  template <std::invocable F>
  decltype(auto) run(F&& f, Where where = Where::current()) {
    return run_at(
        where, [] { return std::function<at::Tensor()>(); }, std::forward<F>(f));
  }

  /// Forward and backward of one step in shards (DistributedDataParallelOptions::shards, S of
  /// them): the gradients are those of the mean loss over the samples of all ranks, bit for bit the
  /// same on any number of ranks up to S, and so is the returned mean loss.
  ///
  ///     ddp.run_shards(batch, [](Net& net, const auto& part) {
  ///       return nll_loss(net->forward(part.first), part.second, /*sum*/);
  ///     });
  ///
  /// `batch`: a tensor, or tensors in containers (tensor_trees.hpp), with the samples of this rank
  /// in the first dimension, those of its shards one after the other, as the samplers return them
  /// with the same number of shards. f(module, part) returns the sum of the losses of the shard's
  /// samples, of which there may be none. It is called once for each shard of this rank (S / ranks
  /// of them, consecutive), the first on this thread with the wrapped module, the others on threads
  /// of their own, at the same time, with copies of it (Module::clone) that share its parameters;
  /// in it default_group() is the group of the S shards, and training batch normalisation is over
  /// the samples of all shards, in layers converted or not (a SyncBatchNormScope is open; libtorch
  /// refuses a shard of one sample in a BatchNorm1d that is not converted). Copies are made with
  /// this object: what f writes to members of the module that are not buffers stays in the copy,
  /// and members and options of layers that the program changes later, and hooks of parameters, do
  /// not reach the copies.
  ///
  /// Collective. In no_sync() it only accumulates. Where ranks are threads or processes of one
  /// host; not of a torch::jit::Module or of parameters. UsageError on every rank: a rank has other
  /// samples than those of its shards; buffers that differ between shards after f. UsageError of
  /// the rank, which the others get as a refused call: layers with a group of their own; modules,
  /// parameters or buffers added since this object was made; another number of intra-op threads
  /// than shard_threads; random numbers drawn from torch's generator meanwhile (in f, or by a
  /// worker that loads data); parameters that f changes; a gradient that is changed, but not
  /// cleared, between steps of no_sync; a backward outside this call. MismatchError when this
  /// object is made: ranks with other options, instruction sets, settings of libtorch that change
  /// its arithmetic, or versions of it. An exception that leaves f ends the group of the shards:
  /// the others get PeerFailed, and all make a new object. forward is for evaluation then.
  template <class Batch, class F>
  double run_shards(const Batch& batch, F&& f, Where where = Where::current()) {
    static_assert((detail::Tree<Batch>::kHolds & ~detail::kUnordered) == detail::kTensors,
                  "lockstep: run_shards takes a batch of tensors and nothing else, which it could "
                  "not divide: a tensor, or a pair, tuple or vector of them");
    std::vector<Batch> parts;
    return synchroniser_->run_shards(
        {.batch = detail::tensors_of(batch),
         .divide = [&](const auto& sizes) { parts = detail::divide(batch, sizes); },
         .loss = [&](std::size_t i, torch::nn::Module& copy) -> at::Tensor {
           using Impl = std::remove_cvref_t<decltype(*module_)>;
           M mine(std::dynamic_pointer_cast<Impl>(copy.shared_from_this()));
           return f(mine, parts[i]);
         }},
        where);
  }

  /// Gradients of forward passes during the lifetime of the result only accumulate locally.
  [[nodiscard]] NoSync no_sync() const { return NoSync(synchroniser_); }

  /// For ranks with different numbers of batches. Runs `body`, the training loop. Then, while other
  /// ranks still train, this rank matches each of their steps with a forward and backward of 0
  /// samples, so that the collectives of this object and of the SyncBatchNorms in the module
  /// complete (also those of a SyncBatchNormScope in body): it contributes zero gradients and
  /// statistics of count 0. Finally all ranks get the parameters, buffers and optimizer states
  /// (JoinOptions) of the lowest rank among those that trained longest. Collective.
  ///
  /// If an optimizer with state such as momentum is not given, its steps would differ between the
  /// ranks afterwards: the following synchronised backwards compare the parameters and throw
  /// MismatchError.
  ///
  /// The module must accept inputs of 0 rows and return a tensor; tensors, also those in containers
  /// (tensor_trees.hpp), are sliced to 0 rows, and arguments without tensors are those of the last
  /// forward on this rank, as are the modules' modes (training or not). A rank that may have no
  /// batch must give an example, and every rank if an argument has another type that may hold
  /// tensors. `body` must call one backward per forward and must not communicate by other means,
  /// nor call join. If an exception leaves it, the other ranks get PeerFailed with its text. If it
  /// accumulates gradients, all but the last backward before an optimizer step must be in
  /// no_sync(): a rank out of data adds zeros, not the averages that the others have so far. An
  /// LBFGS with steps that depend on the loss, which differs between the ranks, is a UsageError;
  /// with max_iter(1) and no line search they do not depend on it.
  template <class Body>
  void join(Body&& body, const JoinOptions& options = {}, Where where = Where::current()) {
    std::function<at::Tensor()> example = options.example_forward;
    if (!example && options.example_input.defined()) {
      example = without_samples(options.example_input);
    }
    synchroniser_->join(std::forward<Body>(body), options, std::move(example), where);
  }
  template <class Body, std::convertible_to<at::Tensor> Example>
  void join(Body&&, Example&&, Where = Where::current()) {
    static_assert(
        !std::convertible_to<Example, at::Tensor>,
        "lockstep: join takes its options by name: join(body, {.example_input = tensor})");
  }
  M& module() { return module_; }
  const M& module() const { return module_; }

 private:
  template <class... Args>
  decltype(auto) forward_at(const std::optional<Where>& where, Args&&... args) {
    return run_at(
        where, [&] { return without_samples(args...); },
        [&]() -> decltype(auto) { return module_->forward(std::forward<Args>(args)...); });
  }

  /// `shadow` makes a forward of no samples.
  template <class Shadow, class F>
  decltype(auto) run_at(const std::optional<Where>& where, const Shadow& shadow, F&& f) {
    const auto guard = synchroniser_->before_forward(where);
    using Output = decltype(f());
    const auto forward = [&]() -> Output {
      if (synchroniser_->wants_shadow()) {
        if (auto empty = shadow()) synchroniser_->set_shadow(std::move(empty));
      }
      if constexpr (detail::kHasTensors<std::remove_cvref_t<Output>>) {
        decltype(auto) output = f();
        if (synchroniser_->wants_outputs()) {
          synchroniser_->after_forward(detail::tensors_of<std::remove_cvref_t<Output>>(output));
        }
        return output;
      } else {
        return f();
      }
    };
    return guard ? guard->run(forward) : forward();
  }

  /// A forward with these arguments and 0 samples; empty if forward does not return a tensor, or an
  /// argument may hold tensors that are not found.
  template <class... Args>
  std::function<at::Tensor()> without_samples(const Args&... args) {
    if constexpr (requires { detail::tensor_in(module_->forward(std::declval<Args&>()...)); } &&
                  ((std::copy_constructible<Args> &&
                    !(detail::Tree<Args>::kHolds & detail::kOpaque)) &&
                   ...)) {
      return [module = module_,
              empty = std::tuple<Args...>(detail::without_samples(args)...)]() mutable {
        return std::apply(
            [&](Args&... again) { return detail::tensor_in(module->forward(again...)); }, empty);
      };
    }
    return {};
  }

  M module_;
  std::shared_ptr<detail::Synchroniser> synchroniser_;
};

DistributedDataParallel(const torch::jit::Module&, const DistributedDataParallelOptions& = {},
                        std::source_location = std::source_location::current())
    ->DistributedDataParallel<ScriptModule>;
DistributedDataParallel(const std::vector<at::Tensor>&, const DistributedDataParallelOptions& = {},
                        std::source_location = std::source_location::current())
    ->DistributedDataParallel<Parameters>;
DistributedDataParallel(const torch::OrderedDict<std::string, at::Tensor>&,
                        const DistributedDataParallelOptions& = {},
                        std::source_location = std::source_location::current())
    ->DistributedDataParallel<Parameters>;

}  // namespace lockstep::nn
