#pragma once

namespace lockstep::c {

/// Keeps the exception that is being handled as the calling thread's last failure, of this function
/// if the exception does not name one. Returns its lockstep_status.
int keep_exception(const char* operation) noexcept;

/// The body of every function that returns a status.
template <class F>
int guarded(const char* operation, F body) noexcept {
  try {
    body();
    return 0;
  } catch (...) {
    return keep_exception(operation);
  }
}

}  // namespace lockstep::c
