#include "nn/ddp/reducer.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cmath>
#include <lockstep/detail/collective.hpp>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/tensor_ops.hpp>
#include <lockstep/trace.hpp>

#include "nn/ddp/reducer_parts.hpp"
#include "nn/elements/dense.hpp"
#include "nn/tensors/tensor_call.hpp"

namespace lockstep::nn::detail {

std::optional<lockstep::detail::Collective> Reducer::before_forward(
    const std::optional<std::source_location>& where) {
  check_world();
  lockstep::detail::Collective(kOperation, group_, where_).run([&] {
    // In join the same line on all ranks, as LOCKSTEP_CHECK=full requires: some make no forward.
    if (!join_) where_ = where.value_or(made_at_);
    check_last_step();
    if (!at::GradMode::is_enabled()) return;
    forward_ = n_no_sync_ == 0 ? Forward::synchronised : Forward::local;
    if (join_) announce(n_no_sync_ == 0 ? NextStep::synchronise : NextStep::accumulate);
    prepare();
  });
  // The next message of all ranks is sent in backward, except in join, where it is an announcement.
  // In eval() this rank may be the only one that calls forward.
  const bool is_followed = at::GradMode::is_enabled() && forward_ == Forward::synchronised &&
                           !join_ && !buckets_.empty() && module_.is_training();
  if (!is_followed) return std::nullopt;
  return lockstep::detail::Collective(kOperation, group_, where_);
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
  if (group_.size() > 1) {
    throw UsageError(
        context(), fmt::format("the last backward ended with an exception after {} of {} buckets: "
                               "the ranks may be out of step. Build a new DistributedDataParallel, "
                               "over a new group if the exception says that this one is dead",
                               n_sent_, buckets_.size()));
  }
  for (Bucket& bucket : buckets_) {
    bucket.work.wait();
    bucket.complete = nullptr;
  }
  phase_ = Phase::idle;
}

void Reducer::prepare() {
  if (forward_ != Forward::synchronised) return;
  phase_ = Phase::prepared;
  const std::string changed = changed_parameter();
  explain(
      [&] {
        return changed.empty() ? std::string("preparing a forward")
                               : fmt::format(
                                     "updating parameter {}, which was changed on this rank "
                                     "(torch::load, to(), set_data): change it on all ranks",
                                     changed);
      },
      [&] {
        if (!changed.empty()) {
          barrier_before_rebuild();
          register_parameters();
          add_buckets(bucket_order_);
        }
        if (!options_.broadcast_buffers) return;
        for (const at::Tensor& buffer : module_.buffers()) {
          // A graph of an earlier forward that saved the running statistics does not use them.
          at::Tensor values = buffer.variable_data();  // with a version of its own
          // In join rank 0 may be out of data.
          broadcast(values, std::max(join_ ? join_->last_active : 0, 0), group_, {}, where_);
        }
      },
      changed.empty() ? Hint::join : Hint::none);
}

void Reducer::on_gradient(std::size_t index) {
  check_world();
  lockstep::detail::Collective(kOperation, group_, where_).run([&] {
    parameters_[index].has_accumulated = true;
    if (!synchronises()) return;
    const at::NoGradGuard no_grad;
    if (phase_ != Phase::reducing) start_step();
    Parameter& parameter = parameters_[index];
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
    copy_to_bucket(parameter);
    parameter.ready = true;
    ready_order_.push_back(static_cast<std::int64_t>(index));
    --buckets_[parameter.bucket].n_pending;
    send_complete_buckets();
  });
}

void Reducer::start_step() {
  check_before_step();
  phase_ = Phase::reducing;
  n_sent_ = 0;
  ready_order_.clear();
  for (Bucket& bucket : buckets_) bucket.n_pending = bucket.parameters.size();
  for (Parameter& parameter : parameters_) {
    parameter.ready = !parameter.used;
    if (parameter.used) continue;
    copy_to_bucket(parameter);
    --buckets_[parameter.bucket].n_pending;
  }
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->finish(); });
}

