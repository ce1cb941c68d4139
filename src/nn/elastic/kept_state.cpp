#include "nn/elastic/kept_state.hpp"

#include <ATen/Context.h>
#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <lockstep/error.hpp>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "base/hash.hpp"
#include "nn/elastic/parameter_samples.hpp"
#include "nn/elements/dense.hpp"
#include "nn/training/checkpoint_file.hpp"
#include "nn/training/training_parts.hpp"

namespace lockstep::nn {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

namespace {

/// Not Module::modules, which makes a name for each.
void add_modules(torch::nn::Module& module, std::vector<torch::nn::Module*>& all) {
  all.push_back(&module);
  for (const auto& child : module.children()) add_modules(*child, all);
}

/// Most buffers are small: the dispatch of copy_ would cost more than the copy.
void copy_values(const at::Tensor& to, const at::Tensor& from) {
  const auto is_plain = [](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.numel() > 0 &&
           is_dense(tensor);
  };
  if (is_plain(to) && is_plain(from)) {
    std::memcpy(to.data_ptr(), from.data_ptr(), from.nbytes());
  } else {
    to.copy_(from);
  }
}

/// Whether the one's values can be copied into the other. A quantized tensor's scale is not a
/// value.
bool can_copy_values(const at::Tensor& to, const at::Tensor& from) {
  return to.sizes() == from.sizes() && to.options().type_equal(from.options()) &&
         !from.is_quantized();
}

}  // namespace

void PartTensors::update(std::span<const TrainingPart> parts) {
  std::vector<torch::nn::Module*> now;
  now.reserve(modules.size());
  for (const TrainingPart& part : parts) {
    if (part.module() != nullptr) add_modules(const_cast<torch::nn::Module&>(*part.module()), now);
  }
  if (now == modules && !parameters.empty()) return;
  modules = std::move(now);
  parameters.clear();
  buffers.clear();
  const auto add = [](std::vector<at::Tensor>& all, const at::Tensor& tensor) {
    const auto is_it = [&tensor](const at::Tensor& other) { return other.is_same(tensor); };
    if (tensor.defined() && std::ranges::none_of(all, is_it)) all.push_back(tensor);
  };
  for (const torch::nn::Module* module : modules) {
    for (const at::Tensor& tensor : module->parameters(/*recurse=*/false)) add(parameters, tensor);
    for (const at::Tensor& tensor : module->buffers(/*recurse=*/false)) add(buffers, tensor);
  }
  for (const TrainingPart& part : parts) {
    if (part.optimizer() == nullptr) continue;
    for (const auto& group : part.optimizer()->param_groups()) {
      for (const at::Tensor& tensor : group.params()) add(parameters, tensor);
    }
  }
}

namespace {

/// A number for each of some things: whether a gradient is defined, a module is in training mode.
template <class Thing>
class KeptNumbers : public KeptThing {
 public:
  using Things = std::function<std::span<Thing>()>;
  using Get = std::int64_t (*)(const Thing&);
  using Set = void (*)(Thing&, std::int64_t);
  KeptNumbers(const char* name, Things things, Get get, Set set)
      : name_(name), things_(std::move(things)), get_(get), set_(set) {}

  void keep() override { now(kept_); }
  void set_back() override { assign(kept_); }
  void save(OutputArchive& archive) const override {
    std::vector<std::int64_t> numbers;
    now(numbers);
    archive.write(name_, c10::IValue(numbers));
  }
  void load(InputArchive& archive) override {
    c10::IValue value;
    archive.read(name_, value);
    const auto numbers = value.toIntVector();
    if (numbers.size() != things_().size()) {
      throw std::runtime_error(fmt::format("{} of {} in the file, expected {}", name_,
                                           numbers.size(), things_().size()));
    }
    assign(numbers);
  }

 private:
  void now(std::vector<std::int64_t>& numbers) const {
    numbers.clear();
    for (const Thing& thing : things_()) numbers.push_back(get_(thing));
  }
  void assign(const std::vector<std::int64_t>& numbers) {
    auto number = numbers.begin();
    for (Thing& thing : things_()) {
      if (number == numbers.end()) return;
      set_(thing, *number++);
    }
  }

