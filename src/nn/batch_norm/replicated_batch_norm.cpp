#include "nn/batch_norm/replicated_batch_norm.hpp"

#include <ATen/ATen.h>
#include <c10/util/intrusive_ptr.h>
#include <fmt/format.h>

#include <lockstep/error.hpp>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

/// The replicas' pieces are one node of the graph, created on the master's thread: backward runs on
/// one thread, where replicas cannot wait for each other. In forward each replica computes its own
/// statistics, and normalises its piece into the output that the node allocated.
namespace lockstep::nn {
namespace {

using at::Tensor;
using detail::ReplicaLink;

std::vector<ReplyTo<ReplicaLink::Reply>> forward_all_replicas(
    std::span<MessageFrom<ReplicaLink::Message>> messages) {
  const ReplicaLink::Message& master = messages.front().message;
  const auto record = c10::make_intrusive<BatchNormRecord>();
  record->settings = *master.settings;
  std::vector<BatchNormPiece> pieces;
  for (const auto& [id, message] : messages) pieces.push_back(message.piece);
  const std::vector<Tensor> outputs = batch_norm_node(pieces, record, [&] {
    std::vector<Tensor> locals;
    for (const auto& [id, message] : messages) locals.push_back(message.statistics);
    record->statistics = merge_statistics(at::stack(locals));
    const std::size_t all = master.x.shape.channels;
    // A peer with one replica communicates here too (batch_norm_forward).
    record->channels_per_message =
        agree_on_channels(/*preferred=*/all, all, record->settings.layer);
    merge_across_ranks(record->statistics, record->settings.layer);
    record->nonfinite =
        finish_statistics(record->statistics, record->settings, master.piece.input.sizes());
    std::vector<Tensor> to_be_filled;
    for (const auto& [id, message] : messages) {
      record->for_kernels.push_back(for_kernels(message.x, record->statistics));
      to_be_filled.push_back(at::empty_like(message.x.tensor));
    }
    return to_be_filled;
  });
  std::vector<ReplyTo<ReplicaLink::Reply>> replies;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    replies.push_back({messages[i].id, {outputs[i], record->for_kernels[i], record->nonfinite}});
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
    links = {std::make_shared<Master>(forward_all_replicas), {}};
    return std::make_shared<ReplicaLink>(links.master);
  }
  if (!links.master) {
    throw UsageError(
        {.operation = "SyncBatchNorm"},
        fmt::format("on_replicate must be called for copy 0 first (got copy {})", copy_id));
  }
  auto link = links.by_copy[copy_id].lock();
  if (!link) link = std::make_shared<ReplicaLink>(links.master->register_slave(copy_id));
  links.by_copy[copy_id] = link;
  return link;
}

ReplicaLink::Reply ReplicaLink::exchange(const Message& message) const {
  const Layer& layer = message.settings->layer;
  const lockstep::detail::Collective guard = layer.collective();
  try {
    return layer.communicate(kForward, [&] {
      return master_ ? master_->run_master(message, Timeout(), layer.where)
                     : pipe_.run_slave(message, Timeout(), layer.where);
    });
  } catch (...) {  // of another replica, perhaps, which refuses nothing itself
    if (layer.refuses && !guard.has_begun()) {
      guard.refuse(lockstep::detail::Collective::reason_of(std::current_exception()));
    }
    throw;
  }
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
                             BatchNormRecord& record, const ReplicaLink& replica) {
  const BatchNormPiece piece{input, parameter_for(weight, input), parameter_for(bias, input)};
  const auto [x, statistics] = [&] {
    const at::AutoDispatchBelowADInplaceOrView without_history;
    Activation activation = activation_of(input);
    Tensor local = local_statistics(activation, activation.all());
    return std::pair(std::move(activation), std::move(local));
  }();
  ReplicaLink::Reply reply = replica.exchange({piece, x, statistics, &record.settings});
  record.nonfinite = reply.nonfinite;
  const at::AutoDispatchBelowADInplaceOrView without_history;
  normalize(x, x.all(), reply.for_kernels, value_of(piece.weight), value_of(piece.bias),
            reply.output);
  return reply.output;
}

}  // namespace lockstep::nn
