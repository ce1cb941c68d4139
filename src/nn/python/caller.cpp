#include "nn/python/caller.hpp"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace lockstep::python {

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

std::source_location python_line() {
  const py::gil_scoped_acquire gil;
  return core().where();
}

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

CallOfPython::CallOfPython(const Group& group) {
  const py::gil_scoped_acquire gil;
  if (!core().begin_call(&group, &before_)) throw py::error_already_set();
  where_ = core().where();
}

CallOfPython::~CallOfPython() {
  const py::gil_scoped_acquire gil;
  core().end_call(before_);
}

}  // namespace lockstep::python
