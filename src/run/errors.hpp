#pragma once

#include <fmt/format.h>

#include <cerrno>
#include <lockstep/error.hpp>
#include <string>
#include <string_view>

namespace lockstep::run {

/// The context of the launcher's own errors: a command has no source line to name.
inline ErrorContext launcher_context() { return {.operation = "lockstep run"}; }

inline UsageError usage_error(const std::string& text) { return {launcher_context(), text}; }

/// Call it before anything else changes errno.
inline SystemError system_error(const std::string& text) {
  return {launcher_context(), errno, text};
}

/// What to do where processes or descriptors are used up, in parentheses; empty: unknown.
inline std::string_view remedy_for(int error_number) {
  switch (error_number) {
    case EAGAIN:
      return " (the limit on processes of this user or container is reached: raise ulimit -u or "
             "the pids.max of its control group, or start fewer ranks)";
    case ENOMEM: return " (memory is used up: start fewer ranks)";
    case EMFILE:
      return " (no descriptor is left: raise the limit on open files, ulimit -n, or start fewer "
             "ranks)";
    case ENFILE: return " (the machine's limit on open files is reached: raise fs.file-max)";
    default: return {};
  }
}

/// `what` could not be started. Call it before anything else changes errno.
inline SystemError start_error(std::string_view what) {
  const int error_number = errno;
  return {launcher_context(), error_number,
          fmt::format("cannot start {}{}", what, remedy_for(error_number))};
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
