#include "nn/ddp/shards.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/Version.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <limits>
#include <lockstep/detail/collective.hpp>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/sync_batch_norm_scope.hpp>
#include <lockstep/objects.hpp>
#include <lockstep/world.hpp>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>

#include "base/hash.hpp"
#include "group/native_engine.hpp"
#include "group/root_cause.hpp"
#include "kernels/isa.hpp"
#include "nn/ddp/shard_range.hpp"
#include "nn/error.hpp"
#include "world/session.hpp"
#include "world/variables.hpp"

namespace lockstep::nn::detail {
namespace {

constexpr const char* kRunShards = "DistributedDataParallel::run_shards";
constexpr int kMaxShards = 512;  // see NativeEngine::divide

at::Tensor generator_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

bool flushes_denormal_numbers() {
  const std::atomic<float> smallest = std::numeric_limits<float>::min();  // not a constant
  return smallest.load() / 2 == 0;
}

/// What the bits of a step depend on, beside its operands.
std::vector<std::string> arithmetic_here(const DistributedDataParallelOptions& options) {
  const auto& context = at::globalContext();
  std::vector<std::string> lines = {
      fmt::format("{} shards", options.shards),
      fmt::format("{} intra-op threads", options.shard_threads),
      fmt::format("libtorch {}", TORCH_VERSION),
      fmt::format("lockstep's kernels for {}", name_of(kernels::chosen_isa())),
      fmt::format("rounding mode {}", std::fegetround()),
      fmt::format("denormal numbers {}", flushes_denormal_numbers() ? "flushed" : "kept"),
      fmt::format("deterministic algorithms {}", context.deterministicAlgorithms() ? "on" : "off"),
      fmt::format("oneDNN {}", context.userEnabledMkldnn() ? "on" : "off"),
      fmt::format("float32_matmul_precision {}",
                  static_cast<int>(context.float32MatmulPrecision()))};
  const std::string config = at::show_config();
  const std::size_t begin = config.find("CPU capability usage");
  if (begin != config.npos) {
    lines.push_back("ATen's " + config.substr(begin, config.find('\n', begin) - begin));
  }
  for (const char* name : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR"}) {
    lines.push_back(fmt::format("{}={}", name, internal::variable(name).value_or("")));
  }
  return lines;
}

/// Throws the same MismatchError on every rank.
void check_same_arithmetic(const DistributedDataParallelOptions& options, const Group& group,
                           std::source_location where) {
  const auto all = all_gather_object(arithmetic_here(options), group, Timeout(), where);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const std::size_t n = std::min(all[0].size(), all[rank].size());
    std::size_t i = 0;
    while (i + 1 < n && all[0][i] == all[rank][i]) ++i;
    throw MismatchError(context_of(kRunShards, group, where),
                        fmt::format("the ranks would not compute the same bits: rank 0 has {}, "
                                    "rank {} has {}: make them equal",
                                    all[0][i], rank, all[rank][i]));
  }
}

std::int64_t n_samples_of(const std::vector<at::Tensor>& batch, const ErrorContext& context) {
  std::optional<std::int64_t> n;
  for (const at::Tensor& tensor : batch) {
    const std::int64_t mine = tensor.defined() && tensor.dim() > 0 ? tensor.size(0) : -1;
    if (mine >= 0 && n.value_or(mine) == mine) {
      n = mine;
      continue;
    }
    throw UsageError(context,
                     "the tensors of the batch need the samples in their first dimension, the same "
                     "number in all");
  }
  return n.value_or(0);
}

/// The elements that a gradient has.
at::Tensor elements_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient.coalesce().values() : gradient;
}

bool is_zero(const at::Tensor& gradient) { return !elements_of(gradient).ne(0).any().item<bool>(); }

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

