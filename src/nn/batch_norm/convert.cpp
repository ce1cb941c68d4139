#include <lockstep/nn/convert.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <lockstep/error.hpp>
#include <lockstep/nn/sync_batch_norm.hpp>
#include <map>
#include <set>
#include <string>
#include <typeinfo>
#include <vector>

namespace lockstep::nn {
namespace {

using torch::nn::Module;
using ModulePtr = std::shared_ptr<Module>;

/// The same state in a module of the other kind. Assigning the Module base takes over the
/// registered tensors themselves, the training flag and everything else registered.
template <class To, class From>
torch::nn::AnyModule move_state_to(const From& from, std::shared_ptr<To> to) {
  static_cast<Module&>(*to) = from;
  to->weight = from.weight;
  to->bias = from.bias;
  to->running_mean = from.running_mean;
  to->running_var = from.running_var;
  to->num_batches_tracked = from.num_batches_tracked;
  return torch::nn::AnyModule(std::move(to));
}

/// How one kind of module is replaced.
struct Conversion {
  const char* operation;
  const char* advice;  ///< for a member that cannot be replaced
  /// By exact type: a derived class may do anything in its forward.
  std::function<bool(const Module&)> matches;
  std::function<bool(const Module&)> is_derived;
  std::function<torch::nn::AnyModule(const Module&)> replace;
  /// Why the replacement would compute other results, or "".
  std::function<std::string(const Module&)> difference = [](const Module&) {
    return std::string();
  };
};

template <class... From>
bool is_exactly(const Module& module) {
  return ((typeid(module) == typeid(From)) || ...);
}
template <class... From>
bool is_derived_from(const Module& module) {
  return !is_exactly<From...>(module) && ((dynamic_cast<const From*>(&module) != nullptr) || ...);
}

/// The layers by their dimensions.
template <class... Layers>
struct Types {};
using BatchNorms =
    Types<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl>;
using SyncBatchNorms = Types<SyncBatchNorm1dImpl, SyncBatchNorm2dImpl, SyncBatchNorm3dImpl>;

/// How a BatchNorm would differ from this SyncBatchNorm in training, or "". In eval mode they are
/// equal.
template <class... Sync>
std::string difference_from_batch_norm(const Module& module, Types<Sync...> /*types*/) {
  std::string option;
  const auto check_layer = [&](const auto* layer) {
    if (layer == nullptr || !layer->is_training()) return;
    if (layer->options.eps_mode() == EpsMode::clamp) {
      option = "eps_mode clamp";
    } else if (layer->options.on_nonfinite() == OnNonfinite::keep_running_stats) {
      option = "on_nonfinite keep_running_stats";
    }
  };
  (check_layer(dynamic_cast<const Sync*>(&module)), ...);
  if (option.empty()) return option;
  return fmt::format(
      "has {}, which torch's BatchNorm does not support in training: call eval() first, in which "
      "both compute the same, or set the option to its default",
      option);
}

template <class From, class To, class Options>
bool replace_as(const Module& module, const Options& options, torch::nn::AnyModule& result) {
  if (typeid(module) != typeid(From)) return false;
  const auto& from = dynamic_cast<const From&>(module);
  result = move_state_to(from, std::make_shared<To>(options(from)));
  return true;
}

/// options: those of the replacement, from the module that it replaces.
template <class... From, class... To, class Options>
Conversion conversion(const char* operation, const char* advice, Types<From...> /*from*/,
                      Types<To...> /*to*/, const Options& options) {
  return {.operation = operation,
          .advice = advice,
          .matches = is_exactly<From...>,
          .is_derived = is_derived_from<From...>,
          .replace = [options](const Module& from) {
            torch::nn::AnyModule to;
            (void)(replace_as<From, To>(from, options, to) || ...);
            return to;
          }};
}

/// One slot of a container that holds a module to be replaced.
struct Slot {
  ModulePtr old;
  std::function<void(const torch::nn::AnyModule&)> setter;
};

/// For a container: the functions that replace its entries, by name. A class derived from a
/// container may have other children, held by its own members, which cannot be replaced.
using Setters = std::map<std::string, std::function<void(const torch::nn::AnyModule&)>>;

Setters setters_of(Module& module) {
  Setters setters;
  if (auto* list = dynamic_cast<torch::nn::SequentialImpl*>(&module)) {
    auto entry = list->begin();
    // Both are in the order in which they were added.
    for (const auto& child : module.named_children()) {
      if (entry == list->end()) break;
      if (entry->ptr() != child.value()) continue;
      const std::string key = child.key();
      setters[key] = [list, key, entry](const torch::nn::AnyModule& replacement) {
        *entry = replacement;
        list->replace_module(key, replacement.ptr());
      };
      ++entry;
    }
  } else if (auto* modules = dynamic_cast<torch::nn::ModuleListImpl*>(&module)) {
    for (std::size_t i = 0; i < modules->size(); ++i) {
      const std::string key = std::to_string(i);
      setters[key] = [modules, key, i](const torch::nn::AnyModule& replacement) {
        modules->begin()[static_cast<std::ptrdiff_t>(i)] = replacement.ptr();
        modules->replace_module(key, replacement.ptr());
      };
    }
  } else if (auto* dict = dynamic_cast<torch::nn::ModuleDictImpl*>(&module)) {
    for (const std::string& key : dict->keys()) {
      setters[key] = [dict, key](const torch::nn::AnyModule& replacement) {
        dict->update({{key, replacement.ptr()}});
      };
    }
  }
  return setters;
}

/// Walks the tree once without changing it, so an error leaves everything unchanged.
class Plan {
 public:
  explicit Plan(const Conversion& conversion) : conversion_(conversion) {}

