#include "nn/ddp/reducer.hpp"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <lockstep/detail/collective.hpp>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/sync_batch_norm.hpp>
#include <lockstep/nn/tensor_ops.hpp>
#include <lockstep/trace.hpp>
#include <string>
#include <utility>

#include "base/exception.hpp"
#include "nn/ddp/in_sync.hpp"
#include "nn/elements/elements.hpp"
#include "nn/tensors/tensor_call.hpp"
#include "world/session.hpp"

namespace lockstep::nn::detail {
namespace {

/// Synchronised backwards after uneven data that compare the parameters: the first optimizer step
/// shows whether the optimizers' states are equal.
constexpr int kChecksAfterUnevenData = 4;
constexpr std::uint64_t kStepsBetweenChecks = 100;  // with LOCKSTEP_CHECK=full

void check_bucket_size(const char* name, double size_mb, const ErrorContext& context) {
  if (size_mb >= 0) return;  // not of a NaN
  throw UsageError(context,
                   fmt::format("{} is {}: expected MiB, as 25; infinity puts all gradients "
                               "of a type into one bucket, 0 each into its own",
                               name, size_mb));
}

/// With a group, and the options' present names.
DistributedDataParallelOptions completed(DistributedDataParallelOptions options,
                                         std::source_location where) {
  const Group given = options.group ? *options.group : default_group();
  options.group = internal::follow_world(given, context_of(kOperation, given, where));
  options.bucket_cap_mb = options.bucket_size_mb.value_or(options.bucket_cap_mb);
  options.first_bucket_cap_mb = options.first_bucket_size_mb.value_or(options.first_bucket_cap_mb);
  if (options.hook) options.comm_hook = std::move(options.hook);
  return options;
}

}  // namespace

Reducer::Reducer(torch::nn::Module& module, const DistributedDataParallelOptions& options,
                 std::source_location where, OfShard shard)
    : module_(module),
      options_(completed(options, where)),
      checks_fully_(options_.group->check() == Check::full),
      shard_runs_(shard.runs),
      is_alone_(!options.group && !is_distributed()),
      made_at_(where),
      gradients_(module, options_, site_,
                 {.on_gradient = [this](std::size_t parameter) { on_gradient(parameter); },
                  .is_averaged = [this] { return synchronises(); }},
                 shard.values),
      site_{.group = *options_.group, .where = where} {
  name_layers(module, Naming::on_all_ranks);  // for the errors of SyncBatchNorm
  const Group given = site_.group;
  lockstep::detail::Collective(kOperation, given, where).run([&] {
    site_.explain([] { return std::string("comparing the ranks' modules"); },
                  [&] {
                    check_bucket_size("bucket_cap_mb", options_.bucket_cap_mb, context());
                    check_bucket_size("first_bucket_cap_mb", options_.first_bucket_cap_mb,
                                      context());
                    gradients_.register_parameters();
                    for (at::Tensor buffer : module.buffers()) {
                      broadcast(buffer, /*src=*/0, site_.group, {}, where);
                    }
                    site_.group = site_.group.duplicate(where);
                    gradients_.allocate();
                  });
  });
}

double Reducer::run_shards(const ShardedStep&, std::source_location where) {
  throw UsageError(context_of(kOperation, site_.group, where),
                   "run_shards needs shards: set DistributedDataParallelOptions::shards");
}

void Reducer::check_world() const {
  internal::check_not_left(site_.group, context());
  if (is_alone_ && is_distributed()) {
    throw UsageError(context(),
                     "was made before this rank was in a world, whose gradients it would not "
                     "average: make it after init_dist, or give it a group");
  }
}

std::optional<lockstep::detail::Collective> Reducer::before_forward(
    const std::optional<std::source_location>& where) {
  check_world();
  shard_thread_ = std::this_thread::get_id();
  lockstep::detail::Collective(kOperation, site_.group, site_.where).run([&] {
    // In join the same line on all ranks, as LOCKSTEP_CHECK=full requires: some make no forward.
    if (!join_) site_.where = where.value_or(made_at_);
    check_last_step();
    if (!at::GradMode::is_enabled()) return;
    forward_ = n_no_sync_ == 0 ? Forward::synchronised : Forward::local;
    if (join_) join_->announce(n_no_sync_ == 0 ? NextStep::synchronise : NextStep::accumulate);
    prepare();
  });
  // The next message of all ranks is sent in backward, except in join, where it is an announcement.
  // In eval() this rank may be the only one that calls forward.
  const bool is_followed = at::GradMode::is_enabled() && forward_ == Forward::synchronised &&
                           !join_ && !gradients_.buckets().empty() && module_.is_training();
  if (!is_followed) return std::nullopt;
  return lockstep::detail::Collective(kOperation, site_.group, site_.where);
}

/// A backward that begins elsewhere belongs to a forward that bypassed DistributedDataParallel and
/// is synchronised. Autograd drops its queued callbacks when a backward ends, even by an exception.
void Reducer::after_forward(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([weak = weak_from_this()](const at::Tensor& /*gradient*/) {
      const auto self = weak.lock();
      if (!self || !self->local_backward_.expired()) return;
      const auto backward_token = std::make_shared<char>();
      self->local_backward_ = backward_token;
      torch::autograd::Engine::get_default_engine().queue_callback([backward_token] {});
    });
    forward_ = Forward::local_marked;
  }
}

