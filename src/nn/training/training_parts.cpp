#include <ATen/ATen.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim.h>

#include <algorithm>
#include <functional>
#include <lockstep/error.hpp>
#include <lockstep/nn/checkpoint.hpp>
#include <lockstep/objects.hpp>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "nn/ddp/sharded_state.hpp"
#include "nn/elements/dense.hpp"
#include "nn/error.hpp"
#include "nn/training/checkpoint_file.hpp"
#include "nn/training/training_parts.hpp"

namespace lockstep::nn {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

const char* name_of(PartKind kind) {
  switch (kind) {
    case PartKind::module: return "a module";
    case PartKind::optimizer: return "an optimizer";
    case PartKind::number: return "a number";
    case PartKind::object: break;
  }
  return "an object";
}

/// "a module, an optimizer": each kind is a letter.
std::string describe_parts(std::string_view kinds) {
  std::vector<const char*> names;
  for (const char kind : kinds) names.push_back(name_of(PartKind{kind}));
  return names.empty() ? "nothing" : fmt::format("{}", fmt::join(names, ", "));
}

using NamedTensors = std::map<std::string, at::Tensor>;

/// Adds the tensors of an archive, by dotted name.
void collect_tensors(InputArchive& archive, const std::string& prefix, NamedTensors& tensors) {
  for (const std::string& key : archive.keys()) {
    at::Tensor tensor;
    InputArchive child;
    // An archive does not tell which of its tensors are buffers: try both.
    if (archive.try_read(key, tensor) || archive.try_read(key, tensor, /*is_buffer=*/true)) {
      tensors.emplace(prefix + key, tensor);
    } else if (archive.try_read(key, child)) {
      collect_tensors(child, prefix + key + ".", tensors);
    }
  }
}

NamedTensors tensors_of(InputArchive& archive) {
  NamedTensors tensors;
  collect_tensors(archive, "", tensors);
  return tensors;
}

/// In the module's order: an error then names a weight before its bias.
std::vector<std::pair<std::string, at::Tensor>> tensors_of(const torch::nn::Module& module) {
  auto tensors = module.named_parameters().pairs();
  const auto buffers = module.named_buffers().pairs();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  return tensors;
}

/// While it exists, conjugate and negative views and zero tensors of modules are materialised:
/// archives save and load the memory of a tensor only. (The states of libtorch's optimizers never
/// have such tensors.)
class MaterialiseTensors {
 public:
  MaterialiseTensors() = default;
  /// Materialises the tensors of a part that is a module.
  void add(const TrainingPart& part) {
    if (part.module() == nullptr) return;
    for (const auto& [name, tensor] : tensors_of(*part.module())) {
      if (!tensor.defined() || has_values_in_memory(tensor)) continue;
      const at::Tensor values = with_values_in_memory(tensor.detach());
      before_.emplace_back(tensor, tensor.variable_data());
      tensor.set_data(values);
    }
  }
  void keep() { before_.clear(); }
  ~MaterialiseTensors() {
    for (const auto& [tensor, data] : before_) tensor.set_data(data);
  }
  MaterialiseTensors(const MaterialiseTensors&) = delete;
  MaterialiseTensors& operator=(const MaterialiseTensors&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;
};

std::string shape_of(const at::Tensor& tensor) {
  return fmt::format("{} [{}]", c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes().vec(), ", "));
}

/// Module::load takes any shape, and ignores what the module does not have. `now`: the module,
/// saved; a class may save tensors besides its parameters and buffers, and must check those itself.
void check_module(const torch::nn::Module& module, InputArchive& now, InputArchive& file) {
  const NamedTensors all_now = tensors_of(now);
  const NamedTensors in_file = tensors_of(file);
  for (const auto& [name, mine] : tensors_of(module)) {
    if (all_now.count(name) == 0) continue;  // the class does not save it
    const auto theirs = in_file.find(name);
    if (theirs == in_file.end()) {
      throw std::runtime_error(fmt::format(
          "the file does not have '{}', which is {} in this module", name, shape_of(mine)));
    }
    if (mine.sizes() != theirs->second.sizes() ||
        mine.scalar_type() != theirs->second.scalar_type()) {
      throw std::runtime_error(fmt::format("'{}' is {} in the file, and {} in this module", name,
                                           shape_of(theirs->second), shape_of(mine)));
    }
  }
  for (const auto& [name, theirs] : in_file) {
    if (all_now.count(name) != 0) continue;
    throw std::runtime_error(fmt::format("the file has '{}', {}, which this module does not have",
                                         name, shape_of(theirs)));
  }
}

/// By the parameters of modules.
std::map<const void*, std::string> parameter_names(std::span<const TrainingPart> parts) {
  std::map<const void*, std::string> names;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].module() == nullptr) continue;
    for (const auto& item : parts[i].module()->named_parameters()) {
      names.emplace(item.value().unsafeGetTensorImpl(),
                    fmt::format("'{}' of part {}", item.key(), i));
    }
  }
  return names;
}

