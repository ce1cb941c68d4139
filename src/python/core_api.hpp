#pragma once

#include <Python.h>

#include <exception>
#include <lockstep/group.hpp>
#include <source_location>

namespace lockstep::python {

/// The functions of lockstep._core that lockstep_torch._torch uses, as the contents of the capsule
/// _core._api: _core binds with nanobind, _torch with pybind11.
struct CoreApi {
  /// The innermost line of Python code outside the package and the folders added. Needs the GIL.
  std::source_location (*where)();
  /// Frames of files in this folder are not the caller's. Call before where().
  void (*add_folder)(const char* folder);
  /// Sets Python's current exception from a lockstep::Error. False if it is not one. Needs the GIL.
  bool (*raise)(const std::exception_ptr& thrown);
  /// The class of lockstep.errors for an error of lockstep, with the error's attributes as its own:
  /// a new reference. Null if it is not one. Needs the GIL.
  PyObject* (*class_of)(const std::exception_ptr& thrown);
  /// A call on `group` by this thread, which Ctrl-C ends, until end_call with the value returned in
  /// `before`. False: a handler of a signal has raised. Needs the GIL.
  bool (*begin_call)(const Group* group, const Group** before);
  void (*end_call)(const Group* before);
  /// From now on, Ctrl-C ends calls of the main thread. Needs the GIL.
  void (*watch_interrupts)();
  /// The Group of a lockstep.Group, valid as long as that exists; null if it is not one. Needs the
  /// GIL.
  const Group* (*group_of)(PyObject* object);
};

inline constexpr const char* kCoreApi = "lockstep._core._api";

}  // namespace lockstep::python
