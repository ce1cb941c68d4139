#include "python/exceptions.hpp"

#include <exception>
#include <lockstep/error.hpp>
#include <string>

#include "group/failure.hpp"
#include "python/str.hpp"

namespace nb = nanobind;

namespace lockstep::python {

std::string text_of_error(const nb::python_error& error) {
  const nb::gil_scoped_acquire gil;
  std::string name = text_of(error.type().attr("__name__"));
  try {
    const nb::str text(error.value());
    if (nb::len(text) > 0) name.append(": ").append(text_of(text));
  } catch (const nb::python_error&) {
    name.append(": (str() of it failed)");
  }
  return name;
}

namespace {

/// The class of lockstep.errors for an error of the core.
const char* class_of(const Error& error) {
  if (dynamic_cast<const UsageTypeError*>(&error) != nullptr) return "_UsageTypeError";
  using enum internal::Failure::Kind;
  switch (internal::failure_of(error).kind) {
    case usage: return "UsageError";
    case mismatch: return "MismatchError";
    case timeout: return "TimeoutError";
    case peer_lost:
    case peer_left: return "PeerLost";
    case peer_failed: return "PeerFailed";
    case engine:
    case system: break;
  }
  return "EngineError";  // and SystemError, whose text names the system call and errno
}

nb::object type_of(const Error& error) {
  return nb::module_::import_("lockstep.errors").attr(class_of(error));
}

nb::dict attributes_of(const Error& error) {
  const ErrorContext& context = error.context();
  nb::dict attributes;
  attributes["text"] = str_of(error.text());
  attributes["operation"] = str_of(context.operation);
  attributes["group"] = str_of(context.group);
  attributes["rank"] = nb::int_(context.rank);
  attributes["sequence"] = nb::int_(context.sequence);
  attributes["filename"] = str_of(context.where.file_name());
  attributes["lineno"] = nb::int_(context.where.line());
  return attributes;
}

void raise(const Error& error) {
  const nb::object type = type_of(error);
  const nb::object value = type(str_of(error.what()));
  value.attr("__dict__").attr("update")(attributes_of(error));
  PyErr_SetObject(type.ptr(), value.ptr());
}

}  // namespace

PythonException::PythonException(nb::python_error error)
    : std::runtime_error(text_of_error(error)),
      is_fatal_(!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)),
      error_(std::make_shared<nb::python_error>(std::move(error))) {}

bool raise_error(const std::exception_ptr& thrown) try {
  std::rethrow_exception(thrown);
} catch (const Error& error) {
  // An interrupt abandons the group to end the wait: then the error is only its consequence.
  if (PyErr_CheckSignals() != 0) return true;
  try {
    raise(error);
  } catch (nb::python_error& failure) {
    failure.restore();
  }
  return true;
} catch (...) {
  return false;
}

PyObject* class_of_error(const std::exception_ptr& thrown) try {
  std::rethrow_exception(thrown);
} catch (const Error& error) {
  const nb::object type = type_of(error);
  nb::dict attributes = attributes_of(error);
  attributes["__module__"] = type.attr("__module__");
  return nb::borrow(reinterpret_cast<PyObject*>(&PyType_Type))(type.attr("__name__"),
                                                               nb::make_tuple(type), attributes)
      .release()
      .ptr();
} catch (...) {
  return nullptr;
}

void register_errors() {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const PythonException& exception) {
      exception.restore();
    } catch (const FatalException& end) {
      end.exception.restore();
    } catch (const Error&) {
      raise_error(thrown);
    }
  });
}

}  // namespace lockstep::python
