#include <lockstep/nn/zero_redundancy_optimizer.hpp>

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <lockstep/detail/collective.hpp>
#include <lockstep/error.hpp>
#include <lockstep/objects.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "nn/ddp/in_sync.hpp"
#include "nn/ddp/optimizer_state.hpp"
#include "nn/ddp/sharded_state.hpp"
#include "nn/elements/dense.hpp"
#include "nn/error.hpp"
#include "nn/tensors/hash.hpp"

/// A step: the ranks compare a hash of what they are about to do; each updates its pieces; then
/// these travel as a stream of bytes per rank, one slot of memory at a time.
namespace lockstep::nn {

namespace detail {

/// A class of elementwise optimizers, type-erased.
struct OptimizerClass {
  std::unique_ptr<torch::optim::Optimizer> (*make)(std::vector<at::Tensor> parameters,
                                                   const torch::optim::OptimizerOptions& defaults);
  std::optional<ElementState> (*state_of)(const torch::optim::Optimizer&, const at::Tensor&);
  void (*set_state)(torch::optim::Optimizer&, const at::Tensor&, const ElementState&);
  std::vector<std::pair<const char*, double>> (*values)(const torch::optim::OptimizerOptions&);
};

namespace {

using at::Tensor;
using torch::optim::OptimizerOptions;
using Optimizer = torch::optim::Optimizer;

constexpr const char* kZeroRedundancy = "ZeroRedundancyOptimizer";
/// Of all slots together, and of one: smaller ones cost rounds, larger ones leave the caches.
constexpr std::size_t kSharedBytes = 8U << 20U;
constexpr std::size_t kMinSlotBytes = 64U << 10U, kMaxSlotBytes = 1U << 20U;

// --- the optimizer classes ----------------------------------------------------------------------

using Values = std::vector<std::pair<const char*, double>>;

template <class Optimizer>
struct Parts;

template <>
struct Parts<torch::optim::SGD> {
  using State = torch::optim::SGDParamState;
  static std::vector<Tensor*> tensors(State& s) { return {&s.momentum_buffer()}; }
  static std::int64_t* step(State& /*s*/) { return nullptr; }
  static Values values(const torch::optim::SGDOptions& o) {
    return {{"lr", o.lr()},
            {"momentum", o.momentum()},
            {"dampening", o.dampening()},
            {"weight_decay", o.weight_decay()},
            {"nesterov", o.nesterov() ? 1 : 0}};
  }
};

template <class StateOfAdam, class OptionsOfAdam>
struct PartsOfAdam {
  using State = StateOfAdam;
  static std::vector<Tensor*> tensors(State& s) {
    return {&s.exp_avg(), &s.exp_avg_sq(), &s.max_exp_avg_sq()};
  }
  static std::int64_t* step(State& s) { return &s.step(); }
  static Values values(const OptionsOfAdam& o) {
    return {{"lr", o.lr()},   {"beta1", std::get<0>(o.betas())},  {"beta2", std::get<1>(o.betas())},
            {"eps", o.eps()}, {"weight_decay", o.weight_decay()}, {"amsgrad", o.amsgrad() ? 1 : 0}};
  }
};
template <>
struct Parts<torch::optim::Adam>
    : PartsOfAdam<torch::optim::AdamParamState, torch::optim::AdamOptions> {};
template <>
struct Parts<torch::optim::AdamW>
    : PartsOfAdam<torch::optim::AdamWParamState, torch::optim::AdamWOptions> {};

template <>
struct Parts<torch::optim::RMSprop> {
  using State = torch::optim::RMSpropParamState;
  static std::vector<Tensor*> tensors(State& s) {
    return {&s.square_avg(), &s.momentum_buffer(), &s.grad_avg()};
  }
  static std::int64_t* step(State& s) { return &s.step(); }
  static Values values(const torch::optim::RMSpropOptions& o) {
    return {{"lr", o.lr()},
            {"alpha", o.alpha()},
            {"eps", o.eps()},
            {"weight_decay", o.weight_decay()},
            {"momentum", o.momentum()},
            {"centered", o.centered() ? 1 : 0}};
  }
};

template <>
struct Parts<torch::optim::Adagrad> {
  using State = torch::optim::AdagradParamState;
  static std::vector<Tensor*> tensors(State& s) { return {&s.sum()}; }
  static std::int64_t* step(State& s) { return &s.step(); }
  static Values values(const torch::optim::AdagradOptions& o) {
    return {{"lr", o.lr()},
            {"lr_decay", o.lr_decay()},
            {"weight_decay", o.weight_decay()},
            {"initial_accumulator_value", o.initial_accumulator_value()},
            {"eps", o.eps()}};
  }
};

template <class Class>
struct Functions {
  using Options = typename ElementwiseOptions<Class>::type;
  using State = typename Parts<Class>::State;