/// Whether it is an error of the shards' group or of a group made of it, which all shards have, and
/// after which their groups may still be usable.
bool is_of_all_shards(const std::exception_ptr& error, const Group& shards) {
  if (!internal::is_collective_error(error)) return false;
  try {
    std::rethrow_exception(error);
  } catch (const Error& of_group) {
    const std::string_view group = of_group.context().group;
    return group == shards.name() || group.starts_with(shards.name() + "/");
  }
}

/// Those of the rank whose shards run.
std::vector<int> counts_of(int n_shards, const Group& group) {
  std::vector<int> counts;
  for (int r = 0; r < group.size(); ++r) {
    counts.push_back(static_cast<int>(shards_of(r, group.size(), n_shards).size()));
  }
  return counts;
}

}  // namespace

Shards::Shards(torch::nn::Module& module, const DistributedDataParallelOptions& options,
               std::source_location where)
    : module_(module),
      n_shards_(options.shards),
      n_threads_(options.shard_threads),
      is_alone_(!options.group && !is_distributed()),
      group_([&] {
        const Group given = options.group ? *options.group : default_group(where);
        return internal::follow_world(given, context_of(kRunShards, given, where));
      }()),
      copies_(module.shared_from_this(), {}, where, ModuleCopies::Of::shards) {
  lockstep::detail::Collective(kRunShards, group_, where).run([&] {
    check_options(options, where);
    check_n_threads(where);
    const std::vector<int> counts = counts_of(n_shards_, group_);
    n_mine_ = static_cast<std::size_t>(counts[static_cast<std::size_t>(group_.rank())]);
    structure_ = structure();
    for (const auto& item : module_.named_modules()) {
      auto* const layer = dynamic_cast<NamedLayer*>(item.value().get());
      if (layer != nullptr) layers_.emplace_back(item.key(), layer);
    }
    copies_.prepare(std::max<std::size_t>(n_mine_ - 1, 1));  // one, to see whether it can be copied
    if (n_mine_ == 1) copies_.clear();
    if (n_mine_ > 1) threads_ = std::make_unique<ReplicaThreads>(n_mine_ - 1, kRunShards, where);
    check_same_arithmetic(options, group_, where);
    groups_ = internal::NativeGroup::divide(group_, counts, where);
  });
  reducers_.resize(n_mine_);
  run([&](std::size_t i) {
    DistributedDataParallelOptions own = options;
    own.group = groups_[i];
    own.shards = 0;
    const auto values = i == 0 ? GradientBuckets::Values::own : GradientBuckets::Values::of_another;
    reducers_[i] = std::make_shared<Reducer>(module_of(i), own, where,
                                             OfShard{.values = values, .runs = &runs_});
  });
}

void Shards::check_options(const DistributedDataParallelOptions& options,
                           std::source_location where) const {
  if (n_shards_ < group_.size() || n_shards_ > kMaxShards) {
    throw usage(where, fmt::format("{} shards for {} ranks: expected as many as ranks at least and "
                                   "{} at most; it is the largest number of ranks that the "
                                   "training is to have",
                                   n_shards_, group_.size(), kMaxShards));
  }
  if (options.comm_hook || options.hook) {
    throw usage(where,
                "a communication hook decides itself in what order gradients are added: "
                "not with shards");
  }
  for (const at::Tensor& parameter : module_.parameters()) {
    if (!parameter.is_cpu()) throw usage(where, "shards are threads, for parameters on the CPU");
  }
}

/// The optimizer and clip_grad_norm_ add in parts of a thread each, too.
void Shards::check_n_threads(std::source_location where) const {
  if (at::get_num_threads() == n_threads_) return;
  throw usage(where,
              fmt::format("this rank has {} intra-op threads, and shard_threads is {}: the bits "
                          "depend on it. Call torch::set_num_threads({}) where the program starts "
                          "(`lockstep run` sets OMP_NUM_THREADS by the number of ranks), or set "
                          "shard_threads",
                          at::get_num_threads(), n_threads_, n_threads_));
}

UsageError Shards::usage(std::source_location where, const std::string& text) const {
  return {context_of(kRunShards, group_, where), text};
}

