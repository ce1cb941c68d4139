#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <lockstep/error.hpp>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace lockstep::python {

/// "ValueError: too short"
std::string text_of_error(const nanobind::python_error& error);

/// A UsageError that is a TypeError of Python's too.
class UsageTypeError : public UsageError {
  using UsageError::UsageError;
};

/// A Python exception on its way through the core, which reads its text: "ValueError: too short".
class PythonException : public std::runtime_error {
 public:
  /// The caller holds the GIL.
  explicit PythonException(nanobind::python_error error);
  /// Makes it Python's current exception. Call once.
  void restore() const noexcept { error_->restore(); }
  /// KeyboardInterrupt, SystemExit or MemoryError.
  bool is_fatal() const noexcept { return is_fatal_; }

 private:
  bool is_fatal_;
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

/// A KeyboardInterrupt, SystemExit or MemoryError while an object is unpickled. Not derived from
/// std::exception, which the core would report as a message that cannot be decoded.
struct FatalException {
  PythonException exception;
};

/// in_python for code that unpickles.
template <class F>
auto in_unpickling(F f) {
  try {
    return in_python(std::move(f));
  } catch (const PythonException& exception) {
    if (exception.is_fatal()) throw FatalException{exception};
    throw;
  }
}

/// Makes a lockstep::Error Python's current exception, of a class of lockstep.errors. Returns false
/// for anything else. Needs the GIL.
bool raise_error(const std::exception_ptr& thrown);

/// For code that makes the exception from a class and a text: a class below that of
/// lockstep.errors, with the error's attributes. A new reference; null for anything else. Needs the
/// GIL.
PyObject* class_of_error(const std::exception_ptr& thrown);

/// Translates lockstep::Error to the classes of lockstep.errors.
void register_errors();

}  // namespace lockstep::python