  const char* const name_;
  const Things things_;
  const Get get_;
  const Set set_;
  std::vector<std::int64_t> kept_;
};

// 0: undefined; otherwise the gradient's layout, because some optimizers take only a sparse one.
std::int64_t gradient_of(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  return gradient.defined() ? static_cast<std::int64_t>(gradient.layout()) + 1 : 0;
}
/// Zeros: their values are of a step, and to keep them would cost a copy of all.
void set_gradient(at::Tensor& parameter, std::int64_t layout) {
  const auto kind = static_cast<at::Layout>(layout - 1);
  parameter.mutable_grad() =
      layout == 0            ? at::Tensor()
      : kind == at::kStrided ? at::zeros_like(parameter, parameter.options().requires_grad(false))
                             : at::zeros(parameter.sizes(), parameter.options().layout(kind));
}

std::int64_t requires_gradient(const at::Tensor& parameter) { return parameter.requires_grad(); }
void set_requires_gradient(at::Tensor& parameter, std::int64_t requires_it) {
  if (parameter.is_leaf()) parameter.requires_grad_(requires_it != 0);
}

std::int64_t is_training(torch::nn::Module* const& module) { return module->is_training(); }
/// Of the modules in it too; theirs are set after its.
void set_training(torch::nn::Module*& module, std::int64_t is_on) {
  if (module->is_training() != (is_on != 0)) module->train(is_on != 0);
}

/// Sent with the modules.
class KeptBuffers : public KeptThing {
 public:
  explicit KeptBuffers(const std::vector<at::Tensor>& buffers) : buffers_(buffers) {}
  void keep() override {
    values_.resize(buffers_.size());
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      at::Tensor& value = values_[i];
      const at::Tensor& buffer = buffers_[i];
      if (value.defined() && can_copy_values(value, buffer)) {
        copy_values(value, buffer);
      } else {
        value = buffer.clone();
      }
    }
  }
  void set_back() override {
    for (std::size_t i = 0; i < std::min(buffers_.size(), values_.size()); ++i) {
      const at::Tensor& buffer = buffers_[i];
      if (can_copy_values(buffer, values_[i])) {
        buffer.copy_(values_[i]);
      } else {
        buffer.set_data(values_[i].clone());
      }
    }
  }

 private:
  const std::vector<at::Tensor>& buffers_;
  std::vector<at::Tensor> values_;
};

/// The options of all groups of an optimizer. Sent with it.
class KeptOptions : public KeptThing {
 public:
  explicit KeptOptions(const torch::optim::Optimizer& optimizer)
      : optimizer_(const_cast<torch::optim::Optimizer&>(optimizer)) {}
  void keep() override {
    options_.clear();
    for (const auto& group : optimizer_.param_groups()) {
      options_.push_back(group.has_options() ? group.options().clone() : nullptr);
    }
  }
  void set_back() override {
    auto& groups = optimizer_.param_groups();
    while (groups.size() > options_.size()) groups.pop_back();  // that the step has added
    // Into the options that are there: the program may hold references to them.
    for (std::size_t i = 0; i < groups.size(); ++i) {
      if (options_[i] == nullptr) continue;
      const std::string bytes =
          archive_bytes([&](OutputArchive& to) { options_[i]->serialize(to); });
      InputArchive from = parse_archive(bytes);
      groups[i].options().serialize(from);
    }
  }

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;
};

/// torch's default generators of CPUs, and of the devices of the parameters.
class KeptGenerators : public KeptThing {
 public:
  explicit KeptGenerators(const std::vector<at::Tensor>& parameters) : parameters_(parameters) {}
  void keep() override {
    find();
    states_ = states();
  }
  void set_back() override { assign(states_); }
  void save(OutputArchive& archive) const override {
    archive.write("generators", c10::IValue(states_));  // what the ranks have compared
  }
  void load(InputArchive& archive) override {
    c10::IValue value;
    archive.read("generators", value);
    find();
    assign(value.toTensorVector());
  }
  std::uint64_t hash() const {
    std::uint64_t hash = 0;
    for (const at::Tensor& state : states_) {
      const at::Tensor bytes = state.cpu().contiguous();
      hash = hash * 31 +
             base::hash_of_bytes(bytes.data_ptr(), static_cast<std::size_t>(bytes.nbytes()));
    }
    return hash;
  }
  void seed(std::uint64_t seed) {
    find();
    for (at::Generator& generator : generators_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_current_seed(seed);
    }
  }

