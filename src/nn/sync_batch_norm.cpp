#include <lockstep/nn/sync_batch_norm.hpp>

#include <ATen/Dispatch.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/batchnorm.h>

#include <lockstep/error.hpp>

#include "nn/batch_norm.hpp"
#include "nn/error.hpp"
#include "nn/replicated_batch_norm.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What backward needs of its forward besides the saved tensors. In a capsule, because
/// AutogradContext keeps nothing but IValues.
struct Saved : torch::CustomClassHolder {
  BatchNormSettings settings;
  double count = 0;  ///< values per channel over all ranks
  kernels::BatchNormShape shape;
  bool input_needs_gradient = false;
  bool has_weight = false;
  bool has_bias = false;
};

class SyncBatchNormFunction : public torch::autograd::Function<SyncBatchNormFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& input,
                        const OptionalTensor& optional_weight, const OptionalTensor& optional_bias,
                        const BatchNormSettings& settings) {
    const Tensor weight = optional_weight.value_or(Tensor());
    const Tensor bias = optional_bias.value_or(Tensor());
    const Activation x = activation_of(input);
    Tensor output = at::empty_like(x.tensor);
    auto saved = c10::make_intrusive<Saved>();
    const Tensor statistics = merge_over(local_statistics(x), settings.group);
    finish_statistics(statistics, settings, input.sizes());
    const auto c = static_cast<std::int64_t>(x.shape.channels);
    const Tensor mean = statistics.narrow(0, 1, c);
    const Tensor invstd = statistics.narrow(0, 1 + c, c);
    normalize(x, statistics, weight, bias, output);
    saved->settings = settings;
    saved->count = data(statistics)[0];
    saved->shape = x.shape;
    saved->input_needs_gradient = input.requires_grad();
    saved->has_weight = weight.defined();
    saved->has_bias = bias.defined();
    context->save_for_backward({x.tensor, weight, mean, invstd});
    context->saved_data["saved"] = c10::IValue::make_capsule(std::move(saved));
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto capsule = context->saved_data["saved"].toCapsule();
    const auto& saved = static_cast<const Saved&>(*capsule);
    refuse_create_graph(saved.settings.group);
    const variable_list tensors = context->get_saved_variables();
    const Tensor& x = tensors[0];
    const Tensor& weight = tensors[1];
    const Tensor& mean = tensors[2];
    const Tensor& invstd = tensors[3];
    Tensor dy = gradients[0];
    if (dy.strides() != x.strides()) dy = at::empty_like(x).copy_(dy);

    const std::size_t channels = saved.shape.channels;
    const auto c = static_cast<std::int64_t>(channels);
    const Tensor message = doubles(2 * c);
    const Tensor sum_dy = message.narrow(0, 0, c);
    const Tensor sum_dy_xmu = message.narrow(0, c, c);
    Tensor dx, dweight, dbias;
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "sync_batch_norm_backward", [&] {
      const scalar_t* const gradient = dy.data_ptr<scalar_t>();
      const scalar_t* const input = x.data_ptr<scalar_t>();
      kernels::batch_norm_backward_reduce(gradient, input, saved.shape, data(mean), data(sum_dy),
                                          data(sum_dy_xmu));
      // Autograd numbers the tensors that were there.
      if (saved.has_weight && context->needs_input_grad(1)) {
        dweight = (sum_dy_xmu * invstd).to(x.scalar_type());
      }
      if (saved.has_bias && context->needs_input_grad(saved.has_weight ? 2 : 1)) {
        dbias = sum_dy.to(x.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
      }
      // Whether to communicate must not depend on what this rank asks of autograd, but on the
      // graph alone, which is the same on all ranks.
      if (saved.input_needs_gradient) {
        average_gradient(message, invstd, saved.count, saved.settings);
        dx = at::empty_like(x);
        kernels::batch_norm_backward_elementwise(
            gradient, input, saved.shape, data(mean), data(invstd), data_or_null<scalar_t>(weight),
            data(sum_dy), data(sum_dy_xmu), dx.data_ptr<scalar_t>());
      }
    });
    return {dx, dweight, dbias, Tensor()};
  }
};

void check_state(const char* name, const Tensor& state, const Tensor& input,
                 std::int64_t num_features, const ErrorContext& context) {
  if (!state.defined()) return;
  if (state.scalar_type() != input.scalar_type() || !state.device().is_cpu() || state.dim() != 1 ||
      state.size(0) != num_features) {
    throw UsageError(context,
                     fmt::format("expected {} to be a {} CPU tensor of {} elements, as the input; "
                                 "got {} of {}: convert the module or the input with to()",
                                 name, c10::toString(input.scalar_type()), num_features,
                                 state.toString(), c10::str(state.sizes())));
  }
}

