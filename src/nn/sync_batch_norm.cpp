#include <lockstep/nn/sync_batch_norm.hpp>

#include <ATen/Dispatch.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/batchnorm.h>

#include <cmath>
#include <lockstep/error.hpp>
#include <span>
#include <vector>

#include "kernels/batch_norm.hpp"
#include "nn/error.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
/// std::optional or c10::optional, as libtorch's version has it. Autograd takes an absent tensor
/// so, but no undefined one.
using OptionalTensor = torch::autograd::optional_variable_list::value_type;

/// A tensor in one of the two layouts that the kernels read in place.
struct Activation {
  Tensor tensor;
  kernels::BatchNormShape shape;
};

Activation activation_of(const Tensor& input) {
  const auto outer = static_cast<std::size_t>(input.size(0));
  const auto channels = static_cast<std::size_t>(input.size(1));
  std::size_t inner = 1;
  for (const auto size : input.sizes().slice(2)) inner *= static_cast<std::size_t>(size);
  if (!input.is_contiguous() && input.movedim(1, -1).is_contiguous()) {
    return {input, {outer * inner, channels, 1}};
  }
  return {input.contiguous(), {outer, channels, inner}};
}

Tensor doubles(std::int64_t size) { return at::empty({size}, at::kDouble); }
double* data(const Tensor& tensor) { return tensor.data_ptr<double>(); }

template <class T>
const T* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr<T>() : nullptr;
}

/// What a forward needs besides the tensors that autograd knows.
struct Settings {
  Group group;
  double eps = 0;
  double factor = 0;  ///< weight of this batch in the running statistics
  Tensor running_mean, running_var;
};

/// What backward needs of its forward besides the saved tensors. In a capsule, because
/// AutogradContext keeps nothing but IValues.
struct Saved : torch::CustomClassHolder {
  Group group;
  double count = 0;  ///< values per channel over all ranks
  kernels::BatchNormShape shape;
  bool input_needs_gradient = false;
  bool has_weight = false;
  bool has_bias = false;
};

struct Statistics {
  double count = 0;  ///< values per channel over all ranks
  Tensor mean, m2;
};

/// The one message of forward: every rank's (count, mean[C], m2[C]), merged in rank order by each
/// rank, so that all hold the same bits. Why not sums: docs/design/001.
template <class T>
Statistics exchange_statistics(const Activation& x, const Group& group) {
  const auto n_ranks = static_cast<std::size_t>(group.size());
  const std::size_t channels = x.shape.channels;
  const std::size_t stride = 1 + 2 * channels;
  const Tensor message = doubles(static_cast<std::int64_t>(stride));
  const Tensor messages = doubles(static_cast<std::int64_t>(n_ranks * stride));
  double* const mine = data(message);
  const double* const all = data(messages);
  mine[0] = static_cast<double>(x.shape.n_per_channel());
  kernels::batch_norm_stats(x.tensor.data_ptr<T>(), x.shape, mine + 1, mine + 1 + channels);
  group.all_gather({mine, stride, DType::f64}, {data(messages), n_ranks * stride, DType::f64});

  Statistics result{0, doubles(static_cast<std::int64_t>(channels)),
                    doubles(static_cast<std::int64_t>(channels))};
  std::vector<double> counts(n_ranks);
  for (std::size_t rank = 0; rank < n_ranks; ++rank) {
    counts[rank] = all[rank * stride];
    result.count += counts[rank];
  }
  kernels::batch_norm_merge(group.size(), counts.data(), all + 1, all + 1 + channels, stride,
                            channels, data(result.mean), data(result.m2));
  return result;
}

template <class T>
void update_running(const Tensor& running, double factor, std::span<const double> values,
                    double scale) {
  if (!running.defined()) return;
  auto out = running.accessor<T, 1>();
  for (std::size_t c = 0; c < values.size(); ++c) {
    auto& value = out[static_cast<std::int64_t>(c)];
    value = static_cast<T>((1 - factor) * static_cast<double>(value) + factor * values[c] * scale);
  }
}

class SyncBatchNormFunction : public torch::autograd::Function<SyncBatchNormFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& input,
                        const OptionalTensor& optional_weight, const OptionalTensor& optional_bias,
                        const Settings& settings) {
    const Tensor weight = optional_weight.value_or(Tensor());
    const Tensor bias = optional_bias.value_or(Tensor());
    const Activation x = activation_of(input);
    Tensor output = at::empty_like(x.tensor);
    auto saved = c10::make_intrusive<Saved>();
    Tensor mean, invstd;
    AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "sync_batch_norm", [&] {
      const Statistics statistics = exchange_statistics<scalar_t>(x, settings.group);
      if (statistics.count == 1) {
        throw UsageError(
            context_of("SyncBatchNorm", settings.group, std::source_location::current()),
            "Expected more than 1 value per channel when training, got input size " +
                c10::str(input.sizes()));
      }
      const double n = statistics.count;
      const std::span means(data(statistics.mean), x.shape.channels);
      const std::span m2s(data(statistics.m2), x.shape.channels);
      if (n > 0) {
        update_running<scalar_t>(settings.running_mean, settings.factor, means, 1);
        update_running<scalar_t>(settings.running_var, settings.factor, m2s, 1 / (n - 1));
      }
      for (double& value : m2s) value = 1 / std::sqrt(value / n + settings.eps);
      kernels::batch_norm_normalize(x.tensor.data_ptr<scalar_t>(), x.shape, means.data(),
                                    m2s.data(), data_or_null<scalar_t>(weight),
                                    data_or_null<scalar_t>(bias), output.data_ptr<scalar_t>());
      mean = statistics.mean;
      invstd = statistics.m2;
      saved->count = n;
    });
    saved->group = settings.group;
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
    if (at::GradMode::is_enabled()) {
      throw UsageError(context_of("SyncBatchNorm", saved.group, std::source_location::current()),
                       "gradients of gradients are not supported: call backward or grad without "
                       "create_graph");
    }
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
        saved.group.all_reduce({data(message), 2 * channels, DType::f64});
        if (saved.count > 0) message.div_(saved.count);
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
             const ErrorContext& context) {
  check_input(input, options.num_features(), context);
  check_state("weight", state.weight, input, options.num_features(), context);
  check_state("bias", state.bias, input, options.num_features(), context);
  check_state("running_mean", state.running_mean, input, options.num_features(), context);
  check_state("running_var", state.running_var, input, options.num_features(), context);
  Settings settings{options.group(), options.eps(), /*factor=*/0, state.running_mean,
                    state.running_var};
  const bool counts = state.num_batches_tracked.defined();
  if (options.momentum().has_value()) {
    settings.factor = *options.momentum();
  } else if (counts) {
    settings.factor = 1 / (state.num_batches_tracked.item<double>() + 1);
  }
  OptionalTensor weight, bias;
  if (state.weight.defined()) weight = state.weight.contiguous();
  if (state.bias.defined()) bias = state.bias.contiguous();
  Tensor output = SyncBatchNormFunction::apply(input, weight, bias, settings);
  if (counts) state.num_batches_tracked += 1;
  return output;
}

std::string describe(const SyncBatchNormOptions& options) {
  return fmt::format("d({}, eps={}, momentum={}, affine={}, track_running_stats={}, group={})",
                     options.num_features(), options.eps(),
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
  return train(input, state, this->options,
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

template class SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>;
template class SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>;
template class SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>;

}  // namespace lockstep::nn
