#include <fmt/format.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <lockstep/detail/collective.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/sync_batch_norm_scope.hpp>
#include <lockstep/world.hpp>
#include <memory>
#include <optional>
#include <string>

#include "base/text.hpp"
#include "nn/backend/layer_group.hpp"
#include "nn/batch_norm/inner_scopes.hpp"
#include "nn/batch_norm/layer_steps.hpp"
#include "nn/interpreter.hpp"
#include "nn/torch_extension/torch_module.hpp"

namespace py = pybind11;

namespace lockstep::python {
namespace {

using at::Tensor;

/// group: of torch.distributed, a lockstep.Group, or None: lockstep's default group.
Group group_of(const py::object& group, std::source_location where) {
  if (group.is_none()) return default_group(where);
  if (const Group* const own = core().group_of(group.ptr())) return *own;
  return backend::layer_group(py::cast<c10::intrusive_ptr<c10d::ProcessGroup>>(group));
}

/// What the program has given to a layer. Throws UsageError if it is of another type.
template <class T>
T read(const nn::Layer& layer, const char* name, const char* expected, const py::object& value) {
  try {
    return value.cast<T>();
  } catch (const py::cast_error&) {
    throw UsageError(
        layer.context(nn::kForward),
        fmt::format("{} is {}; it must be {}", name,
                    py::repr(py::type::of(value).attr("__name__")).cast<std::string>(), expected));
  }
}

/// The training forward of a layer. momentum: None for the cumulative average. Takes objects: what
/// pybind rejects would not be a refused call. identity: what ranks compare, so that two layers of
/// equal width never exchange their statistics. clamps: max(var, eps) instead of var + eps.
Tensor sync_batch_norm(const py::object& input, const py::object& num_features,
                       const py::object& weight, const py::object& bias,
                       const py::object& running_mean, const py::object& running_var,
                       const py::object& num_batches_tracked, const py::object& momentum,
                       const py::object& eps, const py::object& group, const std::string& title,
                       const std::string& identity, bool clamps) {
  const auto where = core().where();
  const auto record = c10::make_intrusive<nn::BatchNormRecord>();
  nn::BatchNormSettings& settings = record->settings;
  settings.eps_mode = clamps ? nn::EpsMode::clamp : nn::EpsMode::plus;
  const nn::Layer& layer = settings.layer = {.group = group_of(group, where),
                                             .title = std::make_shared<const std::string>(title),
                                             .where = where,
                                             .tag = nn::tag_of(identity)};
  Tensor x, w, b;
  layer.guard([&] {
    const auto tensor = [&](const char* name, const py::object& value) {
      return nn::value_of(read<nn::OptionalTensor>(layer, name, "a tensor", value));
    };
    x = read<Tensor>(layer, "input", "a tensor", input);
    w = tensor("weight", weight);
    b = tensor("bias", bias);
    settings.running_mean = tensor("running_mean", running_mean);
    settings.running_var = tensor("running_var", running_var);
    settings.num_batches_tracked = tensor("num_batches_tracked", num_batches_tracked);
    settings.layer.n_channels = read<std::int64_t>(layer, "num_features", "an int", num_features);
    settings.momentum = read<std::optional<double>>(layer, "momentum", "a float or None", momentum);
    settings.eps = read<double>(layer, "eps", "a float", eps);
  });
  const nn::Released released;
  nn::begin_batch(x, w, b, settings);
  Tensor output = nn::synchronised_batch_norm(x, w, b, record);
  nn::count_batch(*record);
  return output;
}

/// A scope that Python has entered, until exit() or the end of its `with` block.
template <class Scope>
struct Entered {
  std::unique_ptr<Scope> scope;

  void exit() { scope.reset(); }

  static auto define(py::module_& module, const char* name) {
    return py::class_<Entered>(module, name)
        .def("exit", &Entered::exit)
        .def("__enter__", [](py::object self) { return self; })
        .def("__exit__", [](Entered& self, const py::args&) { self.exit(); });
  }
};

}  // namespace

void define_batch_norm(py::module_& module) {
  nn::detail::error_converter = error_for_torch;
  module.def("sync_batch_norm", &sync_batch_norm);
  module.def("line", [] {
    const auto where = core().where();
    return fmt::format("{}:{}", base::base_name(where.file_name()), where.line());
  });
  using Scope = nn::SyncBatchNormScope;
  Entered<Scope>::define(module, "SyncBatchNormScope").def(py::init([](const py::object& group) {
    const auto where = core().where();
    return Entered<Scope>{std::make_unique<Scope>(group_of(group, where), where)};
  }));
  // Until its end no scope applies on this thread.
  using Suspended = nn::SuspendedScope;
  Entered<Suspended>::define(module, "SuspendedScope").def(py::init([] {
    return Entered<Suspended>{std::make_unique<Suspended>()};
  }));
}

}  // namespace lockstep::python