/// The gradient becomes a slice of its bucket and stays there: the next backward accumulates into
/// it in place, unless the user has dropped it. One that this backward did not touch (an earlier
/// step's, perhaps zeroed in place, or one set by hand) is only copied into the bucket: it must
/// stay as it is if no rank has a gradient.
void Reducer::copy_to_bucket(Parameter& parameter) {
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  parameter.has_gradient = gradient.defined() && parameter.has_accumulated;
  if (gradient.defined()) check_gradient(parameter);
  if (parameter.is_sparse) return;
  // Module::zero_grad of libtorch 1.13 leaves another tensor over the same memory.
  const bool is_in_bucket = gradient.defined() && has_values_in_memory(gradient) &&
                            gradient.data_ptr() == parameter.slice.data_ptr() &&
                            gradient.strides() == parameter.slice.strides();
  if (gradient.defined() && !parameter.has_accumulated) {
    if (is_in_bucket) {
      gradient = gradient.clone();
    } else {
      replace_kept_slice(parameter);
      parameter.slice.copy_(gradient);
    }
    return;
  }
  if (gradient.is_same(parameter.slice)) return;
  if (!gradient.defined()) {
    replace_kept_slice(parameter);
    parameter.slice.zero_();
    return;
  }
  if (!is_in_bucket) {
    replace_kept_slice(parameter);
    parameter.slice.copy_(gradient);
  }
  if (gradient.is_cpu()) gradient = parameter.slice;
}

void Reducer::check_gradient(const Parameter& parameter) const {
  const at::Tensor& gradient = parameter.tensor.grad();
  if ((gradient.layout() != at::kStrided) != parameter.is_sparse) {
    throw UsageError(
        context(), fmt::format("the gradient of {} is {}: the weights of torch::nn::Embedding and "
                               "EmbeddingBag with sparse(true) must have sparse gradients, all "
                               "other parameters dense ones",
                               parameter.name, parameter.is_sparse ? "dense" : "sparse"));
  }
  if (gradient.requires_grad()) {
    throw UsageError(context(),
                     fmt::format("the gradient of {} has a graph of its own (create_graph), which "
                                 "averaging would lose: take the gradients for a penalty on them "
                                 "from torch::autograd::grad, and call backward of the whole loss "
                                 "without create_graph",
                                 parameter.name));
  }
  if (gradient.scalar_type() != parameter.slice.scalar_type() ||
      gradient.sizes() != parameter.slice.sizes()) {
    throw_parameter_changed(parameter.name);
  }
}

/// The program may have kept the last step's gradient, which is the slice, or a view of it: its
/// storage gets a copy of the values, and the slice a storage of its own over the same memory.
void Reducer::replace_kept_slice(Parameter& parameter) {
  const at::Tensor kept = parameter.slice;
  const bool is_kept = kept.use_count() > 2 || kept.storage().use_count() > 1;  // 2: ours
  if (!is_kept || kept.numel() == 0) return;
  const SharedBuffer& memory = buckets_[parameter.bucket].memory;
  const auto offset = static_cast<const std::byte*>(kept.data_ptr()) - memory.data();
  parameter.slice = slice_of(memory, static_cast<std::size_t>(offset), kept.sizes(), kept.strides(),
                             kept.scalar_type());
  kept.storage().set_data_ptr(kept.clone().storage().set_data_ptr(at::DataPtr()));
}

/// On the CPU the slice is the gradient; on another device it is copied.
void Reducer::publish_gradient(Parameter& parameter) {
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  if (parameter.tensor.is_cpu()) {
    gradient = parameter.slice;
  } else if (gradient.defined()) {
    gradient.copy_(parameter.slice);
  } else {
    gradient = parameter.slice.to(parameter.tensor.device());
  }
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
  gradient =
      all_reduce_sparse(gradient, /*divisor=*/group_.size(), kOperations, group_, {}, context())
          .to(tensor.device());
}

