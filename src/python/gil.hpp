#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

/// The GIL around a wait. Python up to 3.13 ends a thread that takes the GIL while Python ends
/// (a daemon's) by pthread_exit, whose unwinding no destructor survives: such a thread stops here
/// instead, as from Python 3.14 on.
namespace lockstep::python {

[[noreturn]] inline void stop_thread() noexcept {
  while (true) ::pause();
}

/// The handler of a forced unwinding refers to no object, which UndefinedBehaviorSanitizer reports.
[[gnu::no_sanitize("null")]] inline void take_gil(PyThreadState* state) noexcept {
  try {
    PyEval_RestoreThread(state);
  } catch (abi::__forced_unwind&) {
    stop_thread();
  }
}

/// Without the GIL until its end.
class GilReleased {
 public:
  GilReleased() noexcept : state_(PyEval_SaveThread()) {}
  ~GilReleased() { take_gil(state_); }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace lockstep::python
