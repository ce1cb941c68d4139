#include <lockstep/nn/sync_batch_norm.hpp>

#include <fmt/format.h>
#include <torch/nn/functional/batchnorm.h>

#include <lockstep/error.hpp>
#include <lockstep/world.hpp>

#include "group/check.hpp"
#include "nn/batch_norm/inner_scopes.hpp"
#include "nn/batch_norm/layer_steps.hpp"
#include "nn/batch_norm/replicated_batch_norm.hpp"
#include "nn/error.hpp"
#include "world/session.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;

/// Eval mode, as torch computes it. libtorch lacks kernels for some pairs of 16-bit types of input
/// and state: those go through float32.
Tensor evaluate(const Tensor& input, const Tensor& weight, const Tensor& bias,
                const Tensor& running_mean, const Tensor& running_var, double eps) {
  const bool batch_statistics = !running_mean.defined() || !running_var.defined();
  const SuspendedScope suspended;
  const auto type = input.scalar_type();
  const bool through_float = input.is_cpu() && (type == at::kHalf || type == at::kBFloat16);
  const auto to_float = [through_float](const Tensor& tensor) {
    return through_float && tensor.defined() ? tensor.to(at::kFloat) : tensor;
  };
  const Tensor output =
      at::batch_norm(to_float(input), to_float(weight), to_float(bias), to_float(running_mean),
                     to_float(running_var), batch_statistics,
                     /*momentum=*/0, eps, /*cudnn_enabled=*/false);
  return through_float ? output.to(type) : output;
}

std::string describe(const SyncBatchNormOptions& options) {
  return fmt::format(
      "d({}, eps={}{}, momentum={}, affine={}, track_running_stats={}, group={})",
      options.num_features(), options.eps(), options.eps_mode() == EpsMode::clamp ? " (clamp)" : "",
      options.momentum() ? fmt::format("{}", *options.momentum()) : "none", options.affine(),
      options.track_running_stats(), options.group() ? options.group()->name() : "default");
}

}  // namespace

