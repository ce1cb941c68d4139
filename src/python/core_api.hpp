#pragma once

#include <Python.h>

#include <exception>
#include <lockstep/group.hpp>
#include <source_location>

namespace lockstep::python {

/// What lockstep._torch takes from lockstep._core, which speaks to Python in another way: the
/// contents of the capsule _core._api.
struct CoreApi {
  /// The innermost line of Python code outside the package and the folders added. Needs the GIL.
  std::source_location (*where)();
  /// Frames of files in this folder are not the caller's. Call before where().
  void (*add_folder)(const char* folder);
  /// Makes an error of lockstep Python's current exception. False if it is none. Needs the GIL.
  bool (*raise)(const std::exception_ptr& thrown);
  /// The class of lockstep.errors for an error of lockstep, with the error's attributes as its own:
  /// a new reference. Null: it is none. Needs the GIL.
  PyObject* (*class_of)(const std::exception_ptr& thrown);
  /// A call on `group` by this thread, which Ctrl-C ends, until end_call with the value returned in
  /// `before`. False: a handler of a signal has raised. Needs the GIL.
  bool (*begin_call)(const Group* group, const Group** before);
  void (*end_call)(const Group* before);
  /// From now on, Ctrl-C ends calls of the main thread. Needs the GIL.
  void (*watch_interrupts)();
  /// The Group of a lockstep.Group, as long as that lives; null: it is none. Needs the GIL.
  const Group* (*group_of)(PyObject* object);
};

inline constexpr const char* kCoreApi = "lockstep._core._api";

}  // namespace lockstep::python
