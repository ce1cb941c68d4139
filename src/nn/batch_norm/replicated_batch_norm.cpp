#include "nn/batch_norm/replicated_batch_norm.hpp"

#include <ATen/Dispatch.h>
#include <fmt/format.h>

#include <lockstep/error.hpp>
#include <map>
#include <vector>

#include "nn/error.hpp"

/// The graph, for replicas r of a batch x:
///
///   x_r -> LocalStatistics_r -> s_r -> Exchange -> t_r -> Normalize_r -> y_r
///
/// Forward: Exchange is the SyncMaster's round; the master's thread makes one node over all s_r.
/// Backward, on one thread: every Normalize_r sums dy and dy * (x - mean) over its piece. Exchange
/// runs after all of these and averages over the batch (and over the ranks). LocalStatistics_r then
/// computes the whole gradient of x_r from the dy that Normalize_r received.
/// The gradients along s and t are therefore those sums, in the places of mean and invstd.
namespace lockstep::nn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// State shared by the two nodes of one replica.
struct Share : torch::CustomClassHolder {
  Layer layer;
  kernels::BatchNormShape shape;
  Tensor weight;       // no history; may be undefined
  Tensor statistics;   // no history: count, mean, invstd
  Tensor for_kernels;  // these, see layer_steps.hpp
  Tensor dy;           // from Normalize's backward to that of LocalStatistics
  bool has_bias = false;
};

class LocalStatistics : public Function<LocalStatistics> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& /*input*/, const Activation& x,
                        const c10::intrusive_ptr<Share>& share) {
    context->save_for_backward({x.tensor});
    context->saved_data["saved"] = c10::IValue::make_capsule(share);
    return local_statistics(x, x.all());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto hold = context->saved_data["saved"].toCapsule();
    auto& share = static_cast<Share&>(*hold);
    refuse_create_graph(share.layer);
    const Tensor x = context->get_saved_variables()[0];
    Tensor dy = std::exchange(share.dy, Tensor());
    if (!dy.defined()) dy = at::zeros_like(x);  // this replica's output was not used
    const Tensor mean_gradients = gradients[0].narrow(0, 1, gradients[0].size(0) - 1);
    const Activation activation{x, share.shape};
    Tensor dx = at::empty_like(x);
    input_gradient(dy, activation, activation.all(), share.for_kernels, share.weight,
                   mean_gradients, dx);
    return {dx, Tensor(), Tensor()};
  }
};

class Exchange : public Function<Exchange> {
 public:
  struct Saved : torch::CustomClassHolder {
    BatchNormSettings settings;
    std::size_t n_replicas = 0;
    double count = 0;
    Tensor invstd;
  };

  static variable_list forward(AutogradContext* context, at::TensorList locals,
                               const BatchNormSettings& settings, at::IntArrayRef input_sizes,
                               bool* nonfinite) {
    Tensor global = merge_statistics(at::stack(locals));
    const auto all = static_cast<std::size_t>(global.size(0) - 1) / 2;
    (void)agree_on_channels(/*wish=*/all, all, settings.layer);  // a peer may have one replica
    merge_over(global, settings.layer);
    *nonfinite = finish_statistics(global, settings, input_sizes);
    const std::int64_t c = (global.size(0) - 1) / 2;
    auto saved = c10::make_intrusive<Saved>();
    saved->settings = settings;
    saved->n_replicas = locals.size();
    saved->count = data(global)[0];
    saved->invstd = global.narrow(0, 1 + c, c).clone();
    context->saved_data["saved"] = c10::IValue::make_capsule(std::move(saved));
    // One tensor per replica, so that backward accumulates in replica order.
    variable_list outputs{global};
    while (outputs.size() < locals.size()) outputs.push_back(global.clone());
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto hold = context->saved_data["saved"].toCapsule();
    const auto& saved = static_cast<const Saved&>(*hold);
    refuse_create_graph(saved.settings.layer);
    const Tensor sums = gradients[0].clone();
    for (std::size_t i = 1; i < gradients.size(); ++i) sums.add_(gradients[i]);
    average_gradient({data(sums) + 1, static_cast<std::size_t>(sums.size(0) - 1)},
                     data(saved.invstd), saved.count, saved.settings);
    variable_list result(saved.n_replicas, sums);
    result.resize(saved.n_replicas + 3);
    return result;
  }
};