SyncBatchNormOptions::SyncBatchNormOptions(const torch::nn::BatchNormOptions& options,
                                           std::optional<Group> group, std::source_location where)
    : num_features_(options.num_features()),
      eps_(options.eps()),
      affine_(options.affine()),
      track_running_stats_(options.track_running_stats()),
      group_(std::move(group)),
      made_at_(where) {
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

namespace detail {

NamedLayer::NamedLayer(std::string type, std::int64_t num_features, std::source_location made_at)
    : type_(std::move(type)),
      title_(std::make_shared<std::string>(fmt::format("{}({})", type_, num_features))),
      made_at_(made_at),
      tag_(static_cast<int>(internal::hash_of(made_at) & 0x7fffffffU)) {}

void NamedLayer::set_name(const std::string& name, Naming naming) {
  title_ = std::make_shared<std::string>(fmt::format("{} '{}'", type_, name));
  if (naming == Naming::on_all_ranks) tag_ = tag_of(name);
}

void name_layers(const torch::nn::Module& root, Naming naming) {
  for (const auto& item : root.named_modules()) {
    auto* const layer = dynamic_cast<NamedLayer*>(item.value().get());
    if (layer != nullptr && !item.key().empty()) layer->set_name(item.key(), naming);
  }
}

}  // namespace detail

template <std::size_t D, class Derived>
SyncBatchNormImplBase<D, Derived>::SyncBatchNormImplBase(const SyncBatchNormOptions& options_)
    : torch::nn::NormImplBase<D, Derived, SyncBatchNormOptions>(options_),
      NamedLayer(fmt::format("SyncBatchNorm{}d", D), options_.num_features(),
                 is_user_code(options_.made_at()) ? options_.made_at() : std::source_location()) {}

template <std::size_t D, class Derived>
ErrorContext SyncBatchNormImplBase<D, Derived>::context(std::source_location where) const {
  const auto& given = this->options.group();
  const Layer layer{given ? *given : bound_.group.value_or(Group()), title_,
                    is_user_code(where) ? where : made_at_};
  return layer.context(kForward);
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::set_group(const std::optional<Group>& group) {
  this->options.group(group);
  bound_ = {};
}

template <std::size_t D, class Derived>
Group SyncBatchNormImplBase<D, Derived>::present_group(std::source_location where) const {
  const auto& given = this->options.group();
  if (!given && bound_.group && !bound_.world->has_ended) return *bound_.group;
  // One that has used a world must not go on alone.
  if (!given && bound_.group && !is_distributed()) {
    internal::throw_left(*bound_.group, *bound_.world, context(where));
  }
  const Group& group = given ? *given : default_group();
  if (!internal::has_left(group)) return group;
  return internal::follow_world(group, context(where));
}

/// Not before a world exists: a module made or run before init_dist must use the world.
template <std::size_t D, class Derived>
Group SyncBatchNormImplBase<D, Derived>::bind_group(std::source_location where) {
  const Group group = present_group(where);
  const bool is_bound = bound_.group && !bound_.world->has_ended;
  if (!this->options.group() && !is_bound && is_distributed()) {
    // A group over an engine of the program's own is bound as long as the world lasts, too.
    const auto* const session = internal::session();
    bound_ = {group, internal::Session::membership_of(session ? session->world_group() : group)};
  }
  return group;
}

template <std::size_t D, class Derived>
Tensor SyncBatchNormImplBase<D, Derived>::forward(const Tensor& input, std::source_location where) {
  if (!this->is_training()) {  // nothing to synchronise
    check_dimensions(input, where);
    return evaluate(input, this->weight, this->bias, this->running_mean, this->running_var,
                    this->options.eps());
  }
  const auto& o = this->options;
  const bool is_replica = replica_.link && !replica_.link->is_alone();
  const auto record = c10::make_intrusive<BatchNormRecord>();
  BatchNormSettings& settings = record->settings;
  settings.layer = {.group = is_replica ? replica_.group : bind_group(where),
                    .title = title_,
                    .where = is_user_code(where) ? where : made_at_,
                    .n_channels = o.num_features(),
                    .tag = tag_,
                    .refuses = !is_replica || replica_.link->is_master()};
  settings.eps = o.eps();
  settings.eps_mode = o.eps_mode();
  settings.momentum = o.momentum();
  settings.running_mean = this->running_mean;
  settings.running_var = this->running_var;
  settings.num_batches_tracked = this->num_batches_tracked;
  settings.on_nonfinite = o.on_nonfinite();
  settings.layer.guard([&] { check_dimensions(input, where); });
  begin_batch(input, this->weight, this->bias, settings);
  Tensor output =
      is_replica ? replicated_batch_norm(input, this->weight, this->bias, *record, *replica_.link)
                 : synchronised_batch_norm(input, this->weight, this->bias, record);
  count_batch(*record);
  const auto& [mean, invstd] = record->on_device;
  // NaN where a mean is not finite, or a variance, whose invstd is 0 then.
  const Tensor there = mean.defined() ? ((mean - mean) / invstd).sum().isnan() : Tensor();
  if (record->nonfinite || there.defined()) {
    count_nonfinite(record->nonfinite, there);
    const auto original = std::dynamic_pointer_cast<Derived>(replica_.original.lock());
    if (original) original->count_nonfinite(record->nonfinite, there);
  }
  return output;
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::count_nonfinite(bool here, const Tensor& there) {
  if (here) ++n_nonfinite_batches_;
  if (!there.defined()) return;
  Tensor& n = n_nonfinite_on_device_;
  if (!n.defined()) n = at::zeros({}, there.options().dtype(at::kLong));
  // A clone of the module has the same tensor. In place otherwise, for CUDA graphs.
  if (n.use_count() > 1 || n.is_inference() || n.device() != there.device()) {
    n = n.to(there.options().dtype(at::kLong), /*non_blocking=*/false, /*copy=*/true);
  }
  n.add_(there);
}

template <std::size_t D, class Derived>
std::int64_t SyncBatchNormImplBase<D, Derived>::n_nonfinite_batches() const {
  const Tensor& there = n_nonfinite_on_device_;
  return n_nonfinite_batches_ + (there.defined() ? there.item<std::int64_t>() : 0);
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::_check_input_dim(const Tensor& input) {
  check_dimensions(input, std::source_location());
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::check_dimensions(const Tensor& input,
                                                         std::source_location where) const {
  const std::int64_t n_dims = input.defined() ? input.dim() : 0;
  const auto full = static_cast<std::int64_t>(D) + 2;
  if (n_dims == full || (D == 1 && n_dims == 2)) return;
  throw UsageError(context(where),
                   fmt::format("expected {}D input, got {}D input",
                               D == 1 ? std::string("2D or 3") : std::to_string(full), n_dims));
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::pretty_print(std::ostream& stream) const {
  stream << "lockstep::nn::SyncBatchNorm" << D << describe(this->options);
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::on_replicate(CallbackContext& context, int copy_id) {
  replica_.link = detail::ReplicaLink::join(context, copy_id);
  replica_.group = bind_group({});  // here, on the calling thread
  auto* const original = context.original();
  if (copy_id == 0 && original != nullptr && original != this) {
    replica_.original = original->weak_from_this();
  }
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::on_failure(const std::exception_ptr& error) {
  if (replica_.link) replica_.link->fail(error);
}

template class SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>;
template class SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>;
template class SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>;

}  // namespace lockstep::nn
