#include "python/exceptions.hpp"

#include <exception>
#include <lockstep/error.hpp>
#include <string>

namespace nb = nanobind;

namespace lockstep::python {
namespace {

std::string text_of(const nb::python_error& error) {
  const nb::gil_scoped_acquire gil;
  std::string name = nb::cast<nb::str>(error.type().attr("__name__")).c_str();
  try {
    const nb::str text(error.value());
    if (nb::len(text) > 0) name.append(": ").append(text.c_str());
  } catch (const nb::python_error&) {
    name.append(": (str() of it failed)");
  }
  return name;
}

/// The class of lockstep.errors for an error of the core.
const char* class_of(const Error& error) {
  if (dynamic_cast<const UsageError*>(&error) != nullptr) return "UsageError";
  if (dynamic_cast<const MismatchError*>(&error) != nullptr) return "MismatchError";
  if (dynamic_cast<const TimeoutError*>(&error) != nullptr) return "TimeoutError";
  if (dynamic_cast<const PeerLost*>(&error) != nullptr) return "PeerLost";
  if (dynamic_cast<const PeerFailed*>(&error) != nullptr) return "PeerFailed";
  return "EngineError";  // and SystemError, whose text names the system call and errno
}

void raise(const Error& error) {
  const nb::object type = nb::module_::import_("lockstep.errors").attr(class_of(error));
  const nb::object value = type(error.what());
  const ErrorContext& context = error.context();
  nb::setattr(value, "text", nb::cast(error.text().c_str()));
  nb::setattr(value, "operation", nb::cast(context.operation.c_str()));
  nb::setattr(value, "group", nb::cast(context.group.c_str()));
  nb::setattr(value, "rank", nb::int_(context.rank));
  nb::setattr(value, "sequence", nb::int_(context.sequence));
  nb::setattr(value, "filename", nb::cast(context.where.file_name()));
  nb::setattr(value, "lineno", nb::int_(context.where.line()));
  PyErr_SetObject(type.ptr(), value.ptr());
}

}  // namespace

PythonException::PythonException(nb::python_error error)
    : std::runtime_error(text_of(error)),
      error_(std::make_shared<nb::python_error>(std::move(error))) {}

void register_errors() {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const PythonException& exception) {
      exception.restore();
    } catch (const Error& error) {
      // An interrupt abandons the group to end the wait: then the error is only its consequence.
      if (PyErr_CheckSignals() != 0) return;
      try {
        raise(error);
      } catch (nb::python_error& failure) {
        failure.restore();
      }
    }
  });
}

}  // namespace lockstep::python
