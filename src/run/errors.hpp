#pragma once

#include <cerrno>
#include <lockstep/error.hpp>
#include <string>

namespace lockstep::run {

/// The context of the launcher's own errors: a command has no source line to name.
inline ErrorContext launcher_context() { return {.operation = "lockstep run"}; }

inline UsageError usage_error(const std::string& text) { return {launcher_context(), text}; }

/// Call it before anything else changes errno.
inline SystemError system_error(const std::string& text) {
  return {launcher_context(), errno, text};
}

/// The program cannot be started.
class ExecError : public SystemError {
 public:
  ExecError(int exit_code, int error_number, const std::string& text)
      : SystemError(launcher_context(), error_number, text), exit_code_(exit_code) {}
  /// As in a shell: 127 if there is no such program, 126 if it cannot be executed.
  int exit_code() const noexcept { return exit_code_; }

 private:
  int exit_code_;
};

}  // namespace lockstep::run