  void visit(const ModulePtr& module, const std::string& name) {
    if (!visited_.insert(module.get()).second) return;
    const Setters setters = setters_of(*module);
    for (const auto& entry : module->named_children()) {
      const auto setter = setters.find(entry.key());
      child(entry.value(), name, entry.key(), setter == setters.end() ? nullptr : setter->second);
    }
  }

  void run(std::source_location where) {
    if (!irreplaceable_.empty()) {
      throw UsageError(
          {conversion_.operation, "", -1, 0, where},
          fmt::format("cannot replace {}: its type is fixed by the C++ member that holds it or by "
                      "the class derived from it. {}; nothing has been converted",
                      fmt::join(irreplaceable_, ", "), conversion_.advice));
    }
    if (!different_.empty()) {
      throw UsageError({conversion_.operation, "", -1, 0, where},
                       fmt::format("{}; nothing has been converted", different_));
    }
    std::map<Module*, torch::nn::AnyModule> replacements;  // a shared module stays shared
    for (const Slot& slot : slots_) {
      auto& replacement = replacements[slot.old.get()];
      if (replacement.is_empty()) replacement = conversion_.replace(*slot.old);
      slot.setter(replacement);
    }
  }

 private:
  void child(const ModulePtr& module, const std::string& parent, const std::string& key,
             std::function<void(const torch::nn::AnyModule&)> setter) {
    const std::string name = parent.empty() ? key : parent + "." + key;
    const bool matches = conversion_.matches(*module);
    if (conversion_.is_derived(*module) || (matches && !setter)) {
      irreplaceable_.push_back(
          fmt::format("'{}' ({})", name, c10::demangle(typeid(*module).name())));
    } else if (matches) {
      const std::string difference = conversion_.difference(*module);
      if (!difference.empty() && different_.empty()) {
        different_ = fmt::format("'{}' {}", name, difference);
      }
      slots_.push_back({module, std::move(setter)});
    } else {
      visit(module, name);
    }
  }

  const Conversion& conversion_;
  std::set<Module*> visited_;
  std::vector<Slot> slots_;
  std::vector<std::string> irreplaceable_;
  std::string different_;  // the first
};

ModulePtr convert(const ModulePtr& module, const Conversion& conversion,
                  std::source_location where) {
  if (!module) throw UsageError({conversion.operation, "", -1, 0, where}, "got no module");
  if (conversion.matches(*module)) {
    const std::string difference = conversion.difference(*module);
    if (!difference.empty()) {
      throw UsageError({conversion.operation, "", -1, 0, where}, "the module " + difference);
    }
    return conversion.replace(*module).ptr();
  }
  Plan plan(conversion);
  plan.visit(module, "");
  plan.run(where);
  return module;
}

}  // namespace

std::shared_ptr<Module> convert_sync_batchnorm(const std::shared_ptr<Module>& module,
                                               std::optional<Group> group,
                                               std::source_location where) {
  const auto options = [&group, where](const auto& from) {
    return SyncBatchNormOptions(from.options, group, where);
  };
  constexpr const char* kAdvice =
      "Hold it in a torch::nn::Sequential (or ModuleList, ModuleDict); or make it a "
      "lockstep::nn::SyncBatchNorm2d member (1d, 3d), which has the same state; or leave the "
      "module "
      "as it is and call its forward inside a lockstep::nn::SyncBatchNormScope";
  auto converted = convert(
      module,
      conversion("convert_sync_batchnorm", kAdvice, BatchNorms(), SyncBatchNorms(), options),
      where);
  detail::name_layers(*converted, detail::Naming::on_all_ranks);
  for (const auto& layer : converted->modules()) {
    if (auto* const own = dynamic_cast<detail::NamedLayer*>(layer.get())) own->set_group(group);
  }
  return converted;
}

std::shared_ptr<Module> revert_sync_batchnorm(const std::shared_ptr<Module>& module,
                                              std::source_location where) {
  constexpr const char* kAdvice =
      "Hold it in a torch::nn::Sequential (or ModuleList, ModuleDict), or make it a "
      "torch::nn::BatchNorm member, which has the same state";
  Conversion reversion =
      conversion("revert_sync_batchnorm", kAdvice, SyncBatchNorms(), BatchNorms(),
                 [](const auto& from) { return from.options.without_group(); });
  reversion.difference = [](const Module& from) {
    return difference_from_batch_norm(from, SyncBatchNorms());
  };
  return convert(module, reversion, where);
}

}  // namespace lockstep::nn
