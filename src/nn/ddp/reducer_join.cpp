#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <exception>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/checkpoint.hpp>
#include <lockstep/nn/sync_batch_norm_scope.hpp>
#include <lockstep/nn/tensor_ops.hpp>
#include <lockstep/objects.hpp>
#include <span>
#include <utility>

#include "base/exception.hpp"
#include "base/hash.hpp"
#include "nn/batch_norm/inner_scopes.hpp"
#include "nn/ddp/in_sync.hpp"
#include "nn/ddp/reducer.hpp"
#include "nn/ddp/reducer_parts.hpp"
#include "nn/ddp/sharded_state.hpp"
#include "nn/training/checkpoint_file.hpp"

namespace lockstep::nn::detail {
namespace {

/// Synchronised backwards after uneven data that compare the parameters: the first optimizer step
/// shows whether the optimizers' states are equal.
constexpr int kChecksAfterUnevenData = 4;
constexpr std::uint64_t kStepsBetweenChecks = 100;  // with LOCKSTEP_CHECK=full

/// Group names are equal on all ranks of the group.
std::uint64_t hash_of_scope(const Group& group) {
  return base::hash_of_bytes(group.name().data(), group.name().size()) | 1U;  // 0: none
}

void send_state(torch::optim::Optimizer& optimizer, int root, const Group& group,
                std::source_location where) {
  std::string bytes;
  if (group.rank() == root) {
    bytes = archive_bytes([&](auto& archive) { save_optimizer(optimizer, archive); });
  }
  broadcast_object(bytes, root, group, {}, where);
  if (group.rank() == root) return;
  torch::serialize::InputArchive archive = parse_archive(bytes);
  load_optimizer(optimizer, archive);
}

/// Rejects an LBFGS whose number of forwards or whose step depends on this rank's loss, and an
/// optimizer whose step needs all ranks.
void check_optimizer(const torch::optim::Optimizer& optimizer, const ErrorContext& context) {
  if (ShardedState::find(&optimizer) != nullptr) {
    throw UsageError(context,
                     "join does not support ZeroRedundancyOptimizer: its steps are collective, and "
                     "ranks out of data make none. Use the plain optimizer, or give all ranks the "
                     "same number of batches, as DistributedSampler does");
  }
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr) return;
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const torch::optim::LBFGSOptions&>(group.options());
    if (options.max_iter() == 1 && !options.line_search_fn()) continue;
    throw UsageError(context,
                     "join does not support this LBFGS: the number of closure calls depends on the "
                     "loss, which differs between the ranks. Use max_iter(1) and no line search");
  }
}

using Modes = std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>>;

Modes modes_of(const torch::nn::Module& module) {
  Modes modes;
  for (const auto& one : module.modules()) modes.emplace_back(one, one->is_training());
  return modes;
}

/// train() also sets all submodules: they follow their parent in `modes`.
void set_modes(const Modes& modes) {
  for (const auto& [module, is_training] : modes) module->train(is_training);
}

/// The group of this thread's innermost SyncBatchNormScope.
std::optional<Group> group_of_scope() {
  const auto scope = SyncBatchNormScope::active();
  if (!scope) return std::nullopt;
  return scope->group ? *scope->group : default_group();
}

}  // namespace

/// All ranks see the same announcements and throw alike.
void Reducer::check_scopes(std::span<const Announcement> all) {
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].scope == 0 || all[rank].scope_size >= group_.size()) continue;
    join_->all_throw = true;
    throw UsageError(
        context(),
        fmt::format("in join, the forward of rank {} is in a SyncBatchNormScope over a group of {} "
                    "of the {} ranks, which a rank out of data cannot identify: convert the "
                    "net with convert_sync_batchnorm and that group instead",
                    rank, all[rank].scope_size, group_.size()));
  }
}

/// Returns the next action of the ranks that have data.
Reducer::Announcement Reducer::announce(NextStep step) {
  Announcement mine{step};
  if (step != NextStep::joined) {
    join_->modes = modes_of(module_);
    mine.is_training = module_.is_training() ? 1 : 0;
    join_->scope = group_of_scope();
    if (join_->scope) {
      mine.scope = hash_of_scope(*join_->scope);
      mine.scope_size = join_->scope->size();
    }
  }
  std::vector<Announcement> all(static_cast<std::size_t>(group_.size()));
  static_assert(sizeof(Announcement) == 32);
  explain([] { return std::string("agreeing in join on the next step"); },
          [&] {
            group_.all_gather({&mine, 4, DType::i64}, {all.data(), 4 * all.size(), DType::i64}, {},
                              where_);
          },
          Hint::body);
  check_scopes(all);
  join_->n_active = 0;
  int first = -1;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].step == NextStep::joined) continue;
    if (join_->n_active++ == 0) first = static_cast<int>(rank);
    const Announcement& common = all[static_cast<std::size_t>(first)];
    if (all[rank].scope != common.scope) {
      throw MismatchError(
          context(), fmt::format("in join, the forwards of rank {} and rank {} are not in "
                                 "SyncBatchNormScopes of the same group: use one on all ranks or "
                                 "on none",
                                 first, rank));
    }
    if (all[rank].step == common.step) continue;
    const bool first_accumulates = common.step == NextStep::accumulate;
    throw MismatchError(
        context(), fmt::format("in join, rank {} is in no_sync() and rank {} is not: all ranks "
                               "must synchronise at the same steps",
                               first_accumulates ? first : static_cast<int>(rank),
                               first_accumulates ? static_cast<int>(rank) : first));
  }
  if (first < 0) return {};
  join_->last_active = first;
  join_->was_uneven = join_->was_uneven || join_->n_active < group_.size();
  return all[static_cast<std::size_t>(first)];
}