Shards::Structure Shards::structure() const {
  return {.modules = module_.modules(),
          .n_parameters = module_.parameters().size(),
          .n_buffers = module_.buffers().size()};
}

void Shards::abandon(std::size_t i, const std::exception_ptr& error) const noexcept {
  const std::string text = lockstep::detail::Collective::reason_of(error);
  groups_[i].abandon(text);
  if (reducers_[i]) reducers_[i]->abandon(text);
}

void Shards::run(const std::function<void(std::size_t)>& body) {
  std::vector<std::exception_ptr> errors(n_mine_);
  const auto attempt = [&](std::size_t i) {
    try {
      const GroupScope scope(groups_[i]);
      body(i);
    } catch (...) {
      errors[i] = std::current_exception();
      if (!is_of_all_shards(errors[i], groups_[i])) abandon(i, errors[i]);
    }
  };
  if (n_mine_ == 1) {
    attempt(0);
  } else {
    const at::ThreadLocalState callers;
    std::fenv_t environment{};  // whether denormal numbers are flushed to zero, and rounding
    std::fegetenv(&environment);
    threads_->run(
        n_mine_ - 1,
        [&](std::size_t i) {
          const at::ThreadLocalStateGuard as_the_caller(callers);
          std::fesetenv(&environment);
          if (at::get_num_threads() != n_threads_) at::set_num_threads(n_threads_);
          attempt(i + 1);
        },
        [&] { attempt(0); });
  }
  const std::size_t cause = internal::root_cause_of(errors);
  if (cause < errors.size()) std::rethrow_exception(errors[cause]);
}

std::optional<lockstep::detail::Collective> Shards::before_forward(
    const std::optional<std::source_location>& where) {
  if (at::GradMode::is_enabled() && module_.is_training()) {
    throw usage(where.value_or(std::source_location()),
                "this object has shards: train with run_shards, not with forward");
  }
  return std::nullopt;
}

void Shards::add_no_sync(int n) {
  n_no_sync_ += n;
  for (const auto& reducer : reducers_) reducer->add_no_sync(n);
}

void Shards::join(const std::function<void()>&, const JoinOptions&, std::function<at::Tensor()>,
                  std::source_location where) {
  throw usage(where,
              "join is for ranks with different numbers of steps, and shards have the same "
              "number of them: a step of too few samples leaves shards without any");
}

std::vector<std::int64_t> Shards::sizes_of_shards(const std::vector<std::int64_t>& n_samples,
                                                  std::source_location where) {
  n_samples_ = std::reduce(n_samples.begin(), n_samples.end());
  if (n_samples_ == 0) throw usage(where, "no rank has a sample");
  std::vector<std::int64_t> mine;
  for (int r = 0; r < group_.size(); ++r) {
    std::int64_t expected = 0;
    for (const std::size_t s : shards_of(r, group_.size(), n_shards_)) {
      const std::int64_t size = size_of_shard(s, n_samples_, n_shards_);
      expected += size;
      if (r == group_.rank()) mine.push_back(size);
    }
    const std::int64_t got = n_samples[static_cast<std::size_t>(r)];
    if (got == expected) continue;
    throw usage(where,
                fmt::format("rank {} has {} samples of a step of {} in {} shards; expected {}, "
                            "those of its shards one after the other, as the samplers return them "
                            "with .shards = {}",
                            r, got, n_samples_, n_shards_, expected, n_shards_));
  }
  return mine;
}

void Shards::check_before_step(std::source_location where) const {
  internal::check_not_left(group_, context_of(kRunShards, group_, where));
  if (is_alone_ && is_distributed()) {
    throw usage(where,
                "this object was made before this rank was in a world: make it after init_dist, or "
                "give it a group");
  }
  check_n_threads(where);
  if (structure() != structure_) {
    throw usage(where,
                "modules, parameters or buffers have been added or removed since this object was "
                "made: make a new one");
  }
  for (const auto& [name, layer] : layers_) {
    if (layer->has_group()) {
      throw usage(where, fmt::format("'{}' has been given a group, which knows no shards: convert "
                                     "it without one",
                                     name));
    }
  }
}

