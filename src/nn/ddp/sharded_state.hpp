#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <functional>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <lockstep/nn/zero_redundancy_optimizer.hpp>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nn/ddp/optimizer_class.hpp"
#include "nn/elements/dense.hpp"

namespace lockstep::nn::detail {

/// The operation's name in errors.
inline constexpr const char* kZeroRedundancy = "ZeroRedundancyOptimizer";
/// What ranks agree on before they gather their states.
inline constexpr const char* kConsolidation = "a consolidation, as of save_training,";

/// The state of a piece as bytes.
struct SentState {
  bool exists = false;
  std::int64_t step = 0;
  std::vector<std::string> tensors;  ///< empty: undefined

  template <class Archive>
  void serialize(Archive& archive) {
    archive(exists, step, tensors);
  }
};

/// The implementation of a ZeroRedundancyOptimizer, and what save_training, load_training, join and
/// ElasticState need of one.
///
/// Each parameter group has an optimizer of its own, over flat tensors: this rank's pieces of the
/// parameters, in the order of the elements in memory. In a step their memory is set to that of the
/// parameters. Tensors with gaps between their elements are copied instead.
struct ShardedState {
  /// Elements of a parameter that one rank updates.
  struct Piece {
    std::size_t parameter = 0;
    std::int64_t begin = 0, n = 0;
  };
  /// How a parameter lay in memory when it was cut: its state is in the order of its elements
  /// there.
  struct Form {
    at::ScalarType type;
    std::vector<std::int64_t> sizes, strides;
    const void* address;  ///< at the last look; it may move

    explicit Form(const at::Tensor& of)
        : type(of.scalar_type()),
          sizes(of.sizes().vec()),
          strides(of.strides().vec()),
          address(of.data_ptr()) {}
    bool fits(const at::Tensor& parameter) const {
      return parameter.layout() == at::kStrided && parameter.scalar_type() == type &&
             parameter.sizes() == sizes && parameter.strides() == strides;
    }
  };
  struct ParameterGroup {
    std::vector<at::Tensor> parameters;
    std::vector<Form> forms;
    std::vector<std::vector<Piece>> pieces;  ///< by rank
    std::vector<at::Tensor> slices;          ///< of this rank's pieces: the optimizer's parameters
    std::shared_ptr<torch::optim::Optimizer> optimizer;  ///< null if there is no such piece
  };
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  ShardedState(const OptimizerClass& of, Group with, std::source_location made_at)
      : optimizer_class(of), group(std::move(with)), where(made_at) {}

  /// Null if it is none.
  static const ZeroRedundancyOptimizerBase* find(const torch::optim::Optimizer* optimizer);
  /// Collective over its group: on the rank that passes true, if one does.
  static void consolidate(const ZeroRedundancyOptimizerBase& optimizer, bool is_here,
                          std::source_location where);
  static void drop_consolidated(const ZeroRedundancyOptimizerBase& optimizer) noexcept;
  /// Returns what undoes a load. Local.
  static std::function<void()> undo_of_load(const ZeroRedundancyOptimizerBase& optimizer);

  /// Cuts parameter groups that are new. Throws UsageError if known ones have changed, or if
  /// parameters share memory.
  void add_groups(const Groups& all, const torch::optim::OptimizerOptions& defaults);
  std::shared_ptr<torch::optim::Optimizer> make_optimizer(
      const std::vector<at::Tensor>& slices, const torch::optim::OptimizerOptions& options,
      const torch::optim::OptimizerOptions& defaults) const;
  /// Throws UsageError if the parameters of a group that was cut are others now, or have another
  /// form. Returns whether one has moved in memory.
  bool check_known(const Groups& all) const;
  /// Throws UsageError if two parameters share memory: each rank updates its pieces from the old
  /// values, so the ranks would keep different ones.
  void check_memory(const Groups& all) const;
  ParameterGroup cut(const std::vector<at::Tensor>& parameters) const;
  void check_parameter(const at::Tensor& parameter, std::size_t i, std::size_t i_group) const;
  /// Collective: throws MismatchError if the ranks differ, also in what they are about to do.
  /// Compares the values of parameters in new groups.
  void agree(std::string_view what, const Groups& all, std::source_location at);
  void update(const Groups& all);
  void send_updated(const std::vector<std::vector<at::Tensor>>& streams);
  std::vector<SentState> own_state() const;
  /// A plain optimizer with the state of all ranks.
  std::unique_ptr<torch::optim::Optimizer> assemble(
      const std::vector<std::vector<SentState>>& of_ranks, const Groups& all,
      const torch::optim::OptimizerOptions& defaults) const;
  void gather_on(int to, const Groups& all, const torch::optim::OptimizerOptions& defaults,
                 std::source_location at);
  void load(torch::serialize::InputArchive& archive, const Groups& all,
            const torch::optim::OptimizerOptions& defaults);
  ErrorContext context(std::source_location at) const;
  /// Throws UsageError if this rank has left the world in which this was made.
  void check_world(std::source_location at) const;

  const OptimizerClass& optimizer_class;
  Group group;
  std::source_location where;  ///< of the construction
  std::vector<ParameterGroup> groups;
  std::size_t n_agreed = 0;  ///< groups that all ranks have
  SharedBuffer memory;       ///< one slot to send, size() to receive
  std::size_t slot_bytes = 0;
  std::unique_ptr<torch::optim::Optimizer> consolidated;
};

// --- tensors as sequences of elements -----------------------------------------------------------

/// Whether its elements fill a block of memory, in any order of dimensions.
inline bool fills_memory(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && has_values_in_memory(tensor);
}

/// The elements in the order in which `parameter` has them in memory, or their logical order if it
/// has gaps. A view where possible.
inline at::Tensor flat_like(const at::Tensor& parameter, const at::Tensor& values) {
  if (!fills_memory(parameter)) return values.reshape({-1});
  at::Tensor same = values;
  if (values.strides() != parameter.strides() || !has_values_in_memory(values)) {
    same = at::empty_strided(parameter.sizes(), parameter.strides(), values.options());
    same.copy_(values);
  }
  return same.as_strided({same.numel()}, {1}, same.storage_offset());
}

/// The tensor of the parameter's shape that has these elements.
inline at::Tensor shaped_like(const at::Tensor& parameter, const at::Tensor& flat) {
  if (!fills_memory(parameter)) return flat.view(parameter.sizes());
  return flat.as_strided(parameter.sizes(), parameter.strides());
}

inline at::Tensor piece_of(const at::Tensor& flat, const ShardedState::Piece& piece) {
  return flat.narrow(0, piece.begin, piece.n);
}

// --- texts ---------------------------------------------------------------------------------------

inline std::string name_of_parameter(std::size_t i, std::size_t i_group) {
  return fmt::format("parameter {} of the optimizer's parameter group {}", i, i_group);
}

inline std::string describe(const at::Tensor& tensor) {
  const std::string shape =
      fmt::format("{} [{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
  if (tensor.is_contiguous()) return shape;
  return fmt::format("{} with strides [{}]", shape, fmt::join(tensor.strides(), ", "));
}

}  // namespace lockstep::nn::detail
