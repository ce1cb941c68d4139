#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

#include "nn/backend/backend.hpp"
#include "nn/backend/launcher_store.hpp"
#include "nn/interpreter.hpp"
#include "nn/torch_extension/torch_module.hpp"
#include "python/gil.hpp"

namespace py = pybind11;

namespace lockstep::python {
namespace {

/// f() with the GIL; see gil.hpp.
template <class F>
auto with_gil(F f) {
  try {
    const py::gil_scoped_acquire gil;
    return f();
  } catch (abi::__forced_unwind&) {
    stop_thread();
  }
}

std::source_location python_line() {
  return with_gil([] { return core().where(); });
}

/// What a handler of a signal raised, with the text that peers get of it.
class RaisedByHandler final : public py::error_already_set {
 public:
  RaisedByHandler() {
    text_ = py::str(type().attr("__name__")).cast<std::string>();
    const auto value_text = py::str(value()).cast<std::string>();
    if (!value_text.empty()) text_ += ": " + value_text;
  }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

std::source_location begin_call(const Group& group, const Group** before) {
  return with_gil([&] {
    if (!core().begin_call(&group, before)) throw RaisedByHandler();
    return core().where();
  });
}

void end_call(const Group* before) { core().end_call(before); }

void watch_interrupts() {
  const py::gil_scoped_acquire gil;
  core().watch_interrupts();
}

void* release_gil() {
  const bool has_gil = Py_IsInitialized() != 0 && PyGILState_Check() != 0;
  return has_gil ? PyEval_SaveThread() : nullptr;
}

void reacquire_gil(void* released) {
  if (released != nullptr) take_gil(static_cast<PyThreadState*>(released));
}

c10::intrusive_ptr<c10d::Backend> make_gloo(const nn::Interpreter::Gloo& gloo) {
  const py::gil_scoped_acquire gil;
  return py::module_::import("lockstep._backend")
      .attr("make_gloo")(gloo.store, gloo.rank, gloo.size, gloo.timeout, gloo.is_on_one_host)
      .cast<c10::intrusive_ptr<c10d::Backend>>();
}

c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Store> store, int rank,
                                               int size, std::string name,
                                               std::chrono::milliseconds timeout,
                                               std::vector<std::uint64_t> global_ranks) {
  return backend::Backend::make({.store = std::move(store),
                                 .rank = rank,
                                 .size = size,
                                 .name = std::move(name),
                                 .timeout = timeout,
                                 .global_ranks = std::move(global_ranks)});
}

}  // namespace

void define_backend(py::module_& module) {
  const py::object file = py::module_::import("torch").attr("__file__");
  const auto folder = py::module_::import("os.path").attr("dirname")(file).cast<std::string>();
  core().add_folder(folder.c_str());
  const py::object entry_point = py::module_::import("lockstep_torch").attr("__path__");
  core().add_folder(entry_point[py::int_(0)].cast<std::string>().c_str());
  nn::set_interpreter({.where = python_line,
                       .begin_call = begin_call,
                       .end_call = end_call,
                       .watch_interrupts = watch_interrupts,
                       .release = release_gil,
                       .reacquire = reacquire_gil,
                       .make_gloo = make_gloo});
  module.def("make_backend", &make_backend, py::arg("store"), py::arg("rank"), py::arg("size"),
             py::arg("name"), py::arg("timeout"), py::arg("global_ranks"));
  module.def("launcher_store", &backend::make_launcher_store);
  module.def("leave_all", &backend::LivingBackends::leave, py::arg("failure"));
}

}  // namespace lockstep::python