void Reducer::check_last_step() {
  if (phase_ != Phase::reducing) return;
  if (site_.group.size() > 1) {
    throw UsageError(
        context(), fmt::format("the last backward ended with an exception after {} of {} buckets: "
                               "the ranks may be out of step. Build a new DistributedDataParallel, "
                               "over a new group if the exception says that this one is dead",
                               n_sent_, gradients_.buckets().size()));
  }
  for (Bucket& bucket : gradients_.buckets()) {
    bucket.work.wait();
    bucket.complete = nullptr;
  }
  phase_ = Phase::idle;
}

void Reducer::prepare() {
  if (forward_ != Forward::synchronised) return;
  phase_ = Phase::prepared;
  const std::string changed = gradients_.changed_parameter();
  site_.explain(
      [&] {
        return changed.empty() ? std::string("preparing a forward")
                               : fmt::format(
                                     "updating parameter {}, which was changed on this rank "
                                     "(torch::load, to(), set_data): change it on all ranks",
                                     changed);
      },
      [&] {
        if (!changed.empty()) gradients_.update();
        if (!options_.broadcast_buffers || site_.group.size() == 1) return;
        for (const at::Tensor& buffer : module_.buffers()) {
          // A graph of an earlier forward that saved the running statistics does not use them.
          at::Tensor values = buffer.variable_data();  // with a version of its own
          // In join rank 0 may be out of data.
          broadcast(values, std::max(join_ ? join_->last_active() : 0, 0), site_.group, {},
                    site_.where);
        }
      },
      changed.empty() ? Hint::join : Hint::none);
}

void Reducer::on_gradient(std::size_t index) {
  check_world();
  if (shard_runs_ != nullptr && !*shard_runs_) {
    throw UsageError(context(),
                     "this object has shards, whose gradients run_shards averages: no backward "
                     "outside it; torch::autograd::grad gives gradients to add by hand");
  }
  if (shard_runs_ != nullptr && shard_thread_ != std::this_thread::get_id()) {
    throw UsageError(context(),
                     "the function of run_shards used the wrapped module, or another shard's, and "
                     "not the one that it was given");
  }
  lockstep::detail::Collective(kOperation, site_.group, site_.where).run([&] {
    gradients_.parameters()[index].has_accumulated = true;
    if (!synchronises()) return;
    const at::NoGradGuard no_grad;
    if (phase_ != Phase::reducing) start_step();
    Parameter& parameter = gradients_.parameters()[index];
    if (parameter.ready && parameter.used) {
      throw UsageError(context(), fmt::format("parameter {} got two gradients in one backward: "
                                              "checkpointing inside the module is not supported",
                                              parameter.name));
    }
    if (!parameter.used) {
      throw UsageError(
          context(), fmt::format("parameter {} got a gradient, but none in the first backward: the "
                                 "graph is not static, leave static_graph off",
                                 parameter.name));
    }
    gradients_.copy_to_bucket(parameter);
    parameter.ready = true;
    ready_order_.push_back(static_cast<std::int64_t>(index));
    --gradients_.buckets()[parameter.bucket].n_pending;
    send_complete_buckets();
  });
}

void Reducer::start_step() {
  if (phase_ != Phase::prepared) {
    const std::string name = gradients_.changed_parameter();
    if (!name.empty()) gradients_.throw_parameter_changed(name);
  }
  gradients_.check_only_hooks();
  phase_ = Phase::reducing;
  n_sent_ = 0;
  ready_order_.clear();
  for (Bucket& bucket : gradients_.buckets()) bucket.n_pending = bucket.parameters.size();
  for (Parameter& parameter : gradients_.parameters()) {
    parameter.ready = !parameter.used;
    if (parameter.used) continue;
    gradients_.copy_to_bucket(parameter);
    --gradients_.buckets()[parameter.bucket].n_pending;
  }
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->finish(); });
}

