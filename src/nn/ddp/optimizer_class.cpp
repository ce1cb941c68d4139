#include "nn/ddp/optimizer_class.hpp"

#include "nn/ddp/optimizer_state.hpp"

namespace lockstep::nn::detail {
namespace {

using at::Tensor;
using torch::optim::OptimizerOptions;
using Optimizer = torch::optim::Optimizer;

using Values = std::vector<std::pair<const char*, double>>;

template <class Optimizer>
struct Parts;

template <>
struct Parts<torch::optim::SGD> {
  using State = torch::optim::SGDParamState;
  static std::vector<Tensor*> tensors(State& s) { return {&s.momentum_buffer()}; }
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
  using Options = ElementwiseOptions<Class>;
  using State = typename Parts<Class>::State;
  static constexpr bool kCountsSteps = requires(State & state) { state.step(); };

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
    if constexpr (kCountsSteps) result.step = state.step();
    return result;
  }
  static void set_state(Optimizer& optimizer, const Tensor& parameter, const ElementState& from) {
    auto state = std::make_unique<State>();
    const auto tensors = Parts<Class>::tensors(*state);
    for (std::size_t i = 0; i < tensors.size(); ++i) *tensors[i] = from.tensors.at(i);
    if constexpr (kCountsSteps) state->step(from.step);
    optimizer.state()[key_of_state(parameter)] = std::move(state);
  }
  static Values values(const OptimizerOptions& options) {
    return Parts<Class>::values(static_cast<const Options&>(options));
  }
};

}  // namespace

template <class Class>
const OptimizerClass& class_of() {
  using F = Functions<Class>;
  static constexpr OptimizerClass kClass{F::make, F::state_of, F::set_state, F::values};
  return kClass;
}
template const OptimizerClass& class_of<torch::optim::SGD>();
template const OptimizerClass& class_of<torch::optim::Adam>();
template const OptimizerClass& class_of<torch::optim::AdamW>();
template const OptimizerClass& class_of<torch::optim::RMSprop>();
template const OptimizerClass& class_of<torch::optim::Adagrad>();

}  // namespace lockstep::nn::detail