void Shards::check_after_step(std::source_location where) const {
  if (has_drawn_) {
    throw usage(where,
                "torch's generator has drawn random numbers meanwhile (dropout, another function "
                "of torch that draws, or a worker that loads data): which shard draws which "
                "depends on the number of ranks");
  }
  if (!changed_parameter_.empty()) {
    throw usage(where, fmt::format("the function has changed parameter {} (max_norm of an "
                                   "embedding, an assignment in forward): each shard would do so",
                                   changed_parameter_));
  }
  if (!differing_buffer_.empty()) {
    throw usage(where, fmt::format("buffer '{}' differs between the shards: what a layer learns "
                                   "from its samples outside the gradients must be of all shards, "
                                   "as SyncBatchNorm's statistics are",
                                   differing_buffer_));
  }
}

/// The first that is not the same on all shards.
std::string Shards::differing_buffer(std::size_t i, std::source_location where) {
  const auto buffers = module_of(i).named_buffers();
  std::vector<std::uint32_t> mine;
  for (const auto& item : buffers) {
    const at::Tensor whole = item.value().contiguous();
    const std::uint64_t hash = base::hash_of_bytes(whole.data_ptr(), whole.nbytes());
    mine.push_back(static_cast<std::uint32_t>(hash ^ (hash >> 32)));
  }
  const std::size_t n = mine.size();
  std::vector<std::int64_t> bounds;
  for (const std::int64_t hash : mine) bounds.insert(bounds.end(), {hash, -hash});
  groups_[i].all_reduce({bounds.data(), bounds.size(), DType::i64}, ReduceOp::max, {}, where);
  for (std::size_t k = 0; k < n; ++k) {
    if (bounds[2 * k] != -bounds[2 * k + 1]) return buffers[k].key();
  }
  return {};
}

/// A copy's gradients are those of the module, whatever the program has done to them: cleared,
/// clipped, set by hand. Those that accumulate are sums of their own, which only clearing may
/// change.
void Shards::share_gradients(std::source_location where) {
  if (n_mine_ == 1 && !accumulated_) return;
  const at::NoGradGuard no_grad;
  const auto originals = module_.named_parameters();
  for (std::size_t k = 0; k < originals.size(); ++k) {
    const at::Tensor& gradient = originals[k].value().grad();
    const bool is_cleared = !gradient.defined();
    bool is_zeroed = false;
    if (!is_cleared && accumulated_) {
      // Not by its version: clip_grad_norm_ changes it through data().
      const at::Tensor& before = (*accumulated_)[k];
      if (!before.defined() || !elements_of(gradient).equal(elements_of(before))) {
        is_zeroed = is_zero(gradient);
        if (!is_zeroed) {
          throw usage(where, fmt::format("the gradient of {} has been changed between two steps of "
                                         "no_sync(), in which the shards of this rank add up "
                                         "gradients of their own",
                                         originals[k].key()));
        }
      }
    }
    for (std::size_t i = 1; i < n_mine_; ++i) {
      at::Tensor& mine = copies_.parameter(i - 1, k).mutable_grad();
      if (is_cleared) {
        mine.reset();
      } else if (is_zeroed) {
        if (mine.defined()) mine.zero_();
      } else if (accumulated_) {
        continue;
      } else if (mine.defined() && !mine.is_sparse() && !gradient.is_sparse()) {
        mine.copy_(gradient);
      } else {
        mine = gradient.clone();
      }
    }
  }
}

