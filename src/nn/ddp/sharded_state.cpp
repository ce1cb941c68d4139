#include "nn/ddp/sharded_state.hpp"

#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstring>
#include <lockstep/detail/collective.hpp>
#include <lockstep/error.hpp>
#include <lockstep/objects.hpp>
#include <stdexcept>

/// The state of all ranks together: for files, which are those of the plain optimizer.
namespace lockstep::nn::detail {
namespace {

using at::Tensor;
using torch::optim::OptimizerOptions;
using Optimizer = torch::optim::Optimizer;

std::string to_bytes(const Tensor& tensor) {
  const Tensor values = dense(tensor.cpu());
  return {static_cast<const char*>(values.data_ptr()), values.nbytes()};
}

}  // namespace

std::vector<SentState> ShardedState::own_state() const {
  std::vector<SentState> all;
  for (const ParameterGroup& of : groups) {
    for (const Tensor& slice : of.slices) {
      SentState& sent = all.emplace_back();
      const auto state = optimizer_class.state_of(*of.optimizer, slice);
      if (!state) continue;
      sent.exists = true;
      sent.step = state->step;
      for (const Tensor& tensor : state->tensors) {
        sent.tensors.push_back(tensor.defined() ? to_bytes(tensor) : std::string());
      }
    }
  }
  return all;
}

std::unique_ptr<Optimizer> ShardedState::assemble(
    const std::vector<std::vector<SentState>>& of_ranks, const Groups& all,
    const OptimizerOptions& defaults) const {
  const at::NoGradGuard no_graph;
  std::unique_ptr<Optimizer> plain;
  std::vector<std::size_t> next(of_ranks.size());  // state of each rank
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const ParameterGroup& of = groups[g];
    std::unique_ptr<Optimizer> own = optimizer_class.make(of.parameters, defaults);
    if (plain) {
      plain->add_param_group(own->param_groups().front());
      for (auto& [key, state] : own->state()) plain->state()[key] = std::move(state);
    } else {
      plain = std::move(own);
    }
    plain->param_groups()[g].set_options(all[g].options().clone());
    std::vector<std::optional<ElementState>> states(of.parameters.size());
    for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
      for (const Piece& piece : of.pieces[rank]) {
        const SentState& sent = of_ranks[rank].at(next[rank]++);
        if (!sent.exists) continue;
        const Tensor& parameter = of.parameters[piece.parameter];
        auto& state = states[piece.parameter];
        if (!state) state.emplace().tensors.resize(sent.tensors.size());
        state->step = sent.step;
        for (std::size_t i = 0; i < sent.tensors.size(); ++i) {
          if (sent.tensors[i].empty()) continue;
          Tensor& whole = state->tensors[i];
          if (!whole.defined()) {
            whole = at::empty({parameter.numel()}, parameter.options().requires_grad(false));
          }
          const Tensor values = at::empty({piece.n}, whole.options().device(at::kCPU));
          std::memcpy(values.data_ptr(), sent.tensors[i].data(), sent.tensors[i].size());
          piece_of(whole, piece).copy_(values);
        }
      }
    }
    for (std::size_t i = 0; i < states.size(); ++i) {
      if (!states[i]) continue;
      for (Tensor& tensor : states[i]->tensors) {
        if (tensor.defined()) tensor = shaped_like(of.parameters[i], tensor);
      }
      optimizer_class.set_state(*plain, of.parameters[i], *states[i]);
    }
  }
  return plain;
}

void ShardedState::gather_on(int to, const Groups& all, const OptimizerOptions& defaults,
                             std::source_location at) {
  consolidated.reset();
  const auto states = gather_object(own_state(), to, group, {}, at);
  if (states) consolidated = assemble(*states, all, defaults);
}

void ShardedState::load(torch::serialize::InputArchive& archive, const Groups& all,
                        const OptimizerOptions& defaults) {
  const at::NoGradGuard no_graph;
  const auto plain = assemble(std::vector<std::vector<SentState>>(), all, defaults);
  if (plain == nullptr) return;
  plain->state().clear();
  plain->load(archive);
  std::vector<std::shared_ptr<Optimizer>> loaded;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const ParameterGroup& of = groups[g];
    loaded.push_back(make_optimizer(of.slices, all[g].options(), defaults));
    for (std::size_t i = 0; i < of.parameters.size(); ++i) {
      const auto state = optimizer_class.state_of(*plain, of.parameters[i]);
      if (!state) continue;
      for (const Tensor& tensor : state->tensors) {
        if (!tensor.defined() || (tensor.sizes() == of.parameters[i].sizes() &&
                                  tensor.scalar_type() == of.parameters[i].scalar_type())) {
          continue;
        }
        throw std::runtime_error(
            fmt::format("the state of {} is {} in the archive, and the parameter is {} here: give "
                        "the optimizer the same parameters in the same order",
                        name_of_parameter(i, g), describe(tensor), describe(of.parameters[i])));
      }
    }
    const auto& own = of.pieces[static_cast<std::size_t>(group.rank())];
    for (std::size_t p = 0; p < own.size(); ++p) {
      const Tensor& parameter = of.parameters[own[p].parameter];
      auto state = optimizer_class.state_of(*plain, parameter);
      if (!state) continue;
      for (Tensor& tensor : state->tensors) {
        if (!tensor.defined()) continue;
        tensor = piece_of(flat_like(parameter, tensor), own[p]).to(parameter.device()).clone();
      }
      optimizer_class.set_state(*loaded[g], of.slices[p], *state);
    }
  }
  for (std::size_t g = 0; g < groups.size(); ++g) groups[g].optimizer = std::move(loaded[g]);
  consolidated.reset();
}

const ZeroRedundancyOptimizerBase* ShardedState::find(const Optimizer* optimizer) {
  return dynamic_cast<const ZeroRedundancyOptimizerBase*>(optimizer);
}

void ShardedState::consolidate(const ZeroRedundancyOptimizerBase& optimizer, bool is_here,
                               std::source_location where) {
  ShardedState& sharded = *optimizer.sharded_;
  lockstep::detail::Collective(kZeroRedundancy, sharded.group, where).run([&] {
    sharded.add_groups(optimizer.param_groups(), optimizer.defaults());
    sharded.agree(kConsolidation, optimizer.param_groups(), where);
    const auto all = all_gather_object(is_here, sharded.group, {}, where);
    const auto here = std::ranges::find(all, true);
    if (here == all.end()) return;
    sharded.gather_on(static_cast<int>(here - all.begin()), optimizer.param_groups(),
                      optimizer.defaults(), where);
  });
}

void ShardedState::drop_consolidated(const ZeroRedundancyOptimizerBase& optimizer) noexcept {
  optimizer.sharded_->consolidated.reset();
}

std::function<void()> ShardedState::undo_of_load(const ZeroRedundancyOptimizerBase& optimizer) {
  ShardedState& sharded = *optimizer.sharded_;
  sharded.add_groups(optimizer.param_groups(), optimizer.defaults());
  std::vector<std::shared_ptr<Optimizer>> optimizers;
  for (const ParameterGroup& of : sharded.groups) optimizers.push_back(of.optimizer);
  return [&optimizer, &sharded, optimizers, groups = optimizer.param_groups()] {
    auto& now = const_cast<ZeroRedundancyOptimizerBase&>(optimizer).param_groups();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      sharded.groups[g].optimizer = optimizers[g];
      now[g].set_options(groups[g].options().clone());
    }
  };
}

}  // namespace lockstep::nn::detail
