#include "nn/python/torch_error.hpp"

#include <torch/csrc/Exceptions.h>

#include <lockstep/error.hpp>
#include <memory>
#include <utility>

#include "nn/python/caller.hpp"

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

}  // namespace

std::exception_ptr error_for_torch(std::exception_ptr thrown) try {
  std::rethrow_exception(thrown);
} catch (const Error& error) {
  return std::make_exception_ptr(TorchError(thrown, error.what()));
} catch (...) {
  return thrown;
}

void register_torch_errors() {
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

}  // namespace lockstep::python
