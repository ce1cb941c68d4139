#pragma once

#include <lockstep/group.hpp>

/// Ctrl-C while the main thread waits in a call. Python's own handler only sets a flag, which the
/// main thread reads after the call. So lockstep installs a handler that records the signal and
/// then calls Python's; a thread, lockstep-sigint, abandons the group if the main thread is in
/// a call. The call then fails, and KeyboardInterrupt is raised instead of that error.
/// Only if SIGINT raises KeyboardInterrupt: any other handler of the program runs after the call.
namespace lockstep::python {

/// Installs the handler. Call on the main thread, with the GIL; calls of other threads do nothing.
void watch_interrupts();
/// Needs the GIL.
void stop_watching_interrupts() noexcept;

/// A call on `group` by this thread, until end_call with the value put into `before`; null: Python
/// code runs within a call. Returns false if a signal handler of Python raised: then there is no
/// call to end. Needs the GIL.
bool begin_call(const Group* group, const Group** before);
/// Needs no GIL.
void end_call(const Group* before);

/// Python ends: a call of a daemon thread, which must not take the GIL again, does not return.
void keep_daemons_in_calls() noexcept;

/// begin_call and end_call.
/// Throws nanobind::python_error if a signal handler of Python raised. Needs the GIL.
class InterruptibleCall {
 public:
  explicit InterruptibleCall(const Group* group);
  ~InterruptibleCall();
  InterruptibleCall(const InterruptibleCall&) = delete;
  InterruptibleCall& operator=(const InterruptibleCall&) = delete;

 private:
  const Group* before_ = nullptr;
};

}  // namespace lockstep::python