/// An optimizer's parameters, in its order.
struct OptimizedParameters {
  std::vector<std::string> names;  ///< empty if in none of the parts
  std::vector<std::string> shapes;
};

OptimizedParameters parameters_of(const torch::optim::Optimizer& optimizer,
                                  std::span<const TrainingPart> parts) {
  const std::map<const void*, std::string> names = parameter_names(parts);
  OptimizedParameters result;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto name = names.find(parameter.unsafeGetTensorImpl());
      result.names.push_back(name == names.end() ? "" : name->second);
      result.shapes.push_back(shape_of(parameter));
    }
  }
  return result;
}

c10::IValue list_of(const std::vector<std::string>& texts) {
  c10::List<std::string> list;
  for (const std::string& text : texts) list.push_back(text);
  return list;
}

/// nullopt in an older file.
std::optional<std::vector<std::string>> read_texts(InputArchive& archive, const char* key) {
  c10::IValue value;
  if (!archive.try_read(key, value)) return std::nullopt;
  std::vector<std::string> texts;
  for (const c10::IValue& text : value.toListRef()) texts.push_back(text.toStringRef());
  return texts;
}

void save_options(const torch::optim::Optimizer& optimizer, OutputArchive& archive) {
  std::size_t i = 0;
  for (const auto& group : optimizer.param_groups()) {
    OutputArchive options;
    if (group.has_options()) group.options().serialize(options);
    archive.write(fmt::format("options_{}", i++), options);
  }
}

