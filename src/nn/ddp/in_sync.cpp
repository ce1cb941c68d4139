#include "nn/ddp/in_sync.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/detail/collective.hpp>
#include <lockstep/nn/assert_in_sync.hpp>
#include <lockstep/objects.hpp>

#include "base/hash.hpp"
#include "nn/ddp/optimizer_state.hpp"
#include "nn/elements/dense.hpp"
#include "nn/error.hpp"
#include "nn/training/checkpoint_file.hpp"

namespace lockstep::nn {
namespace {

/// Hashes an optimizer's options or its state for one parameter, which can serialise themselves.
template <class Part>
std::uint64_t hash_of_saved(const Part& part) {
  const std::string bytes = archive_bytes([&](auto& archive) { part.serialize(archive); });
  return base::hash_of_bytes(bytes.data(), bytes.size());
}

void add_tensors(Fingerprints& all, const char* kind,
                 const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  for (const auto& item : tensors) {
    all.emplace_back(fmt::format("{} {}", kind, item.key()), hash_of_tensor(item.value()));
  }
}

/// The options of each parameter group and the state of each parameter.
void add_state(Fingerprints& all, const torch::optim::Optimizer& optimizer,
               const torch::OrderedDict<std::string, at::Tensor>& parameters) {
  const auto name_of = [&](const at::Tensor& tensor) {
    for (const auto& item : parameters) {
      if (item.value().is_same(tensor)) return "parameter " + item.key();
    }
    return std::string("an unnamed parameter");
  };
  std::size_t i_group = 0;
  for (const auto& group : optimizer.param_groups()) {
    const std::string suffix = fmt::format("of the optimizer's parameter group {}", i_group++);
    if (group.has_options()) {
      all.emplace_back("the options " + suffix, hash_of_saved(group.options()));
    }
    for (const at::Tensor& parameter : group.params()) {
      const auto* const state = find_state(optimizer.state(), parameter);
      all.emplace_back("the optimizer's state for " + name_of(parameter),
                       state == nullptr ? 0 : hash_of_saved(*state));
    }
  }
}

}  // namespace

std::uint64_t hash_of_tensor(const at::Tensor& tensor) {
  const at::Tensor values =
      dense((tensor.is_quantized() ? tensor.dequantize() : tensor.detach().to_dense()).cpu());
  const std::string kind =
      fmt::format("{} {}", c10::toString(tensor.scalar_type()), fmt::join(values.sizes(), "x"));
  return base::hash_of_bytes(values.data_ptr(), values.nbytes()) ^
         (3 * base::hash_of_bytes(kind.data(), kind.size()));
}

Fingerprints fingerprints_of_parameters(const torch::nn::Module& module) {
  Fingerprints result;
  add_tensors(result, "parameter", module.named_parameters());
  return result;
}

void check_fingerprints(const Fingerprints& mine, const Group& group, const ErrorContext& context,
                        const char* advice) {
  const auto all = all_gather_object(mine, group, {}, context.where);
  std::size_t first = 0;
  while (first < all.size() && all[first].empty()) ++first;
  for (std::size_t rank = first + 1; rank < all.size(); ++rank) {
    if (all[rank].empty() || all[rank] == all[first]) continue;
    for (std::size_t i = 0;; ++i) {
      const bool is_in_first = i < all[first].size();
      const bool is_in_rank = i < all[rank].size();
      if (is_in_first && is_in_rank && all[first][i] == all[rank][i]) continue;
      if (is_in_first && is_in_rank && all[first][i].first == all[rank][i].first) {
        throw MismatchError(context, fmt::format("{} of rank {} and rank {} differ: {}",
                                                 all[rank][i].first, rank, first, advice));
      }
      throw MismatchError(
          context, fmt::format("rank {} has {} where rank {} has {}: all must have the same", first,
                               is_in_first ? all[first][i].first : "nothing more", rank,
                               is_in_rank ? all[rank][i].first : "nothing more"));
    }
  }
}

void detail::assert_in_sync(const torch::nn::Module& module,
                            const torch::optim::Optimizer* optimizer, const Group& group,
                            std::source_location where) {
  lockstep::detail::Collective("assert_in_sync", group, where).run([&] {
    Fingerprints all{{"the module", 0}};  // an empty list would be left out of the comparison
    const auto parameters = module.named_parameters();
    add_tensors(all, "parameter", parameters);
    add_tensors(all, "buffer", module.named_buffers());
    if (optimizer != nullptr) add_state(all, *optimizer, parameters);
    check_fingerprints(
        all, group, context_of("assert_in_sync", group, where),
        "make the same changes on all ranks, average the gradients, and keep buffers "
        "equal, as SyncBatchNorm does");
  });
}

}  // namespace lockstep::nn
