#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <stdexcept>
#include <utility>

namespace lockstep::python {

/// A Python exception on its way through the core, which reads its text: "ValueError: too short".
class PythonException : public std::runtime_error {
 public:
  explicit PythonException(nanobind::python_error error);
  /// Makes it Python's current exception. Call once.
  void restore() const noexcept { error_->restore(); }

 private:
  std::shared_ptr<nanobind::python_error> error_;
};

/// Runs Python code within a call of the core that released the GIL.
template <class F>
auto in_python(F f) {
  const nanobind::gil_scoped_acquire gil;
  try {
    return f();
  } catch (nanobind::python_error& error) {
    throw PythonException(std::move(error));
  }
}

/// Translates lockstep::Error to the classes of lockstep.errors.
void register_errors();

}  // namespace lockstep::python