/// The names of the options of every parameter group.
std::vector<std::string> option_names(InputArchive& optimizer) {
  std::vector<std::string> names;
  InputArchive options;
  for (int i = 0; optimizer.try_read(fmt::format("options_{}", i), options); ++i) {
    for (std::string& name : options.keys()) names.push_back(std::move(name));
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

/// For older files, which have no names: the state of most optimizers of torch is of the
/// parameter's shape. The layout is that of torch::optim::serialize.
void check_state_shapes(const torch::optim::Optimizer& optimizer, InputArchive& file) {
  using namespace torch::optim;  // NOLINT: the optimizers by their names
  const auto is_any_of = [&optimizer]<class... T>(const std::tuple<T...>*) {
    return ((dynamic_cast<const T*>(&optimizer) != nullptr) || ...);
  };
  using Elementwise = std::tuple<SGD, Adam, AdamW, Adagrad, RMSprop>;
  if (!is_any_of(static_cast<const Elementwise*>(nullptr))) return;
  InputArchive all, states, groups, group, state;
  if (!file.try_read("state", all) || !all.try_read("state", states) ||
      !all.try_read("param_groups", groups)) {
    return;
  }
  const auto& own_groups = optimizer.param_groups();
  for (std::size_t g = 0; g < own_groups.size(); ++g) {
    if (!groups.try_read(fmt::format("param_groups/{}", g), group)) return;
    const auto& parameters = own_groups[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      c10::IValue key;
      if (!group.try_read(fmt::format("params/{}", i), key) ||
          !states.try_read(key.toStringRef(), state)) {
        continue;
      }
      for (const auto& [name, tensor] : tensors_of(state)) {
        if (tensor.dim() == 0 || tensor.sizes() == parameters[i].sizes()) continue;
        throw std::runtime_error(fmt::format(
            "{} of parameter {} of its group {} is {} in the file, and the parameter is {} here: "
            "give it the same parameters in the same order",
            name, i, g, shape_of(tensor), shape_of(parameters[i])));
      }
    }
  }
}

/// Optimizer::load assigns state by the parameter's position. `now`: the optimizer, saved.
void check_optimizer_state(const torch::optim::Optimizer& optimizer,
                           const OptimizedParameters& mine, InputArchive& now, InputArchive& file) {
  const auto expected_options = option_names(now);
  const auto options = option_names(file);
  if (options != expected_options) {
    throw std::runtime_error(
        fmt::format("the file has an optimizer with options {}, expected {}: use an optimizer of "
                    "the same class",
                    fmt::join(options, ", "), fmt::join(expected_options, ", ")));
  }
  const auto names = read_texts(file, "names");
  const auto shapes = read_texts(file, "shapes");
  if (!names || !shapes) return check_state_shapes(optimizer, file);
  if (shapes->size() != mine.shapes.size()) {
    throw std::runtime_error(fmt::format("the file has an optimizer of {} parameters, expected {}",
                                         shapes->size(), mine.shapes.size()));
  }
  const auto describe = [](const std::string& name, const std::string& shape) {
    return name.empty() ? shape : name + ", " + shape;
  };
  for (std::size_t i = 0; i < shapes->size(); ++i) {
    const std::string& name = (*names)[i];
    const bool is_other = !name.empty() && !mine.names[i].empty() && name != mine.names[i];
    if (!is_other && (*shapes)[i] == mine.shapes[i]) continue;
    throw std::runtime_error(fmt::format(
        "its parameter {} is {} in the file, and {} here: give it the same parameters in the same "
        "order",
        i, describe(name, (*shapes)[i]), describe(mine.names[i], mine.shapes[i])));
  }
}

/// The device of the modules, if all are on one: without it, a rank would load to the device of the
/// rank that saved.
c10::optional<at::Device> device_of_modules(std::span<const TrainingPart> parts) {
  c10::optional<at::Device> device;
  for (const TrainingPart& part : parts) {
    if (part.module() == nullptr) continue;
    for (const auto& [name, tensor] : tensors_of(*part.module())) {
      if (device.has_value() && *device != tensor.device()) return c10::nullopt;
      device = tensor.device();
    }
  }
  return device;
}

/// Loads parts, and restores them on destruction unless keep() was called.
class Loading {
 public:
  explicit Loading(std::span<const TrainingPart> parts) : parts_(parts) {}
  ~Loading() { undo(); }
  Loading(const Loading&) = delete;
  Loading& operator=(const Loading&) = delete;

  void load(const std::string& bytes, const ReadMore& more = {}) {
    InputArchive archive = parse_archive(bytes, device_of_modules(parts_));
    check_kinds(archive);
    std::vector<InputArchive> files;
    for_each_part([&](std::size_t i, const TrainingPart& part) {
      in_memory_.add(part);
      const auto* const sharded = detail::ShardedState::find(part.optimizer());
      // It cannot be saved without the other ranks.
      undo_.push_back(sharded == nullptr ? nullptr : detail::ShardedState::undo_of_load(*sharded));
      before_.push_back(parse_archive(archive_bytes([&](OutputArchive& to) {
        if (sharded == nullptr) {
          part.save(to);
        } else {
          save_options(*sharded, to);
        }
      })));
      archive.read(fmt::format("part_{}", i), files.emplace_back());
      if (part.module() != nullptr) check_module(*part.module(), before_[i], files[i]);
      if (part.optimizer() != nullptr) {
        check_optimizer_state(*part.optimizer(), parameters_of(*part.optimizer(), parts_),
                              before_[i], files[i]);
      }
    });
    for_each_part([&](std::size_t i, const TrainingPart& part) {
      n_begun_ = i + 1;
      part.load(files[i]);
    });
    if (more) more(archive);
  }

  void keep() {
    n_begun_ = 0;
    in_memory_.keep();
  }

 private:
  void check_kinds(InputArchive& archive) const {
    std::string expected;
    for (const TrainingPart& part : parts_) expected += static_cast<char>(part.kind());
    c10::IValue kinds;
    if (archive.try_read("kinds", kinds) && kinds.isString() && kinds.toStringRef() == expected) {
      return;
    }
    throw std::runtime_error(fmt::format(
        "the file has {}, expected {}: pass load_training the same parts as save_training, in the "
        "same order",
        kinds.isString() ? describe_parts(kinds.toStringRef()) : "no such parts",
        describe_parts(expected)));
  }

  template <class F>
  void for_each_part(F f) const {
    std::size_t i = 0;
    for (const TrainingPart& part : parts_) {
      const auto failure = failure_text([&] { f(i, part); });
      if (failure) {
        throw std::runtime_error(fmt::format("part {}, {}: {}", i, name_of(part.kind()), *failure));
      }
      ++i;
    }
  }

  void undo() noexcept {
    std::size_t i = 0;
    for (const TrainingPart& part : parts_) {
      if (i >= n_begun_) return;
      (void)failure_text([&] {
        if (undo_[i]) {
          undo_[i]();
        } else {
          part.load(before_[i]);
        }
      });
      ++i;
    }
  }

  std::span<const TrainingPart> parts_;
  MaterialiseTensors in_memory_;
  std::vector<InputArchive> before_;
  std::vector<std::function<void()>> undo_;  ///< where loading before_ does not do it
  std::size_t n_begun_ = 0;
};

/// While it exists, rank 0 of the group has the whole state of the parts that are a
/// ZeroRedundancyOptimizer. Collective.
class ConsolidatedParts {
 public:
  ConsolidatedParts(std::span<const TrainingPart> parts, const Group& group,
                    std::source_location where)
      : parts_(parts) {
    for_each([&](const auto& optimizer) {
      detail::ShardedState::consolidate(optimizer, group.rank() == 0, where);
    });
  }
  ~ConsolidatedParts() {
    for_each([](const auto& optimizer) { detail::ShardedState::drop_consolidated(optimizer); });
  }
  ConsolidatedParts(const ConsolidatedParts&) = delete;
  ConsolidatedParts& operator=(const ConsolidatedParts&) = delete;

 private:
  template <class F>
  void for_each(F f) const {
    for (const TrainingPart& part : parts_) {
      if (const auto* const found = detail::ShardedState::find(part.optimizer())) f(*found);
    }
  }
  std::span<const TrainingPart> parts_;
};

/// `while_saved` must exist until the archive is serialised.
void write_parts(std::span<const TrainingPart> parts, OutputArchive& archive,
                 MaterialiseTensors& while_saved) {
  std::string kinds;
  for (const TrainingPart& part : parts) {
    OutputArchive one;
    while_saved.add(part);
    part.save(one);
    if (part.optimizer() != nullptr) {
      const OptimizedParameters parameters = parameters_of(*part.optimizer(), parts);
      one.write("names", list_of(parameters.names));
      one.write("shapes", list_of(parameters.shapes));
    }
    archive.write(fmt::format("part_{}", kinds.size()), one);
    kinds += static_cast<char>(part.kind());
  }
  archive.write("kinds", c10::IValue(kinds));
}

}  // namespace

std::string parts_in_memory(std::span<const TrainingPart> parts, const WriteMore& more) {
  MaterialiseTensors while_saved;
  return archive_bytes([&](OutputArchive& to) {
    write_parts(parts, to, while_saved);
    if (more) more(to);
  });
}

void load_parts(const std::string& bytes, std::span<const TrainingPart> parts,
                const ReadMore& more) {
  Loading loading(parts);
  loading.load(bytes, more);
  loading.keep();
}

void save_parts(const char* operation, const std::string& path, std::span<const TrainingPart> parts,
                const WriteMore& more, const Group& group, std::source_location where) {
  const ConsolidatedParts consolidated(parts, group, where);
  MaterialiseTensors while_saved;
  const auto write = [&](OutputArchive& archive) {
    write_parts(parts, archive, while_saved);
    if (more) more(archive);
  };
  save_archive(operation, path, write, group, where);
}

std::string name_of_parameter(const at::Tensor& parameter, std::span<const TrainingPart> parts) {
  const auto names = parameter_names(parts);
  const auto name = names.find(parameter.unsafeGetTensorImpl());
  return name == names.end() ? "a parameter of an optimizer" : name->second;
}

void save_training(const std::string& path, std::initializer_list<TrainingPart> parts,
                   const Group& group, std::source_location where) {
  save_parts("save_training", path, {parts.begin(), parts.size()}, /*more=*/{}, group, where);
}

void load_training(const std::string& path, std::initializer_list<TrainingPart> parts,
                   const Group& group, std::source_location where) {
  const std::string bytes = read_archive("load_training", path, group, where);
  Loading loading({parts.begin(), parts.size()});
  const auto failure = failure_text([&] { loading.load(bytes); });
  const auto failures = all_gather_object(failure, group, {}, where);
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank]) continue;
    const bool is_of_all = std::count(failures.begin(), failures.end(), failures[rank]) ==
                           static_cast<std::ptrdiff_t>(failures.size());
    throw UsageError(
        context_of("load_training", group, where),
        fmt::format("{}cannot load {}: {}; nothing has been changed on any rank",
                    is_of_all ? "" : fmt::format("rank {} ", rank), path, *failures[rank]));
  }
  loading.keep();
}

