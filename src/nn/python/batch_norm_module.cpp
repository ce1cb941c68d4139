#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <lockstep/launch.hpp>
#include <lockstep/nn/sync_batch_norm_scope.hpp>
#include <memory>
#include <optional>
#include <string>

#include "nn/batch_norm/layer_steps.hpp"
#include "nn/python/caller.hpp"
#include "nn/python/layer_group.hpp"
#include "nn/python/torch_error.hpp"
#include "nn/python/torch_module.hpp"

namespace py = pybind11;

namespace lockstep::python {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

Tensor value_of(const MaybeTensor& tensor) { return tensor.value_or(Tensor()); }

/// group: of torch.distributed, a lockstep.Group, or None: lockstep's default group.
Group group_of(const py::object& group, std::source_location where) {
  if (group.is_none()) return layer_group(default_group(where));
  if (const Group* const own = core().group_of(group.ptr())) return layer_group(*own);
  return layer_group(py::cast<c10::intrusive_ptr<c10d::ProcessGroup>>(group));
}

/// The training forward of a layer. momentum: None for the cumulative average.
Tensor sync_batch_norm(const Tensor& input, std::int64_t num_features, const MaybeTensor& weight,
                       const MaybeTensor& bias, const MaybeTensor& running_mean,
                       const MaybeTensor& running_var, const MaybeTensor& num_batches_tracked,
                       std::optional<double> momentum, double eps, const py::object& group,
                       const std::string& title) {
  const auto where = core().where();
  const auto record = c10::make_intrusive<nn::BatchNormRecord>();
  record->settings = {.layer = {.group = group_of(group, where),
                                .title = std::make_shared<const std::string>(title),
                                .where = where,
                                .tag = nn::tag_of(title)},
                      .eps = eps,
                      .running_mean = value_of(running_mean),
                      .running_var = value_of(running_var)};
  const py::gil_scoped_release released;
  const Tensor w = value_of(weight);
  const Tensor b = value_of(bias);
  nn::check_batch_norm(input, num_features, w, b, record->settings);
  if (momentum) {
    record->settings.factor = *momentum;
  } else if (num_batches_tracked) {
    record->settings.factor = 1 / (num_batches_tracked->item<double>() + 1);
  }
  Tensor output = nn::synchronised_batch_norm(input, w, b, record);
  if (num_batches_tracked) nn::count_batch(*num_batches_tracked);
  return output;
}

/// lockstep.nn.SyncBatchNormScope, in its block.
class Scope {
 public:
  explicit Scope(const py::object& group) : Scope(group, core().where()) {}
  void exit() { scope_.reset(); }

 private:
  Scope(const py::object& group, std::source_location where)
      : scope_(std::make_unique<nn::SyncBatchNormScope>(group_of(group, where), where)) {}

  std::unique_ptr<nn::SyncBatchNormScope> scope_;
};

/// Until exit() no scope applies on this thread.
class Suspended {
 public:
  void exit() { scope_.reset(); }

 private:
  std::unique_ptr<nn::SuspendedScope> scope_ = std::make_unique<nn::SuspendedScope>();
};

}  // namespace

void define_batch_norm(py::module_& module) {
  nn::detail::set_error_for_torch(error_for_torch);
  module.def("sync_batch_norm", &sync_batch_norm);
  py::class_<Scope>(module, "SyncBatchNormScope")
      .def(py::init<const py::object&>())
      .def("exit", &Scope::exit);
  py::class_<Suspended>(module, "SuspendedScope").def(py::init<>()).def("exit", &Suspended::exit);
}

}  // namespace lockstep::python
