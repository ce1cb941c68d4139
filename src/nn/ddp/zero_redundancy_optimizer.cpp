#include <lockstep/nn/zero_redundancy_optimizer.hpp>

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <bit>
#include <lockstep/detail/collective.hpp>
#include <lockstep/error.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/hash.hpp"
#include "nn/ddp/in_sync.hpp"
#include "nn/ddp/sharded_state.hpp"
#include "nn/error.hpp"
#include "world/session.hpp"

/// A step: the ranks compare a hash of what they are about to do; each updates its pieces; then
/// these travel as a stream of bytes per rank, one slot of memory at a time.
namespace lockstep::nn {
namespace detail {
namespace {

using at::Tensor;
using torch::optim::OptimizerOptions;
using Optimizer = torch::optim::Optimizer;

/// Of all slots together, and of one: smaller ones cost rounds, larger ones leave the caches.
constexpr std::size_t kSharedBytes = 8U << 20U;
constexpr std::size_t kMinSlotBytes = 64U << 10U, kMaxSlotBytes = 1U << 20U;

Tensor as_bytes(const Tensor& contiguous) { return contiguous.view(at::kByte); }

/// Copies the part of a stream from `offset` on to a slot, or from it.
enum class Direction { to_slot, from_slot };
void copy_part(Direction direction, const std::vector<Tensor>& stream, std::int64_t offset,
               const Tensor& slot) {
  std::int64_t begin = 0;  // of the piece in the stream
  for (const Tensor& piece : stream) {
    const std::int64_t end = begin + piece.numel();
    const std::int64_t first = std::max(begin, offset);
    const std::int64_t last = std::min(end, offset + slot.numel());
    if (first < last) {
      Tensor in_piece = piece.narrow(0, first - begin, last - first);
      Tensor in_slot = slot.narrow(0, first - offset, last - first);
      if (direction == Direction::to_slot) {
        in_slot.copy_(in_piece);
      } else {
        in_piece.copy_(in_slot);
      }
    }
    begin = end;
  }
}

}  // namespace

ErrorContext ShardedState::context(std::source_location at) const {
  return context_of(kZeroRedundancy, group, at);
}

void ShardedState::check_world(std::source_location at) const {
  internal::check_not_left(group, context(at));
}

// --- parameter groups ---------------------------------------------------------------------------

void ShardedState::check_parameter(const Tensor& parameter, std::size_t i,
                                   std::size_t i_group) const {
  const auto reject = [&](const std::string& why) {
    throw UsageError(context(where), fmt::format("{} {}", name_of_parameter(i, i_group), why));
  };
  if (!parameter.defined()) reject("is an undefined tensor: leave it out");
  if (!(parameter.is_cpu() || parameter.is_cuda()) || parameter.layout() != at::kStrided) {
    reject(fmt::format("is a {}: make it a dense tensor on a CPU or CUDA device",
                       parameter.toString()));
  }
  // Only such tensors have a stride of 0.
  for (std::int64_t d = 0; d < parameter.dim(); ++d) {
    if (parameter.size(d) > 1 && parameter.stride(d) == 0) {
      reject("has elements that share memory, as those of expand() do: use contiguous()");
    }
  }
}

std::shared_ptr<Optimizer> ShardedState::make_optimizer(const std::vector<Tensor>& slices,
                                                        const OptimizerOptions& options,
                                                        const OptimizerOptions& defaults) const {
  if (slices.empty()) {
    optimizer_class.make({at::empty({0})}, defaults);  // refuses options on all ranks alike
    return nullptr;
  }
  std::shared_ptr<Optimizer> optimizer = optimizer_class.make(slices, defaults);
  optimizer->param_groups().front().set_options(options.clone());
  return optimizer;
}

bool ShardedState::check_known(const Groups& all) const {
  bool has_moved = false;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const ParameterGroup& of = groups[g];
    const auto is_same = [](const Tensor& a, const Tensor& b) { return a.is_same(b); };
    if (g >= all.size() || !std::ranges::equal(of.parameters, all[g].params(), is_same)) {
      throw UsageError(context(where),
                       fmt::format("the parameters of the optimizer's parameter group {} have been "
                                   "exchanged: add others with add_param_group, or construct a new "
                                   "optimizer",
                                   g));
    }
    for (std::size_t i = 0; i < of.parameters.size(); ++i) {
      const Tensor& parameter = of.parameters[i];
      if (of.forms[i].fits(parameter)) {
        has_moved = has_moved || of.forms[i].address != parameter.data_ptr();
        continue;
      }
      throw UsageError(context(where),
                       fmt::format("{} is {} now: its type, shape or order in memory has changed "
                                   "(to(), set_data, load) since the optimizer cut it; construct "
                                   "the optimizer afterwards, and load its state into that one",
                                   name_of_parameter(i, g), describe(parameter)));
    }
  }
  return has_moved;
}

void ShardedState::check_memory(const Groups& all) const {
  std::unordered_map<const void*, std::vector<std::array<std::size_t, 2>>> by_storage;
  for (std::size_t g = 0; g < all.size(); ++g) {
    for (std::size_t i = 0; i < all[g].params().size(); ++i) {
      const Tensor& parameter = all[g].params()[i];
      auto& others = by_storage[parameter.storage().unsafeGetStorageImpl()];
      for (const auto& [other_g, other_i] : others) {
        const Tensor& other = all[other_g].params()[other_i];
        if (parameter.is_same(other)) {
          throw UsageError(context(where), fmt::format("{} is listed twice: list each once",
                                                       name_of_parameter(i, g)));
        }
        const auto overlap = at::get_overlap_status(parameter, other);
        if (overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial) {
          continue;
        }
        throw UsageError(context(where),
                         fmt::format("{} shares memory with {}: tie weights by registering one "
                                     "tensor twice, and list it once",
                                     name_of_parameter(i, g), name_of_parameter(other_i, other_g)));
      }
      others.push_back({g, i});
    }
  }
}

void ShardedState::add_groups(const Groups& all, const OptimizerOptions& defaults) {
  const bool has_moved = check_known(all);
  for (std::size_t g = groups.size(); g < all.size(); ++g) {
    for (std::size_t i = 0; i < all[g].params().size(); ++i) {
      check_parameter(all[g].params()[i], i, g);
    }
  }
  if (has_moved || groups.size() < all.size()) check_memory(all);
  for (ParameterGroup& of : groups) {
    for (std::size_t i = 0; has_moved && i < of.forms.size(); ++i) {
      of.forms[i].address = of.parameters[i].data_ptr();
    }
  }
  const at::NoGradGuard no_graph;
  while (groups.size() < all.size()) {
    const auto& next = all[groups.size()];
    ParameterGroup added = cut(next.params());
    added.optimizer = make_optimizer(added.slices, next.options(), defaults);
    groups.push_back(std::move(added));
  }
}

ShardedState::ParameterGroup ShardedState::cut(const std::vector<Tensor>& parameters) const {
  ParameterGroup added;
  added.parameters = parameters;
  for (const Tensor& parameter : parameters) added.forms.emplace_back(parameter);
  std::int64_t n_elements = 0;
  for (const Tensor& parameter : parameters) n_elements += parameter.numel();
  const std::int64_t n_ranks = group.size();
  for (std::int64_t rank = 0; rank < n_ranks; ++rank) {
    const std::int64_t begin = n_elements * rank / n_ranks;
    const std::int64_t end = n_elements * (rank + 1) / n_ranks;
    std::vector<Piece>& pieces = added.pieces.emplace_back();
    std::int64_t at = 0;  // of the parameter in the group
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const std::int64_t next = at + parameters[i].numel();
      const std::int64_t first = std::max(at, begin), last = std::min(next, end);
      if (first < last) pieces.push_back({i, first - at, last - first});
      at = next;
    }
  }
  for (const Piece& piece : added.pieces[static_cast<std::size_t>(group.rank())]) {
    const Tensor& parameter = parameters[piece.parameter];
    added.slices.push_back(piece_of(flat_like(parameter, parameter.detach()), piece).detach());
  }
  return added;
}

