#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "nn/elastic/parameter_samples.hpp"
#include "nn/torch_extension/torch_module.hpp"

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
    kept_.resize(parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& gradient = parameters_[i].grad();
      Kept& kept = kept_[i];
      if (kept.gradient._unsafe_get_target() != gradient.unsafeGetTensorImpl()) {
        kept.gradient = WeakTensor(gradient.getIntrusivePtr());
      }
      kept.version = version_of(gradient);
      kept.has_gradient = gradient.defined();
      const bool requires_grad = parameters_[i].requires_grad();
      requires_grad_changed_ |= requires_grad != kept.requires_grad;
      kept.requires_grad = requires_grad;
    }
  }
  /// Whether a keep() since the last call of this has seen another requires_grad, or was the first.
  bool take_requires_grad_changed() { return std::exchange(requires_grad_changed_, false); }
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
    WeakTensor gradient{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    std::int64_t version = 0;
    bool has_gradient = false, requires_grad = false;
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
  bool requires_grad_changed_ = true;
  nn::ParameterSamples samples_;
};

}  // namespace

void define_parameters(py::module_& module) {
  py::class_<KeptParameters>(module, "KeptParameters")
      .def(py::init<const py::list&>())
      .def("keep", &KeptParameters::keep)
      .def("requires_grad", &KeptParameters::requires_grad)
      .def("take_requires_grad_changed", &KeptParameters::take_requires_grad_changed)
      .def("has_gradient", &KeptParameters::has_gradient)
      .def("has_new_gradient", &KeptParameters::has_new_gradient)
      .def("have_changed", &KeptParameters::have_changed);
}

}  // namespace lockstep::python
