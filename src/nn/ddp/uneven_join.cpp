#include "nn/ddp/uneven_join.hpp"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/checkpoint.hpp>
#include <lockstep/nn/sync_batch_norm_scope.hpp>
#include <lockstep/nn/tensor_ops.hpp>
#include <lockstep/objects.hpp>
#include <string>

#include "base/hash.hpp"
#include "nn/batch_norm/inner_scopes.hpp"
#include "nn/ddp/sharded_state.hpp"
#include "nn/training/checkpoint_file.hpp"

namespace lockstep::nn::detail {
namespace {

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

UnevenJoin::UnevenJoin(torch::nn::Module& module, const Group& module_group, const CallSite& site,
                       const JoinOptions& options)
    : module_(module), module_group_(module_group), site_(site), options_(options) {
  for (const torch::optim::Optimizer* optimizer : options.optimizers) {
    check_optimizer(*optimizer, site.context());
  }
}

/// All ranks see the same announcements and throw alike.
void UnevenJoin::check_scopes(std::span<const Announcement> all) {
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].scope == 0 || all[rank].scope_size >= site_.group.size()) continue;
    all_throw_ = true;
    throw UsageError(
        site_.context(),
        fmt::format("in join, the forward of rank {} is in a SyncBatchNormScope over a group of {} "
                    "of the {} ranks, which a rank out of data cannot identify: convert the "
                    "net with convert_sync_batchnorm and that group instead",
                    rank, all[rank].scope_size, site_.group.size()));
  }
}

UnevenJoin::Announcement UnevenJoin::announce(NextStep step) {
  Announcement mine{step};
  if (step != NextStep::joined) {
    modes_ = modes_of(module_);
    mine.is_training = module_.is_training() ? 1 : 0;
    scope_ = group_of_scope();
    if (scope_) {
      mine.scope = hash_of_scope(*scope_);
      mine.scope_size = scope_->size();
    }
  }
  std::vector<Announcement> all(static_cast<std::size_t>(site_.group.size()));
  static_assert(sizeof(Announcement) == 32);
  site_.explain([] { return std::string("agreeing in join on the next step"); },
                [&] {
                  site_.group.all_gather({&mine, 4, DType::i64},
                                         {all.data(), 4 * all.size(), DType::i64}, {}, site_.where);
                },
                CallSite::Hint::body);
  check_scopes(all);
  n_active_ = 0;
  int first = -1;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].step == NextStep::joined) continue;
    if (n_active_++ == 0) first = static_cast<int>(rank);
    const Announcement& common = all[static_cast<std::size_t>(first)];
    if (all[rank].scope != common.scope) {
      throw MismatchError(
          site_.context(),
          fmt::format("in join, the forwards of rank {} and rank {} are not in "
                      "SyncBatchNormScopes of the same group: use one on all ranks or "
                      "on none",
                      first, rank));
    }
    if (all[rank].step == common.step) continue;
    const bool first_accumulates = common.step == NextStep::accumulate;
    throw MismatchError(
        site_.context(),
        fmt::format("in join, rank {} is in no_sync() and rank {} is not: all ranks "
                    "must synchronise at the same steps",
                    first_accumulates ? first : static_cast<int>(rank),
                    first_accumulates ? static_cast<int>(rank) : first));
  }
  if (first < 0) return {};
  last_active_ = first;
  was_uneven_ = was_uneven_ || n_active_ < site_.group.size();
  return all[static_cast<std::size_t>(first)];
}

void UnevenJoin::shadow(const Announcement& others, const std::function<at::Tensor()>& forward) {
  // The end of body may have left another mode, in which a SyncBatchNorm does not communicate.
  const auto as_body_left_them =
      c10::make_scope_exit([modes = modes_of(module_)] { set_modes(modes); });
  set_modes(modes_);
  const bool is_training = others.is_training != 0;
  if (module_.is_training() != is_training) module_.train(is_training);
  at::Tensor output;
  if (others.scope != 0) {
    const SyncBatchNormScope scope(scope_of(others.scope), site_.where);
    output = forward();
  } else {
    const SuspendedScope none;
    output = forward();
  }
  is_shadowing_ = true;
  // Zeros: a loss may have a part that does not depend on the samples.
  output.backward(at::zeros_like(output));
  is_shadowing_ = false;
}

Group UnevenJoin::scope_of(std::uint64_t announced) const {
  if (scope_ && hash_of_scope(*scope_) == announced) return *scope_;
  const std::optional<Group> around = group_of_scope();
  if (around && hash_of_scope(*around) == announced) return *around;
  if (hash_of_scope(module_group_) == announced) return module_group_;
  if (hash_of_scope(default_group()) == announced) return default_group();
  throw UsageError(site_.context(),
                   "join cannot shadow the other ranks: their forward is in a SyncBatchNormScope "
                   "over a group that this rank has not used. Construct the scope around join");
}

void UnevenJoin::broadcast_state() {
  n_active_ = site_.group.size();
  const int rank = last_active_;
  if (rank < 0) return;
  site_.explain([&] { return fmt::format("broadcasting the state of rank {}", rank); },
                [&] {
                  for (const auto& tensors : {module_.parameters(), module_.buffers()}) {
                    for (at::Tensor tensor : tensors)
                      broadcast(tensor, rank, site_.group, {}, site_.where);
                  }
                  if (!was_uneven_) return;
                  for (torch::optim::Optimizer* optimizer : options_.optimizers) {
                    send_state(*optimizer, rank, site_.group, site_.where);
                  }
                });
}

}  // namespace lockstep::nn::detail