class Normalize : public Function<Normalize> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& statistics,
                        const OptionalTensor& weight, const OptionalTensor& bias,
                        const Activation& x, const c10::intrusive_ptr<Share>& share) {
    share->weight = weight ? weight->detach() : Tensor();
    share->has_bias = bias.has_value();
    share->statistics = statistics.detach();
    share->for_kernels = for_kernels(x, share->statistics);
    Tensor output = at::empty_like(x.tensor);
    normalize(x, x.all(), share->for_kernels, share->weight, bias.value_or(Tensor()), output);
    // Without its history: the other node computes the gradient of x.
    context->save_for_backward({x.tensor.detach(), share->weight});
    context->saved_data["saved"] = c10::IValue::make_capsule(share);
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto hold = context->saved_data["saved"].toCapsule();
    auto& share = static_cast<Share&>(*hold);
    refuse_create_graph(share.layer);
    const Activation x{context->get_saved_variables()[0], share.shape};
    const Tensor dy = gradient_like(gradients[0], x.tensor);
    const Tensor sums = sum_gradients(dy, x, x.all(), share.for_kernels);
    // Autograd numbers only the tensors that are present.
    const bool has_weight = share.weight.defined();
    ParameterGradients parameters(
        x, {context->needs_input_grad(0), has_weight && context->needs_input_grad(1),
            share.has_bias && context->needs_input_grad(has_weight ? 2 : 1)});
    parameters.put(sums, x.all(), share.statistics);
    const BatchNormGradients of = parameters.take(Tensor());
    Tensor of_statistics;
    if (context->needs_input_grad(0)) {
      share.dy = dy;
      of_statistics = at::cat({at::zeros({1}, at::kDouble), sums});
    }
    return {of_statistics, of.weight, of.bias, Tensor(), Tensor()};
  }
};

using detail::ReplicaLink;

std::vector<ReplyTo<Tensor>> answer(std::span<MessageFrom<ReplicaLink::Message>> messages) {
  variable_list locals;
  for (auto& [id, message] : messages) locals.push_back(std::move(message.statistics));
  const auto& master = messages[0].message;
  const variable_list merged = Exchange::apply(at::TensorList(locals), *master.settings,
                                               master.input_sizes, master.nonfinite);
  std::vector<ReplyTo<Tensor>> replies;
  for (std::size_t i = 0; i < merged.size(); ++i) {
    *messages[i].message.nonfinite = *master.nonfinite;  // the replica waits for the reply
    replies.push_back({messages[i].id, merged[i]});
  }
  return replies;
}

/// The links of one position, for submodules that appear twice in a copy.
struct Links {
  std::shared_ptr<ReplicaLink::Master> master;
  std::map<int, std::weak_ptr<ReplicaLink>> by_copy;
};

}  // namespace

namespace detail {

std::shared_ptr<ReplicaLink> ReplicaLink::join(CallbackContext& context, int copy_id) {
  auto& links = context.state<Links>();
  if (copy_id == 0) {
    links = {std::make_shared<Master>(answer), {}};
    return std::make_shared<ReplicaLink>(links.master);
  }
  if (!links.master) {
    throw UsageError({.operation = "SyncBatchNorm"},
                     fmt::format("copy {} is told who it is before copy 0", copy_id));
  }
  auto link = links.by_copy[copy_id].lock();
  if (!link) link = std::make_shared<ReplicaLink>(links.master->register_slave(copy_id));
  links.by_copy[copy_id] = link;
  return link;
}

Tensor ReplicaLink::exchange(const Message& message) const {
  const Layer& layer = message.settings->layer;
  return layer.communicate(kForward, [&] {
    return master_ ? master_->run_master(message, Timeout(), layer.where)
                   : pipe_.run_slave(message, Timeout(), layer.where);
  });
}

void ReplicaLink::fail(const std::exception_ptr& error) const {
  if (master_) {
    master_->fail(error);
  } else {
    pipe_.fail(error);
  }
}

}  // namespace detail

Tensor replicated_batch_norm(const Tensor& input, const Tensor& weight, const Tensor& bias,
                             const BatchNormSettings& settings, const ReplicaLink& replica,
                             bool& nonfinite) {
  const Activation x = [&] {
    const at::NoGradGuard no_grad;
    return activation_of(input);
  }();
  auto share = c10::make_intrusive<Share>();
  share->layer = settings.layer;
  share->shape = x.shape;
  const Tensor mine = LocalStatistics::apply(input, x, share);
  const Tensor statistics = replica.exchange({mine, &settings, input.sizes(), &nonfinite});
  return Normalize::apply(statistics, parameter_for(weight, input), parameter_for(bias, input), x,
                          share);
}

}  // namespace lockstep::nn
