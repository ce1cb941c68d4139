#include "nn/torch_extension/torch_module.hpp"

#include <torch/csrc/Exceptions.h>

#include <lockstep/error.hpp>
#include <memory>
#include <utility>

namespace py = pybind11;

namespace lockstep::python {
namespace {

class TorchError final : public torch::PyTorchError {
 public:
  TorchError(std::exception_ptr error, const char* text)
      : PyTorchError(text), error_(std::move(error)) {}

  const std::exception_ptr& error() const { return error_; }
  /// torch makes an instance of it with the text alone: the attributes are those of this class.
  PyObject* python_type() override {
    if (!type_) {
      type_ = {core().class_of(error_), [](PyObject* type) {
                 const py::gil_scoped_acquire gil;
                 Py_XDECREF(type);
               }};
    }
    return type_ ? type_.get() : PyExc_RuntimeError;
  }

 private:
  std::exception_ptr error_;
  std::shared_ptr<PyObject> type_;  // guarded by the GIL
};

/// Translates errors of lockstep where they pass through pybind11.
void register_errors() {
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const TorchError& error) {
      core().raise(error.error());
    } catch (const Error&) {
      core().raise(thrown);
    }
  });
}

}  // namespace

const CoreApi& core() {
  static const CoreApi* const api = [] {
    const py::gil_scoped_acquire gil;
    const py::capsule capsule = py::module_::import("lockstep._core").attr("_api");
    const auto* const found =
        static_cast<const CoreApi*>(PyCapsule_GetPointer(capsule.ptr(), kCoreApi));
    if (found == nullptr) throw py::error_already_set();
    return found;
  }();
  return *api;
}

std::exception_ptr error_for_torch(std::exception_ptr thrown) try {
  std::rethrow_exception(thrown);
} catch (const Error& error) {
  return std::make_exception_ptr(TorchError(thrown, error.what()));
} catch (...) {
  return thrown;
}

}  // namespace lockstep::python

PYBIND11_MODULE(_torch, module) {
  module.doc() = "The C++ half of what lockstep adds to torch.";
  lockstep::python::register_errors();
  lockstep::python::define_backend(module);
  lockstep::python::define_batch_norm(module);
  lockstep::python::define_parameters(module);
}