  static std::unique_ptr<Optimizer> make(std::vector<Tensor> parameters,
                                         const OptimizerOptions& defaults) {
    return std::make_unique<Class>(std::move(parameters), static_cast<const Options&>(defaults));
  }
  static std::optional<ElementState> state_of(const Optimizer& optimizer, const Tensor& parameter) {
    const auto* const found = find_state(optimizer.state(), parameter);
    if (found == nullptr) return std::nullopt;
    State state = static_cast<const State&>(*found);
    ElementState result;
    for (const Tensor* tensor : Parts<Class>::tensors(state)) result.tensors.push_back(*tensor);
    if (const auto* const step = Parts<Class>::step(state)) result.step = *step;
    return result;
  }
  static void set_state(Optimizer& optimizer, const Tensor& parameter, const ElementState& from) {
    auto state = std::make_unique<State>();
    const auto tensors = Parts<Class>::tensors(*state);
    for (std::size_t i = 0; i < tensors.size(); ++i) *tensors[i] = from.tensors.at(i);
    if (auto* const step = Parts<Class>::step(*state)) *step = from.step;
    optimizer.state()[key_of_state(parameter)] = std::move(state);
  }
  static Values values(const OptimizerOptions& options) {
    return Parts<Class>::values(static_cast<const Options&>(options));
  }
};

template <class Class>
const OptimizerClass& class_with_functions() {
  using F = Functions<Class>;
  static constexpr OptimizerClass kClass{F::make, F::state_of, F::set_state, F::values};
  return kClass;
}

// --- tensors as sequences of elements -----------------------------------------------------------

/// Whether its elements fill a block of memory, in any order of dimensions.
bool fills_memory(const Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && has_values_in_memory(tensor);
}

/// The elements in the order in which `parameter` has them in memory, or their logical order if it
/// has gaps. A view where possible.
Tensor flat_like(const Tensor& parameter, const Tensor& values) {
  if (!fills_memory(parameter)) return values.reshape({-1});
  Tensor same = values;
  if (values.strides() != parameter.strides() || !has_values_in_memory(values)) {
    same = at::empty_strided(parameter.sizes(), parameter.strides(), values.options());
    same.copy_(values);
  }
  return same.as_strided({same.numel()}, {1}, same.storage_offset());
}

/// The tensor of the parameter's shape that has these elements.
Tensor shaped_like(const Tensor& parameter, const Tensor& flat) {
  if (!fills_memory(parameter)) return flat.view(parameter.sizes());
  return flat.as_strided(parameter.sizes(), parameter.strides());
}

Tensor piece_of(const Tensor& flat, const ShardedState::Piece& piece) {
  return flat.narrow(0, piece.begin, piece.n);
}

Tensor bytes_of(const Tensor& contiguous) { return contiguous.view(at::kByte); }

std::string to_bytes(const Tensor& tensor) {
  const Tensor values = dense(tensor.cpu());
  return {static_cast<const char*>(values.data_ptr()), values.nbytes()};
}

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

std::string name_of(std::size_t i, std::size_t i_group) {
  return fmt::format("parameter {} of the optimizer's parameter group {}", i, i_group);
}

std::string describe(const Tensor& tensor) {
  const std::string shape =
      fmt::format("{} [{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
  if (tensor.is_contiguous()) return shape;
  return fmt::format("{} with strides [{}]", shape, fmt::join(tensor.strides(), ", "));
}

}  // namespace

const OptimizerClass& class_of(const torch::optim::SGD* /*class*/) {
  return class_with_functions<torch::optim::SGD>();
}
const OptimizerClass& class_of(const torch::optim::Adam* /*class*/) {
  return class_with_functions<torch::optim::Adam>();
}
const OptimizerClass& class_of(const torch::optim::AdamW* /*class*/) {
  return class_with_functions<torch::optim::AdamW>();
}
const OptimizerClass& class_of(const torch::optim::RMSprop* /*class*/) {
  return class_with_functions<torch::optim::RMSprop>();
}
const OptimizerClass& class_of(const torch::optim::Adagrad* /*class*/) {
  return class_with_functions<torch::optim::Adagrad>();
}

ErrorContext ShardedState::context(std::source_location at) const {
  return context_of(kZeroRedundancy, group, at);
}

// --- parameter groups ---------------------------------------------------------------------------

void ShardedState::check_parameter(const Tensor& parameter, std::size_t i,
                                   std::size_t i_group) const {
  const auto reject = [&](const std::string& why) {
    throw UsageError(context(where), fmt::format("{} {}", name_of(i, i_group), why));
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

void ShardedState::add_groups(const Groups& all, const OptimizerOptions& defaults) {
  std::unordered_set<const void*> known;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto is_same = [](const Tensor& a, const Tensor& b) { return a.is_same(b); };
    if (g >= all.size() || !std::equal(groups[g].parameters.begin(), groups[g].parameters.end(),
                                       all[g].params().begin(), all[g].params().end(), is_same)) {
      throw UsageError(context(where),
                       fmt::format("the parameters of the optimizer's parameter group {} have been "
                                   "exchanged: add others with add_param_group, or construct a new "
                                   "optimizer",
                                   g));
    }
    for (std::size_t i = 0; i < groups[g].parameters.size(); ++i) {
      const Tensor& parameter = groups[g].parameters[i];
      known.insert(parameter.unsafeGetTensorImpl());
      if (Form(parameter) == groups[g].forms[i]) continue;
      throw UsageError(context(where),
                       fmt::format("{} is {} now: its type, shape or order in memory has changed "
                                   "(to(), set_data, load) since the optimizer cut it; construct "
                                   "the optimizer afterwards, and load its state into that one",
                                   name_of(i, g), describe(parameter)));
    }
  }
  const at::NoGradGuard no_graph;
  for (std::size_t g = groups.size(); g < all.size(); ++g) {
    ParameterGroup added;
    added.parameters = all[g].params();
    std::int64_t n_elements = 0;
    for (std::size_t i = 0; i < added.parameters.size(); ++i) {
      const Tensor& parameter = added.parameters[i];
      check_parameter(parameter, i, g);
      if (!known.insert(parameter.unsafeGetTensorImpl()).second) {
        throw UsageError(context(where),
                         fmt::format("{} is listed twice: list each once", name_of(i, g)));
      }
      n_elements += parameter.numel();
      added.forms.emplace_back(parameter);
    }
    const std::int64_t n_ranks = group.size();
    for (std::int64_t rank = 0; rank < n_ranks; ++rank) {
      const std::int64_t begin = n_elements * rank / n_ranks;
      const std::int64_t end = n_elements * (rank + 1) / n_ranks;
      std::vector<Piece>& pieces = added.pieces.emplace_back();
      std::int64_t at = 0;  // of the parameter in the group
      for (std::size_t i = 0; i < added.parameters.size(); ++i) {
        const std::int64_t next = at + added.parameters[i].numel();
        const std::int64_t first = std::max(at, begin), last = std::min(next, end);
        if (first < last) pieces.push_back({i, first - at, last - first});
        at = next;
      }
    }
    for (const Piece& piece : added.pieces[static_cast<std::size_t>(group.rank())]) {
      const Tensor& parameter = added.parameters[piece.parameter];
      added.slices.push_back(piece_of(flat_like(parameter, parameter.detach()), piece).detach());
    }
    added.optimizer = make_optimizer(added.slices, all[g].options(), defaults);
    groups.push_back(std::move(added));
  }
  check_memory();
}

/// Each rank updates its pieces from the old values: of two that are one piece of memory, the ranks
/// would keep different ones.
void ShardedState::check_memory() const {
  std::unordered_map<const void*, std::vector<std::pair<const Tensor*, std::string>>> by_storage;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].parameters.size(); ++i) {
      const Tensor& parameter = groups[g].parameters[i];
      auto& others = by_storage[parameter.storage().unsafeGetStorageImpl()];
      for (const auto& [other, name] : others) {
        const auto overlap = at::get_overlap_status(parameter, *other);
        if (overlap == at::MemOverlapStatus::No || overlap == at::MemOverlapStatus::TooHard) {
          continue;
        }
        throw UsageError(context(where),
                         fmt::format("{} shares memory with {}: tie weights by registering one "
                                     "tensor twice, and list it once",
                                     name_of(i, g), name));
      }
      others.emplace_back(&parameter, name_of(i, g));
    }
  }
}

// --- a step -------------------------------------------------------------------------------------

void ShardedState::agree(const Groups& all, std::source_location at) {
  if (group.size() == 1) {
    n_agreed = groups.size();
    return;
  }
  std::vector<std::uint64_t> signature;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    signature.push_back(groups[g].parameters.size());
    for (const auto& [name, value] : optimizer_class.values(all[g].options())) {
      signature.push_back(std::bit_cast<std::uint64_t>(value));
    }
    for (const Tensor& parameter : groups[g].parameters) {
      signature.push_back(parameter.grad().defined() ? 1 : 0);
    }
  }
  const std::uint64_t mine = hash_of_bytes(signature.data(), signature.size() * sizeof mine);
  std::vector<std::uint64_t> hashes(static_cast<std::size_t>(group.size()));
  group.all_gather({&mine, 1, DType::u64}, {hashes.data(), hashes.size(), DType::u64}, {}, at);
  const bool differs = std::ranges::count(hashes, mine) != group.size();
  if (!differs && n_agreed == groups.size()) return;

