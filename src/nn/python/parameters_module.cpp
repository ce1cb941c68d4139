#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <vector>

#include "nn/elastic/parameter_samples.hpp"
#include "nn/python/torch_module.hpp"

namespace py = pybind11;

namespace lockstep::python {
namespace {

/// What is kept of parameters at the end of a step, to see what the next one has changed. In Python
/// this would be half of what keeping a state costs. Threads: one, with the GIL.
class KeptParameters {
 public:
  explicit KeptParameters(const py::list& parameters) {
    for (const py::handle parameter : parameters) {
      if (!THPVariable_Check(parameter.ptr())) throw py::type_error("expected a list of tensors");
      parameters_.push_back(THPVariable_Unpack(parameter.ptr()));
    }
    keep();
  }

  /// What is now.
  void keep() {
    samples_.take(parameters_);
    kept_.clear();
    for (const at::Tensor& parameter : parameters_) {
      const at::Tensor& gradient = parameter.grad();
      kept_.push_back({.gradient = WeakTensor(gradient.getIntrusivePtr()),
                       .version = version_of(gradient),
                       .has_gradient = gradient.defined(),
                       .requires_grad = parameter.requires_grad()});
    }
  }
  py::list requires_grad() const {
    return list_of([this](std::size_t i) { return kept_[i].requires_grad; });
  }
  py::list has_gradient() const {
    return list_of([this](std::size_t i) { return kept_[i].has_gradient; });
  }
  /// Whether each has a gradient that it did not have then, or that has been written to.
  py::list has_new_gradient() const {
    return list_of([this](std::size_t i) {
      const at::Tensor& now = parameters_[i].grad();
      if (!now.defined()) return false;
      // A tensor that is gone keeps its address as long as there is a weak pointer to it.
      const bool is_same = kept_[i].gradient._unsafe_get_target() == now.unsafeGetTensorImpl();
      return !is_same || kept_[i].version != version_of(now);
    });
  }
  /// By some values of each.
  bool have_changed() const { return samples_.have_changed(parameters_); }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Kept {
    WeakTensor gradient;
    std::int64_t version;
    bool has_gradient, requires_grad;
  };

  static std::int64_t version_of(const at::Tensor& gradient) {
    return gradient.defined() ? static_cast<std::int64_t>(gradient._version()) : 0;
  }
  template <class F>
  py::list list_of(const F& f) const {
    py::list list(parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i) list[i] = py::bool_(f(i));
    return list;
  }

  std::vector<at::Tensor> parameters_;
  std::vector<Kept> kept_;
  nn::ParameterSamples samples_;
};

}  // namespace

void define_parameters(py::module_& module) {
  py::class_<KeptParameters>(module, "KeptParameters")
      .def(py::init<const py::list&>())
      .def("keep", &KeptParameters::keep)
      .def("requires_grad", &KeptParameters::requires_grad)
      .def("has_gradient", &KeptParameters::has_gradient)
      .def("has_new_gradient", &KeptParameters::has_new_gradient)
      .def("have_changed", &KeptParameters::have_changed);
}

}  // namespace lockstep::python