void check_input(const Tensor& input, std::int64_t num_features, const ErrorContext& context) {
  if (!input.device().is_cpu() || input.layout() != at::kStrided) {
    throw UsageError(context,
                     fmt::format("expected a dense CPU tensor, got {}: other devices are not "
                                 "supported yet",
                                 input.toString()));
  }
  if (input.scalar_type() != at::kFloat && input.scalar_type() != at::kDouble) {
    throw UsageError(context, fmt::format("expected float32 or float64 input, got {}: f16/bf16 "
                                          "input is not supported yet, convert it with to()",
                                          c10::toString(input.scalar_type())));
  }
  if (input.size(1) != num_features) {
    throw UsageError(context, fmt::format("expected {} channels, got input size {}", num_features,
                                          c10::str(input.sizes())));
  }
}

struct State {
  Tensor weight, bias, running_mean, running_var, num_batches_tracked;
};

Tensor train(const Tensor& input, State state, const SyncBatchNormOptions& options,
             const detail::ReplicaLink* replica, const ErrorContext& context) {
  check_input(input, options.num_features(), context);
  check_state("weight", state.weight, input, options.num_features(), context);
  check_state("bias", state.bias, input, options.num_features(), context);
  check_state("running_mean", state.running_mean, input, options.num_features(), context);
  check_state("running_var", state.running_var, input, options.num_features(), context);
  BatchNormSettings settings{options.group(), options.eps(),      options.eps_mode(),
                             /*factor=*/0,    state.running_mean, state.running_var};
  const bool counts = state.num_batches_tracked.defined();
  if (options.momentum().has_value()) {
    settings.factor = *options.momentum();
  } else if (counts) {
    settings.factor = 1 / (state.num_batches_tracked.item<double>() + 1);
  }
  OptionalTensor weight, bias;
  if (state.weight.defined()) weight = state.weight.contiguous();
  if (state.bias.defined()) bias = state.bias.contiguous();
  Tensor output = replica != nullptr && !replica->is_alone()
                      ? replicated_batch_norm(input, weight, bias, settings, *replica)
                      : SyncBatchNormFunction::apply(input, weight, bias, settings);
  if (counts) state.num_batches_tracked += 1;
  return output;
}

std::string describe(const SyncBatchNormOptions& options) {
  return fmt::format("d({}, eps={}{}, momentum={}, affine={}, track_running_stats={}, group={})",
                     options.num_features(), options.eps(),
                     options.eps_mode() == EpsMode::clamp ? " (clamp)" : "",
                     options.momentum() ? fmt::format("{}", *options.momentum()) : "none",
                     options.affine(), options.track_running_stats(), options.group().name());
}

}  // namespace

SyncBatchNormOptions::SyncBatchNormOptions(const torch::nn::BatchNormOptions& options, Group group)
    : num_features_(options.num_features()),
      eps_(options.eps()),
      affine_(options.affine()),
      track_running_stats_(options.track_running_stats()),
      group_(std::move(group)) {
  momentum_.reset();
  if (options.momentum().has_value()) momentum_ = *options.momentum();
}

torch::nn::BatchNormOptions SyncBatchNormOptions::without_group() const {
  auto options = torch::nn::BatchNormOptions(num_features_)
                     .eps(eps_)
                     .affine(affine_)
                     .track_running_stats(track_running_stats_);
  options.momentum().reset();
  if (momentum_.has_value()) options.momentum() = *momentum_;
  return options;
}

template <std::size_t D, class Derived>
Tensor SyncBatchNormImplBase<D, Derived>::forward(const Tensor& input) {
  const std::string name = fmt::format("SyncBatchNorm{}d", D);
  _check_input_dim(input);
  if (!this->is_training()) {  // nothing to synchronise, and nothing torch does not do
    const bool batch_statistics = !this->running_mean.defined() || !this->running_var.defined();
    return at::batch_norm(input, this->weight, this->bias, this->running_mean, this->running_var,
                          batch_statistics, /*momentum=*/0, this->options.eps(),
                          /*cudnn_enabled=*/false);
  }
  const State state{this->weight, this->bias, this->running_mean, this->running_var,
                    this->num_batches_tracked};
  return train(input, state, this->options, replica_.get(),
               context_of(name, this->options.group(), std::source_location::current()));
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::_check_input_dim(const Tensor& input) {
  const std::int64_t n_dims = input.defined() ? input.dim() : 0;
  const auto full = static_cast<std::int64_t>(D) + 2;
  if (n_dims == full || (D == 1 && n_dims == 2)) return;
  throw UsageError(context_of(fmt::format("SyncBatchNorm{}d", D), this->options.group(),
                              std::source_location::current()),
                   fmt::format("expected {}D input, got {}D input",
                               D == 1 ? std::string("2D or 3") : std::to_string(full), n_dims));
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::pretty_print(std::ostream& stream) const {
  stream << "lockstep::nn::SyncBatchNorm" << D << describe(this->options);
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::on_replicate(CallbackContext& context, int copy_id) {
  replica_ = detail::ReplicaLink::join(context, copy_id);
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::on_failure(const std::exception_ptr& error) {
  if (replica_) replica_->fail(error);
}

template class SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>;
template class SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>;
template class SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>;

}  // namespace lockstep::nn