void detail::save_optimizer(const torch::optim::Optimizer& optimizer, OutputArchive& archive) {
  OutputArchive state;
  optimizer.save(state);
  archive.write("state", state);
  save_options(optimizer, archive);
}

void detail::load_optimizer(torch::optim::Optimizer& optimizer, InputArchive& archive) {
  InputArchive state;
  archive.read("state", state);
  optimizer.state().clear();  // load does not touch what the archive lacks
  optimizer.load(state);
  std::size_t i = 0;
  for (auto& group : optimizer.param_groups()) {
    InputArchive options;
    archive.read(fmt::format("options_{}", i++), options);
    if (group.has_options()) group.options().serialize(options);
  }
}

void detail::save_number(const Number& number, OutputArchive& archive) {
  if (const auto* const real = std::get_if<double>(&number)) {
    archive.write("value", c10::IValue(*real));
    return;
  }
  const auto* const large = std::get_if<std::uint64_t>(&number);
  // An IValue has no unsigned integers.
  const std::int64_t bits =
      large != nullptr ? static_cast<std::int64_t>(*large) : std::get<std::int64_t>(number);
  archive.write("value", c10::IValue(bits));
  archive.write("is_unsigned", c10::IValue(large != nullptr));
}

detail::Number detail::load_number(InputArchive& archive, bool is_unsigned) {
  c10::IValue value;
  c10::IValue flag;
  archive.read("value", value);
  if (value.isDouble()) return value.toDouble();
  if (!value.isInt()) throw std::runtime_error("the file does not have a number");
  if (archive.try_read("is_unsigned", flag)) is_unsigned = flag.toBool();
  if (is_unsigned) return static_cast<std::uint64_t>(value.toInt());
  return value.toInt();
}

void detail::throw_does_not_fit(const Number& number, const std::type_info& type,
                                const Number& lowest, const Number& largest) {
  const auto text = [](const Number& it) {
    return std::visit([](auto value) { return fmt::format("{}", value); }, it);
  };
  throw std::runtime_error(
      fmt::format("the file has {}, which the type {} ({} to {}) cannot hold exactly", text(number),
                  c10::demangle(type.name()), text(lowest), text(largest)));
}

}  // namespace lockstep::nn