/// A parameter that only a copy has used gets a gradient of zeros, so that clearing it can be seen.
void Shards::keep_accumulated() {
  accumulated_.reset();
  if (n_no_sync_ == 0) return;
  const at::NoGradGuard no_grad;
  accumulated_.emplace();
  const auto parameters = module_.parameters();
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    at::Tensor& gradient = parameters[k].mutable_grad();
    for (std::size_t i = 1; i < n_mine_ && !gradient.defined(); ++i) {
      if (copies_.parameter(i - 1, k).grad().defined()) gradient = at::zeros_like(parameters[k]);
    }
    accumulated_->push_back(gradient.defined() ? gradient.clone() : at::Tensor());
  }
}

void Shards::forget_groups_of_layers() {
  for (const auto& [name, layer] : layers_) layer->set_group({});
  for (std::size_t i = 1; i < n_mine_; ++i) {
    for (const auto& one : module_of(i).modules()) {
      if (auto* const layer = dynamic_cast<NamedLayer*>(one.get())) layer->set_group({});
    }
  }
}

double Shards::run_shards(const ShardedStep& step, std::source_location where) {
  if (runs_) throw usage(where, "run_shards was called in the function of run_shards");
  std::vector<std::int64_t> n_samples(static_cast<std::size_t>(group_.size()));
  lockstep::detail::Collective(kRunShards, group_, where).run([&] {
    check_before_step(where);
    if (n_mine_ > 1) copies_.prepare(n_mine_ - 1);
    share_gradients(where);
    const std::int64_t mine = n_samples_of(step.batch, context_of(kRunShards, group_, where));
    group_.all_gather({&mine, 1, DType::i64}, {n_samples.data(), n_samples.size(), DType::i64}, {},
                      where);
  });
  const std::vector<std::int64_t> sizes = sizes_of_shards(n_samples, where);
  generator_before_ = generator_state();
  forget_groups_of_layers();
  // Later forwards are the rank's again.
  const auto as_before = c10::make_scope_exit([this] {
    runs_ = false;
    forget_groups_of_layers();
  });
  runs_ = true;
  std::vector<double> losses(n_mine_);
  try {
    step.divide(sizes);
  } catch (...) {
    for (std::size_t i = 0; i < n_mine_; ++i) abandon(i, std::current_exception());
    throw;
  }
  run([&](std::size_t i) { losses[i] = run_one(i, step, where); });
  keep_accumulated();
  lockstep::detail::Collective(kRunShards, group_, where).run([&] { check_after_step(where); });
  return losses.front();
}

double Shards::run_one(std::size_t i, const ShardedStep& step, std::source_location where) {
  // Its guard would make a refused call of a forward that throws; abandon() ends the groups.
  reducers_[i]->before_forward(where);
  torch::OrderedDict<std::string, at::Tensor> parameters;  // memory that the shards share
  std::vector<std::uint32_t> versions;
  if (i == 0) {
    parameters = module_.named_parameters();
    for (const auto& parameter : parameters) versions.push_back(version_of(parameter.value()));
  }
  const SyncBatchNormScope scope(groups_[i], where);
  const at::Tensor sum = step.loss(i, module_of(i));
  if (!sum.defined() || sum.numel() != 1) {
    throw usage(where,
                "the function must return the sum of the losses of the shard's samples, a "
                "tensor of one number");
  }
  const auto n_samples = static_cast<double>(n_samples_);
  double mean = sum.item<double>() / n_samples;
  // The Reducer takes the mean over the shards.
  (sum * (n_shards_ / n_samples)).backward();
  groups_[i].all_reduce({&mean, 1, DType::f64}, ReduceOp::sum, {}, where);
  // All functions have returned; and until the next call has, no rank goes on, and draws.
  if (i == 0) {
    has_drawn_ = !generator_before_.equal(generator_state());
    changed_parameter_.clear();
    for (std::size_t k = 0; k < parameters.size() && changed_parameter_.empty(); ++k) {
      if (version_of(parameters[k].value()) == versions[k]) continue;
      changed_parameter_ = parameters[k].key();
    }
  }
  const std::string differing = differing_buffer(i, where);
  if (i == 0) differing_buffer_ = differing;
  return mean;
}

}  // namespace lockstep::nn::detail