// --- a step -------------------------------------------------------------------------------------

void ShardedState::agree(std::string_view what, const Groups& all, std::source_location at) {
  if (group.size() == 1) {
    n_agreed = groups.size();
    return;
  }
  std::vector<std::uint64_t> signature{base::hash_of_bytes(what.data(), what.size())};
  for (std::size_t g = 0; g < groups.size(); ++g) {
    signature.push_back(groups[g].parameters.size());
    for (const auto& [name, value] : optimizer_class.values(all[g].options())) {
      signature.push_back(std::bit_cast<std::uint64_t>(value));
    }
    for (const Tensor& parameter : groups[g].parameters) {
      signature.push_back(parameter.grad().defined() ? 1 : 0);
    }
  }
  const std::uint64_t mine = base::hash_of_bytes(signature.data(), signature.size() * sizeof mine);
  std::vector<std::uint64_t> hashes(static_cast<std::size_t>(group.size()));
  group.all_gather({&mine, 1, DType::u64}, {hashes.data(), hashes.size(), DType::u64}, {}, at);
  const bool differs = std::ranges::count(hashes, mine) != group.size();
  if (!differs && n_agreed == groups.size()) return;

  Fingerprints prints{{std::string(what), 0}};  // an empty list would be left out
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const auto& [name, value] : optimizer_class.values(all[g].options())) {
      prints.emplace_back(fmt::format("option {} of the optimizer's parameter group {}", name, g),
                          std::bit_cast<std::uint64_t>(value));
    }
    for (std::size_t i = 0; i < groups[g].parameters.size(); ++i) {
      const Tensor& parameter = groups[g].parameters[i];
      const std::string text = fmt::format("{}, {}", name_of_parameter(i, g), describe(parameter));
      prints.emplace_back(text, g < n_agreed ? 0 : hash_of_tensor(parameter));
      prints.emplace_back(fmt::format("the presence of a gradient of {}", text),
                          parameter.grad().defined() ? 1 : 0);
    }
  }
  check_fingerprints(prints, group, context(at),
                     n_agreed == groups.size()
                         ? "have the same options on all ranks, and each gradient on all or on none"
                         : "construct the optimizer after DistributedDataParallel, which makes the "
                           "parameters equal, or seed all ranks alike; use the same options");
  n_agreed = groups.size();

  const auto n_ranks = static_cast<std::size_t>(group.size());
  std::size_t longest = 0;
  for (std::size_t rank = 0; rank < n_ranks; ++rank) {
    std::size_t n_bytes = 0;
    for (const ParameterGroup& of : groups) {
      for (const Piece& piece : of.pieces[rank]) {
        n_bytes +=
            static_cast<std::size_t>(piece.n) * of.parameters[piece.parameter].element_size();
      }
    }
    longest = std::max(longest, n_bytes);
  }
  const std::size_t wanted =
      std::min(longest, std::clamp(kSharedBytes / (n_ranks + 1), kMinSlotBytes, kMaxSlotBytes));
  if (wanted <= slot_bytes) return;
  memory = {};
  memory = group.allocate((n_ranks + 1) * wanted, at);
  slot_bytes = wanted;
}