void Reducer::join(const std::function<void()>& body, const JoinOptions& options,
                   std::function<at::Tensor()> example, std::source_location where) {
  if (join_) {
    throw UsageError(context(), "join was called in the body of a join: one covers all its steps");
  }
  where_ = where;
  for (const torch::optim::Optimizer* optimizer : options.optimizers) {
    check_optimizer(*optimizer, context());
  }
  std::function<at::Tensor()> shadow_before;
  const auto leave = c10::make_scope_exit([&] {
    join_.reset();
    if (!shadow_) shadow_ = std::move(shadow_before);
  });
  join_.emplace();
  if (example) {  // takes precedence over forwards of earlier loops
    shadow_before = std::exchange(shadow_, nullptr);
    join_->example = std::move(example);
  }
  const char* stage = "the body of join";
  try {
    explain([] { return std::string("running the body of join"); }, body, Hint::body);
    stage = "join";
    // Gradients that this rank accumulated without synchronisation count in the next one.
    if (forward_ == Forward::synchronised) drop_gradients();
    for (;;) {
      const Announcement others = announce(NextStep::joined);
      if (others.step == NextStep::joined) break;
      explain([] { return std::string("shadowing a step in join"); }, [&] { shadow_step(others); },
              Hint::body);
    }
    join_->n_active = group_.size();
    if (join_->last_active >= 0) broadcast_state_of(join_->last_active, options);
  } catch (const MismatchError&) {  // the other ranks have one too
    throw;
  } catch (...) {
    // The other ranks wait for this one's next step.
    if (!join_->all_throw) {
      group_.abandon(fmt::format("{} ended with an exception: {}", stage,
                                 base::text_of(std::current_exception())));
    }
    throw;
  }
  if (join_->was_uneven) n_checks_ = kChecksAfterUnevenData;
}

void Reducer::shadow_step(const Announcement& others) {
  const auto& forward = shadow_ ? shadow_ : join_->example;
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
  // The end of body may have left another mode, in which a SyncBatchNorm does not communicate.
  const auto as_body_left_them =
      c10::make_scope_exit([modes = modes_of(module_)] { set_modes(modes); });
  set_modes(join_->modes);
  const bool is_training = others.is_training != 0;
  if (module_.is_training() != is_training) module_.train(is_training);
  at::Tensor output;
  if (others.scope != 0) {
    const SyncBatchNormScope scope(scope_of(others.scope), where_);
    output = forward();
  } else {
    const SuspendedScope none;
    output = forward();
  }
  join_->mirrors = true;
  // Zeros: a loss may have a part that does not depend on the samples.
  output.backward(at::zeros_like(output));
  join_->mirrors = false;
  if (synchronises) drop_gradients();
}

Group Reducer::scope_of(std::uint64_t announced) const {
  if (join_->scope && hash_of_scope(*join_->scope) == announced) return *join_->scope;
  const std::optional<Group> around = group_of_scope();
  if (around && hash_of_scope(*around) == announced) return *around;
  if (hash_of_scope(*options_.group) == announced) return *options_.group;
  if (hash_of_scope(default_group()) == announced) return default_group();
  throw UsageError(context(),
                   "join cannot shadow the other ranks: their forward is in a SyncBatchNormScope "
                   "over a group that this rank has not used. Construct the scope around join");
}

void Reducer::drop_gradients() {
  for (Parameter& parameter : parameters_) parameter.tensor.mutable_grad().reset();
}

void Reducer::broadcast_state_of(int rank, const JoinOptions& options) {
  explain([&] { return fmt::format("broadcasting the state of rank {}", rank); },
          [&] {
            for (const auto& tensors : {module_.parameters(), module_.buffers()}) {
              for (at::Tensor tensor : tensors) broadcast(tensor, rank, group_, {}, where_);
            }
            if (!join_->was_uneven) return;
            for (torch::optim::Optimizer* optimizer : options.optimizers) {
              send_state(*optimizer, rank, group_, where_);
            }
          });
}

/// Called at the end of backward, which all ranks reach. Not earlier: a single rank may call
/// forward to evaluate, and ranks whose losses reach different layers fill buckets in different
/// order.
void Reducer::check_in_sync() {
  const bool is_due = checks_fully_ && n_steps_++ % kStepsBetweenChecks == 1;
  if (n_checks_ == 0 && !is_due) return;
  const bool is_after_join = n_checks_ > 0;
  if (is_after_join) --n_checks_;
  explain(
      [] { return std::string("comparing the parameters"); },
      [&] {
        check_fingerprints(
            join_ && join_->mirrors ? Fingerprints() : fingerprints_of_parameters(module_), group_,
            context(),
            is_after_join
                ? "the ranks had different numbers of batches in join, and so made different "
                  "numbers of optimizer steps: pass join the optimizers, whose state it then "
                  "keeps equal"
                : "the ranks have changed them differently: apply the same changes on all ranks");
      });
}

}  // namespace lockstep::nn::detail