/// By the rows that any rank has.
void Reducer::average_sparse(Parameter& parameter) {
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  const at::Tensor& tensor = parameter.tensor;
  // Without rows too the indices have one dimension, as on the other ranks.
  if (!gradient.defined() || gradient._nnz() == 0) {
    gradient = at::sparse_coo_tensor(at::empty({1, 0}, tensor.options().dtype(at::kLong)),
                                     tensor.detach().narrow(0, 0, 0), tensor.sizes());
  }
  gradient = all_reduce_sparse(gradient, /*divisor=*/site_.group.size(), kOperations, site_.group,
                               {}, context())
                 .to(tensor.device());
}

/// All ranks see the same flags and throw alike.
void Reducer::check_same_gradients() {
  if (options_.find_unused_parameters) return;
  for (const Parameter& parameter : gradients_.parameters()) {
    if (!(parameter.frac_with_grad > 0 && parameter.frac_without_grad > 0)) continue;
    phase_ = Phase::idle;  // no communication is pending, on any rank
    const double size = site_.group.size();
    // The smaller of the two is more precise.
    const double n_ranks = parameter.frac_with_grad < parameter.frac_without_grad
                               ? std::round(parameter.frac_with_grad * size)
                               : size - std::round(parameter.frac_without_grad * size);
    throw MismatchError(
        context(),
        fmt::format("parameter {} got a gradient on {:.0f} of {} ranks, {} this one: use it in "
                    "every rank's loss, or set find_unused_parameters, which counts a missing "
                    "gradient as zero",
                    parameter.name, n_ranks, site_.group.size(),
                    parameter.has_gradient ? "also on" : "but not on"));
  }
}

void Reducer::send_complete_buckets() {
  for (; n_sent_ < gradients_.buckets().size() && gradients_.buckets()[n_sent_].n_pending == 0;
       ++n_sent_) {
    Bucket& bucket = gradients_.buckets()[n_sent_];
    std::vector<float> flags;
    for (const std::size_t i : bucket.parameters) {
      const float has_gradient = gradients_.parameters()[i].has_gradient ? 1.0F : 0.0F;
      flags.insert(flags.end(), {has_gradient, 1 - has_gradient});
    }
    bucket.flag_values.copy_(
        at::from_blob(flags.data(), {static_cast<std::int64_t>(flags.size())}, at::kFloat));
    if (!options_.comm_hook) {
      Elements all = bucket.gradients;  // the flags follow the gradients
      all.count += bucket.flags.count;
      bucket.work = site_.group.all_reduce_async(all, ReduceOp::mean, {}, site_.where);
      continue;
    }
    const auto size =
        static_cast<std::int64_t>(bucket.gradients.n_bytes() / c10::elementSize(bucket.type));
    if (size > 0) {
      bucket.complete = options_.comm_hook(
          {slice_of(bucket.memory, 0, {size}, {1}, bucket.type), n_sent_, site_.group});
    }
    bucket.work = site_.group.all_reduce_async(bucket.flags, ReduceOp::mean, {}, site_.where);
  }
}

void Reducer::finish() {
  const TraceScope scope("DDP: the last gradients");
  const at::NoGradGuard no_grad;
  lockstep::detail::Collective(kOperation, site_.group, site_.where).run([&] {
    for (Parameter& parameter : gradients_.parameters()) {
      if (!parameter.ready) gradients_.copy_to_bucket(parameter);
      parameter.has_accumulated = false;
    }
    for (Bucket& bucket : gradients_.buckets()) bucket.n_pending = 0;
    send_complete_buckets();
    for (Bucket& bucket : gradients_.buckets()) {
      site_.explain([&] { return "averaging the gradients of " + gradients_.names_of(bucket); },
                    [&] {
                      if (bucket.complete) bucket.complete();
                      bucket.work.wait();
                    },
                    Hint::join);
      bucket.complete = nullptr;
      const at::Tensor flags = bucket.flag_values.to(at::kDouble);
      const auto* flag = flags.data_ptr<double>();
      for (const std::size_t i : bucket.parameters) {
        gradients_.parameters()[i].frac_with_grad = *flag++;
        gradients_.parameters()[i].frac_without_grad = *flag++;
      }
    }
  });
  check_same_gradients();  // unguarded: not a refused call on the ranks that had sent all before
  lockstep::detail::Collective(kOperation, site_.group, site_.where).run([&] {
    const bool rescale =
        join_ && options_.join_divides_by_active && join_->n_active() < site_.group.size();
    for (Parameter& parameter : gradients_.parameters()) {
      if (!(parameter.frac_with_grad > 0)) continue;
      if (parameter.is_sparse) {
        site_.explain([&] { return "averaging the sparse gradient of " + parameter.name; },
                      [&] { average_sparse(parameter); }, Hint::join);
      } else {
        gradients_.publish_gradient(parameter);
      }
      if (!rescale) continue;
      parameter.tensor.mutable_grad().mul_(static_cast<double>(site_.group.size()) /
                                           join_->n_active());
    }
    if (!gradients_.is_reordered()) {
      for (Parameter& parameter : gradients_.parameters())
        parameter.used = parameter.ready || !options_.static_graph;
      site_.explain([] { return std::string("rebuilding the buckets"); },
                    [this] { gradients_.reorder(ready_order_); });
    }
    phase_ = Phase::idle;
    check_in_sync();
  });
}