/// All ranks see the same flags and throw alike.
void Reducer::check_same_gradients() {
  if (options_.find_unused_parameters) return;
  for (const Parameter& parameter : parameters_) {
    if (!(parameter.frac_with_grad > 0 && parameter.frac_without_grad > 0)) continue;
    phase_ = Phase::idle;  // no communication is pending, on any rank
    const double size = group_.size();
    // The smaller of the two is more precise.
    const double n_ranks = parameter.frac_with_grad < parameter.frac_without_grad
                               ? std::round(parameter.frac_with_grad * size)
                               : size - std::round(parameter.frac_without_grad * size);
    throw MismatchError(
        context(),
        fmt::format("parameter {} got a gradient on {:.0f} of {} ranks, {} this one: use it in "
                    "every rank's loss, or set find_unused_parameters, which counts a missing "
                    "gradient as zero",
                    parameter.name, n_ranks, group_.size(),
                    parameter.has_gradient ? "also on" : "but not on"));
  }
}

void Reducer::send_complete_buckets() {
  for (; n_sent_ < buckets_.size() && buckets_[n_sent_].n_pending == 0; ++n_sent_) {
    Bucket& bucket = buckets_[n_sent_];
    std::vector<float> flags;
    for (const std::size_t i : bucket.parameters) {
      const float has_gradient = parameters_[i].has_gradient ? 1.0F : 0.0F;
      flags.insert(flags.end(), {has_gradient, 1 - has_gradient});
    }
    bucket.flag_values.copy_(
        at::from_blob(flags.data(), {static_cast<std::int64_t>(flags.size())}, at::kFloat));
    if (!options_.comm_hook) {
      Elements all = bucket.gradients;  // the flags follow the gradients
      all.count += bucket.flags.count;
      bucket.work = group_.all_reduce_async(all, ReduceOp::mean, {}, where_);
      continue;
    }
    const auto size =
        static_cast<std::int64_t>(bucket.gradients.n_bytes() / c10::elementSize(bucket.type));
    if (size > 0) {
      bucket.complete = options_.comm_hook(
          {slice_of(bucket.memory, 0, {size}, {1}, bucket.type), n_sent_, group_});
    }
    bucket.work = group_.all_reduce_async(bucket.flags, ReduceOp::mean, {}, where_);
  }
}

void Reducer::finish() {
  lockstep::detail::Collective(kOperation, group_, where_).run([&] {
    const TraceScope scope("DDP: the last gradients");
    const at::NoGradGuard no_grad;
    for (Parameter& parameter : parameters_) {
      if (!parameter.ready) copy_to_bucket(parameter);
      parameter.has_accumulated = false;
    }
    for (Bucket& bucket : buckets_) bucket.n_pending = 0;
    send_complete_buckets();
    for (Bucket& bucket : buckets_) {
      explain([&] { return "averaging the gradients of " + names_of(bucket); },
              [&] {
                if (bucket.complete) bucket.complete();
                bucket.work.wait();
              },
              Hint::join);
      bucket.complete = nullptr;
      const at::Tensor flags = bucket.flag_values.to(at::kDouble);
      const auto* flag = flags.data_ptr<double>();
      for (const std::size_t i : bucket.parameters) {
        parameters_[i].frac_with_grad = *flag++;
        parameters_[i].frac_without_grad = *flag++;
      }
    }
    check_same_gradients();
    const bool rescale =
        join_ && options_.join_divides_by_active && join_->n_active < group_.size();
    for (Parameter& parameter : parameters_) {
      if (!(parameter.frac_with_grad > 0)) continue;
      if (parameter.is_sparse) {
        explain([&] { return "averaging the sparse gradient of " + parameter.name; },
                [&] { average_sparse(parameter); }, Hint::join);
      } else {
        publish_gradient(parameter);
      }
      if (!rescale) continue;
      parameter.tensor.mutable_grad().mul_(static_cast<double>(group_.size()) / join_->n_active);
    }
    if (!rebuilt_) {
      for (Parameter& parameter : parameters_)
        parameter.used = parameter.ready || !options_.static_graph;
      explain([] { return std::string("rebuilding the buckets"); }, [this] { rebuild_buckets(); });
    }
    phase_ = Phase::idle;
    check_in_sync();
  });
}

}  // namespace lockstep::nn::detail
