#include <lockstep/nn/replication.hpp>

#include <c10/util/Type.h>
#include <fmt/format.h>

#include <lockstep/error.hpp>
#include <set>
#include <string>

namespace lockstep::nn {
namespace {

using torch::nn::Module;

struct Submodule {
  std::string name;  ///< dotted
  Module* module;
  std::size_t n_children;
};

/// Throws UsageError if a submodule is null, as it can be in a clone by torch.
void flatten(Module& module, const std::string& copy_name, const std::string& name,
             std::vector<Submodule>& positions, std::source_location where) {
  const auto children = module.named_children();
  positions.push_back({name, &module, children.size()});
  for (const auto& child : children) {
    const std::string path = name.empty() ? child.key() : name + "." + child.key();
    if (!child.value()) {
      throw UsageError({"execute_replication_callbacks", "", -1, 0, where},
                       fmt::format("{} has null as '{}': a class derived from a container of "
                                   "torch's needs a clone() of its own that returns its type",
                                   copy_name, path));
    }
    flatten(*child.value(), copy_name, path, positions, where);
  }
}

std::string type_of(const Module& module) { return c10::demangle(typeid(module).name()); }

/// Names are not compared: torch::nn::Sequential::clone renumbers its modules.
void check_same_structure(const std::vector<Submodule>& first, const std::vector<Submodule>& copy,
                          const std::string& copy_name, std::source_location where) {
  // Both walks are in step up to the first difference, so neither ends before it.
  for (std::size_t i = 0; i < first.size(); ++i) {
    const Module& expected = *first[i].module;
    const Module& got = *copy[i].module;
    std::string difference;
    if (typeid(expected) != typeid(got)) {
      difference = fmt::format("is a {}, but a {} in copy 0", type_of(got), type_of(expected));
    } else if (first[i].n_children != copy[i].n_children) {
      difference = fmt::format("({}) has {} submodules, but {} in copy 0", type_of(got),
                               copy[i].n_children, first[i].n_children);
    } else {
      continue;
    }
    throw UsageError(
        {"execute_replication_callbacks", "", -1, 0, where},
        fmt::format("{} differs from copy 0: {} {}; make the copies from one module", copy_name,
                    first[i].name.empty() ? "the module itself" : "'" + first[i].name + "'",
                    difference));
  }
}

at::Device device_of(const Module& module) {
  for (const auto& tensors : {module.parameters(), module.buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined()) return tensor.device();
    }
  }
  return at::kCPU;
}

}  // namespace

void execute_replication_callbacks(std::span<const std::shared_ptr<Module>> replicas,
                                   const ReplicationInfo& about, std::source_location where) {
  const ErrorContext error{"execute_replication_callbacks", "", -1, 0, where};
  if (replicas.empty()) throw UsageError(error, "got no copies; expected at least copy 0");
  if (!about.devices.empty() && about.devices.size() != replicas.size()) {
    throw UsageError(error, fmt::format("got {} devices, expected one for each of {} copies",
                                        about.devices.size(), replicas.size()));
  }
  std::vector<std::vector<Submodule>> copies(replicas.size());
  for (std::size_t id = 0; id < replicas.size(); ++id) {
    if (!replicas[id]) throw UsageError(error, fmt::format("copy {} is null", id));
    const std::string name = fmt::format("copy {}", id);
    flatten(*replicas[id], name, "", copies[id], where);
    check_same_structure(copies[0], copies[id], name, where);
  }
  std::vector<Submodule> originals;
  if (about.original) {
    flatten(*about.original, "the original", "", originals, where);
    check_same_structure(copies[0], originals, "the original", where);
  }
  std::map<const Module*, CallbackContext> contexts;  // by the submodule of copy 0
  for (std::size_t id = 0; id < copies.size(); ++id) {
    const at::Device device = about.devices.empty() ? device_of(*replicas[id]) : about.devices[id];
    std::set<const Module*> called;
    for (std::size_t i = 0; i < copies[id].size(); ++i) {
      auto* callback = dynamic_cast<ReplicationCallback*>(copies[id][i].module);
      if (callback == nullptr || !called.insert(copies[id][i].module).second) continue;
      CallbackContext& context = contexts[copies[0][i].module];
      context.n_copies_ = static_cast<int>(copies.size());
      context.device_ = device;
      if (about.original) context.original_ = originals[i].module;
      callback->on_replicate(context, static_cast<int>(id));
    }
  }
}

void execute_failure_callbacks(Module& replica, const std::exception_ptr& error) {
  replica.apply([&error](Module& module) {
    if (auto* callback = dynamic_cast<ReplicationCallback*>(&module)) callback->on_failure(error);
  });
}

}  // namespace lockstep::nn