void Reducer::join(const std::function<void()>& body, const JoinOptions& options,
                   std::function<at::Tensor()> example, std::source_location where) {
  if (join_) {
    throw UsageError(context(), "join was called in the body of a join: one covers all its steps");
  }
  site_.where = where;
  join_.emplace(module_, *options_.group, site_, options);
  site_.is_in_join = true;
  std::function<at::Tensor()> shadow_before;
  const auto leave = c10::make_scope_exit([&] {
    join_.reset();
    site_.is_in_join = false;
    if (!shadow_) shadow_ = std::move(shadow_before);
  });
  // It takes precedence over forwards of earlier loops.
  if (example) shadow_before = std::exchange(shadow_, nullptr);
  const char* stage = "the body of join";
  try {
    site_.explain([] { return std::string("running the body of join"); }, body, Hint::body);
    stage = "join";
    // Gradients that this rank accumulated without synchronisation count in the next one.
    if (forward_ == Forward::synchronised) drop_gradients();
    for (;;) {
      const UnevenJoin::Announcement others = join_->announce(NextStep::joined);
      if (others.step == NextStep::joined) break;
      site_.explain([] { return std::string("shadowing a step in join"); },
                    [&] { shadow_step(others, example); }, Hint::body);
    }
    join_->broadcast_state();
  } catch (const MismatchError&) {  // the other ranks have one too
    throw;
  } catch (...) {
    // The other ranks wait for this one's next step.
    if (!join_->all_throw()) {
      site_.group.abandon(fmt::format("{} ended with an exception: {}", stage,
                                      base::text_of(std::current_exception())));
    }
    throw;
  }
  if (join_->was_uneven()) n_checks_ = kChecksAfterUnevenData;
}

void Reducer::shadow_step(const UnevenJoin::Announcement& others,
                          const std::function<at::Tensor()>& example) {
  const auto& forward = shadow_ ? shadow_ : example;
  if (!forward) {
    throw UsageError(
        context(),
        "join cannot shadow the other ranks: this rank has made no forward that returns "
        "a tensor and whose arguments are tensors, containers of tensors, numbers and "
        "strings. Give join an example_input, or an example_forward");
  }
  check_last_step();
  const at::AutoGradMode with_gradients(true);
  const bool synchronises = others.step == NextStep::synchronise;
  forward_ = synchronises ? Forward::synchronised : Forward::local;
  prepare();
  join_->shadow(others, forward);
  if (synchronises) drop_gradients();
}

void Reducer::drop_gradients() {
  for (Parameter& parameter : gradients_.parameters()) parameter.tensor.mutable_grad().reset();
}

/// Called at the end of backward, which all ranks reach. Not earlier: a single rank may call
/// forward to evaluate, and ranks whose losses reach different layers fill buckets in different
/// order.
void Reducer::check_in_sync() {
  const bool is_due = checks_fully_ && n_steps_++ % kStepsBetweenChecks == 1;
  if (n_checks_ == 0 && !is_due) return;
  const bool is_after_join = n_checks_ > 0;
  if (is_after_join) --n_checks_;
  site_.explain(
      [] { return std::string("comparing the parameters"); },
      [&] {
        check_fingerprints(
            join_ && join_->is_shadowing() ? Fingerprints() : fingerprints_of_parameters(module_),
            site_.group, context(),
            is_after_join
                ? "the ranks had different numbers of batches in join, and so made different "
                  "numbers of optimizer steps: pass join the optimizers, whose state it then "
                  "keeps equal"
                : "the ranks have changed them differently: apply the same changes on all ranks");
      });
}

}  // namespace lockstep::nn::detail
