#pragma once

#include <cstdint>
#include <functional>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <lockstep/nn/zero_redundancy_optimizer.hpp>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::nn::detail {

/// Of a parameter or a piece of one: the tensors in the order of the class, undefined where it has
/// none.
struct ElementState {
  std::int64_t step = 0;
  std::vector<at::Tensor> tensors;
};

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

    explicit Form(const at::Tensor& of)
        : type(of.scalar_type()), sizes(of.sizes().vec()), strides(of.strides().vec()) {}
    bool operator==(const Form&) const = default;
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
  void check_memory() const;
  void check_parameter(const at::Tensor& parameter, std::size_t i, std::size_t i_group) const;
  /// Collective: throws MismatchError if the ranks differ. Compares the values of parameters in new
  /// groups.
  void agree(const Groups& all, std::source_location at);
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

  const OptimizerClass& optimizer_class;
  Group group;
  std::source_location where;  ///< of the construction
  std::vector<ParameterGroup> groups;
  std::size_t n_agreed = 0;  ///< groups that all ranks have
  SharedBuffer memory;       ///< one slot to send, size() to receive
  std::size_t slot_bytes = 0;
  std::unique_ptr<torch::optim::Optimizer> consolidated;
};

}  // namespace lockstep::nn::detail