  Fingerprints prints{{"the optimizer", 0}};  // an empty list would be left out of the comparison
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const auto& [name, value] : optimizer_class.values(all[g].options())) {
      prints.emplace_back(fmt::format("option {} of the optimizer's parameter group {}", name, g),
                          std::bit_cast<std::uint64_t>(value));
    }
    for (std::size_t i = 0; i < groups[g].parameters.size(); ++i) {
      const Tensor& parameter = groups[g].parameters[i];
      const std::string text = fmt::format("{}, {}", name_of(i, g), describe(parameter));
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
    struct DropGradients {  // the program's own are views of buckets
      std::vector<Tensor>& slices;
      ~DropGradients() {
        for (Tensor& slice : slices) slice.mutable_grad().reset();
      }
    } const guard{of.slices};
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
        if (elements.defined()) streams[rank].push_back(bytes_of(piece_of(elements, piece)));
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

// --- the state of all ranks ---------------------------------------------------------------------

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
                        name_of(i, g), describe(tensor), describe(of.parameters[i])));
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
    sharded.agree(optimizer.param_groups(), where);
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
    sharded_->agree(param_groups(), where);
  });
}

ZeroRedundancyOptimizerBase::~ZeroRedundancyOptimizerBase() = default;

at::Tensor ZeroRedundancyOptimizerBase::step(LossClosure closure) {
  detail::ShardedState& sharded = *sharded_;
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
                        detail::name_of(i, g)));
      }
    }
    sharded.agree(param_groups(), sharded.where);
    sharded.consolidated.reset();
    sharded.update(param_groups());
  });
  return loss;
}

void ZeroRedundancyOptimizerBase::consolidate(int to, std::source_location where) {
  detail::ShardedState& sharded = *sharded_;
  if (to < 0 || to >= sharded.group.size()) {
    const std::string text =
        fmt::format("there is no rank {} among {} ranks", to, sharded.group.size());
    lockstep::detail::Collective(detail::kZeroRedundancy, sharded.group, where).refuse(text);
    throw UsageError(sharded.context(where), text);
  }
  lockstep::detail::Collective(detail::kZeroRedundancy, sharded.group, where).run([&] {
    sharded.add_groups(param_groups(), defaults());
    sharded.agree(param_groups(), where);
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