void ShardedState::update(const Groups& all) {
  const auto n_ranks = static_cast<std::size_t>(group.size());
  const auto own_rank = static_cast<std::size_t>(group.rank());
  std::vector<std::vector<Tensor>> streams(n_ranks);
  std::vector<std::pair<Tensor, Tensor>> copied;  // parameters with gaps, and their elements
  for (std::size_t g = 0; g < groups.size(); ++g) {
    ParameterGroup& of = groups[g];
    std::vector<Tensor> flat(of.parameters.size());
    for (std::size_t i = 0; i < flat.size(); ++i) {
      const Tensor& parameter = of.parameters[i];
      if (!parameter.grad().defined()) continue;
      flat[i] = flat_like(parameter, parameter.detach());
      if (!fills_memory(parameter)) {
        flat[i] = flat[i].clone(at::MemoryFormat::Contiguous);
        copied.emplace_back(parameter, flat[i]);
      }
      torch::autograd::impl::bump_version(parameter);
    }
    // The program's own are views of buckets.
    const auto drop_gradients = c10::make_scope_exit([&of] {
      for (Tensor& slice : of.slices) slice.mutable_grad().reset();
    });
    const std::vector<Piece>& own = of.pieces[own_rank];
    for (std::size_t p = 0; p < own.size(); ++p) {
      const Tensor& parameter = of.parameters[own[p].parameter];
      if (!parameter.grad().defined()) continue;
      of.slices[p].set_data(piece_of(flat[own[p].parameter], own[p]));
      of.slices[p].mutable_grad() =
          piece_of(flat_like(parameter, parameter.grad().detach()), own[p]);
    }
    if (of.optimizer) {
      of.optimizer->param_groups().front().set_options(all[g].options().clone());
      of.optimizer->step();
    }
    for (std::size_t rank = 0; rank < n_ranks; ++rank) {
      for (const Piece& piece : of.pieces[rank]) {
        const Tensor& elements = flat[piece.parameter];
        if (elements.defined()) streams[rank].push_back(as_bytes(piece_of(elements, piece)));
      }
    }
  }
  if (n_ranks > 1) send_updated(streams);
  for (auto& [parameter, elements] : copied) {
    parameter.detach().copy_(elements.view(parameter.sizes()));
  }
}

void ShardedState::send_updated(const std::vector<std::vector<Tensor>>& streams) {
  const auto own_rank = static_cast<std::size_t>(group.rank());
  std::int64_t longest = 0;
  for (const auto& stream : streams) {
    std::int64_t n = 0;
    for (const Tensor& piece : stream) n += piece.numel();
    longest = std::max(longest, n);
  }
  const auto slot_size = static_cast<std::int64_t>(slot_bytes);
  for (std::int64_t offset = 0; offset < longest; offset += slot_size) {
    const std::int64_t n = std::min(slot_size, longest - offset);
    const auto slot = [&](std::size_t i) {
      return at::from_blob(memory.data() + i * static_cast<std::size_t>(n), {n}, at::kByte);
    };
    copy_part(Direction::to_slot, streams[own_rank], offset, slot(0));
    const auto n_bytes = static_cast<std::size_t>(n);
    group.all_gather({memory.data(), n_bytes, DType::u8},
                     {memory.data() + n_bytes, n_bytes * streams.size(), DType::u8}, {}, where);
    for (std::size_t rank = 0; rank < streams.size(); ++rank) {
      if (rank != own_rank) {
        copy_part(Direction::from_slot, streams[rank], offset, slot(rank + 1));
      }
    }
  }
}

}  // namespace detail