 private:
  void find() {
    if (n_parameters_ == parameters_.size()) return;
    n_parameters_ = parameters_.size();
    std::vector<at::Device> devices{at::kCPU};
    for (const at::Tensor& parameter : parameters_) {
      const at::Device device = parameter.device();
      if (device.is_cuda() && std::ranges::count(devices, device) == 0) devices.push_back(device);
    }
    generators_.clear();
    for (const at::Device& device : devices) {
      generators_.push_back(at::globalContext().defaultGenerator(device));
    }
  }
  std::vector<at::Tensor> states() const {
    std::vector<at::Tensor> states;
    for (at::Generator generator : generators_) {
      const std::lock_guard lock(generator.mutex());
      states.push_back(generator.get_state());
    }
    return states;
  }
  void assign(const std::vector<at::Tensor>& states) {
    for (std::size_t i = 0; i < std::min(states.size(), generators_.size()); ++i) {
      const std::lock_guard lock(generators_[i].mutex());
      generators_[i].set_state(states[i].cpu());
    }
  }

  const std::vector<at::Tensor>& parameters_;
  std::size_t n_parameters_ = static_cast<std::size_t>(-1);
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;
};

/// Parts as they are saved: numbers, objects, and with a snapshot all of them.
class KeptParts : public KeptThing {
 public:
  explicit KeptParts(std::vector<TrainingPart> parts) : parts_(std::move(parts)) {}
  void keep() override { bytes_ = parts_in_memory(parts_); }
  void set_back() override { load_parts(bytes_, parts_); }

 private:
  const std::vector<TrainingPart> parts_;
  std::string bytes_;
};

}  // namespace

struct KeptState::Things {
  std::vector<std::unique_ptr<KeptThing>> all;
  KeptGenerators* generators = nullptr;
  ParameterSamples samples{};
};

KeptState::KeptState(std::vector<TrainingPart> parts, bool snapshot)
    : parts_(std::move(parts)), things_(std::make_unique<Things>()) {
  const auto add = [this]<class T>(std::unique_ptr<T> thing) {
    T* const added = thing.get();
    things_->all.push_back(std::move(thing));
    return added;
  };
  const auto parameters = [this] { return std::span(tensors_.parameters); };
  const auto modules = [this] { return std::span(tensors_.modules); };
  add(std::make_unique<KeptNumbers<at::Tensor>>("requires_grad", parameters, requires_gradient,
                                                set_requires_gradient));
  add(std::make_unique<KeptNumbers<at::Tensor>>("gradients", parameters, gradient_of,
                                                set_gradient));
  add(std::make_unique<KeptNumbers<torch::nn::Module*>>("is_training", modules, is_training,
                                                        set_training));
  std::vector<TrainingPart> others;
  for (const TrainingPart& part : parts_) {
    const bool is_kept_otherwise = part.module() != nullptr || part.optimizer() != nullptr;
    if (snapshot || !is_kept_otherwise) others.push_back(part);
  }
  add(std::make_unique<KeptBuffers>(tensors_.buffers));  // first: parts load only into their types
  if (!others.empty()) add(std::make_unique<KeptParts>(std::move(others)));
  for (const TrainingPart& part : parts_) {
    if (part.optimizer() != nullptr) add(std::make_unique<KeptOptions>(*part.optimizer()));
  }
  things_->generators = add(std::make_unique<KeptGenerators>(tensors_.parameters));
}

KeptState::~KeptState() = default;

void KeptState::keep() {
  const at::NoGradGuard no_graph;
  sample_parameters();
  for (const auto& thing : things_->all) thing->keep();
}

void KeptState::sample_parameters() {
  tensors_.update(parts_);
  things_->samples.take(tensors_.parameters);
}

void KeptState::set_back() {
  const at::NoGradGuard no_graph;
  tensors_.update(parts_);
  for (const auto& thing : things_->all) thing->set_back();
}

void KeptState::save(OutputArchive& archive) const {
  for (const auto& thing : things_->all) thing->save(archive);
}

void KeptState::load(InputArchive& archive, bool with_generators) {
  const at::NoGradGuard no_graph;
  tensors_.update(parts_);
  for (const auto& thing : things_->all) {
    if (with_generators || thing.get() != things_->generators) thing->load(archive);
  }
}

void KeptState::seed_generators(std::uint64_t seed) { things_->generators->seed(seed); }

std::uint64_t KeptState::hash_of_generators() const { return things_->generators->hash(); }

bool KeptState::have_parameters_changed() {
  tensors_.update(parts_);
  return things_->samples.have_changed(tensors_.parameters);
}

std::string KeptState::unused_gradient() {
  if (have_parameters_changed()) return {};
  for (const TrainingPart& part : parts_) {
    if (part.optimizer() == nullptr) continue;
    const at::Tensor found = find_large_gradient(*part.optimizer());
    if (found.defined()) return name_of_parameter(found, parts_);
  }
  return {};
}

}  // namespace lockstep::nn