ZeroRedundancyOptimizerBase::ZeroRedundancyOptimizerBase(
    std::vector<torch::optim::OptimizerParamGroup> groups,
    std::unique_ptr<torch::optim::OptimizerOptions> defaults,
    const detail::OptimizerClass& optimizer, const Group& group, std::source_location where)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::move(defaults)),
      sharded_(std::make_unique<detail::ShardedState>(optimizer, group, where)) {
  lockstep::detail::Collective(detail::kZeroRedundancy, group, where).run([&] {
    for (const auto& one : groups) add_param_group(one);
    sharded_->add_groups(param_groups(), this->defaults());
    sharded_->agree("a construction", param_groups(), where);
  });
}

ZeroRedundancyOptimizerBase::~ZeroRedundancyOptimizerBase() = default;

at::Tensor ZeroRedundancyOptimizerBase::step(LossClosure closure) {
  detail::ShardedState& sharded = *sharded_;
  sharded.check_world(sharded.where);
  at::Tensor loss;
  lockstep::detail::Collective(detail::kZeroRedundancy, sharded.group, sharded.where).run([&] {
    if (closure != nullptr) {
      const at::AutoGradMode with_gradients(true);
      loss = closure();
    }
    const at::NoGradGuard no_graph;
    sharded.add_groups(param_groups(), defaults());
    for (std::size_t g = 0; g < sharded.groups.size(); ++g) {
      const auto& parameters = sharded.groups[g].parameters;
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const at::Tensor& gradient = parameters[i].grad();
        if (!gradient.defined() || gradient.layout() == at::kStrided) continue;
        throw UsageError(
            sharded.context(sharded.where),
            fmt::format("the gradient of {} is sparse: use Embedding without sparse(true), or give "
                        "this parameter a plain optimizer",
                        detail::name_of_parameter(i, g)));
      }
    }
    sharded.agree("a step", param_groups(), sharded.where);
    sharded.consolidated.reset();
    sharded.update(param_groups());
  });
  return loss;
}

void ZeroRedundancyOptimizerBase::consolidate(int to, std::source_location where) {
  detail::ShardedState& sharded = *sharded_;
  sharded.check_world(where);
  if (const std::string text = why_no_rank("to", to, sharded.group); !text.empty()) {
    lockstep::detail::Collective(detail::kZeroRedundancy, sharded.group, where).refuse(text);
    throw UsageError(sharded.context(where), text);
  }
  lockstep::detail::Collective(detail::kZeroRedundancy, sharded.group, where).run([&] {
    sharded.add_groups(param_groups(), defaults());
    sharded.agree(detail::kConsolidation, param_groups(), where);
    sharded.gather_on(to, param_groups(), defaults(), where);
  });
}

void ZeroRedundancyOptimizerBase::save(torch::serialize::OutputArchive& archive) const {
  detail::ShardedState& sharded = *sharded_;
  if (sharded.group.size() == 1) {
    sharded.add_groups(param_groups(), defaults());
    if (const auto plain = sharded.assemble({sharded.own_state()}, param_groups(), defaults())) {
      plain->save(archive);
    }
    return;
  }
  if (!sharded.consolidated) {
    throw UsageError(sharded.context(sharded.where),
                     fmt::format("rank {} has only its part of the state: call consolidate({}) on "
                                 "all ranks before save, or use save_training, which does",
                                 sharded.group.rank(), sharded.group.rank()));
  }
  sharded.consolidated->save(archive);
}

void ZeroRedundancyOptimizerBase::load(torch::serialize::InputArchive& archive) {
  sharded_->add_groups(param_groups(), defaults());
  sharded_->load(archive, param_groups(), defaults());
}

std::size_t ZeroRedundancyOptimizerBase::n_state_bytes() const {
  std::size_t n_bytes = 0;
  for (const auto& of : sharded_->groups) {
    for (const at::Tensor& slice : of.slices) {
      const auto state = sharded_->optimizer_class.state_of(*of.optimizer, slice);
      if (!state) continue;
      for (const at::Tensor& tensor : state->tensors) {
        if (tensor.defined()) n_bytes += tensor.nbytes();
      }
    }
  }
  return n_bytes;
}

}  // namespace lockstep::nn
