#pragma once

#include <nanobind/nanobind.h>

#include <lockstep/detail/collective.hpp>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/types.hpp>
#include <string>

#include "python/interrupts.hpp"
#include "python/where.hpp"

namespace lockstep::python {

/// What every function that communicates has: its group, its limit, and the caller's line.
class Call {
 public:
  /// group: null for the default group. timeout: None, seconds, or a datetime.timedelta.
  Call(const char* operation, const Group* group, nanobind::handle timeout,
       Timeout default_timeout = {});
  /// Counts the call as refused if an exception leaves the function before its first message.
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const Group& group() const { return group_; }
  Timeout timeout() const { return timeout_; }
  std::source_location where() const { return where_; }
  [[noreturn]] void reject(const std::string& text) const;  // UsageError
  ReduceOp parse_op(nanobind::handle op) const;
  /// A rank of the group, or a number: what the binding would reject before the call exists.
  int integer(const char* parameter, nanobind::handle value) const;

  /// Runs f without the GIL; Ctrl-C ends it.
  template <class F>
  auto run(F f) const {
    const InterruptibleCall interruptible(&group_);
    const nanobind::gil_scoped_release released;
    return f();
  }

 private:
  const char* operation_;
  std::source_location where_;
  Group group_;
  int n_exceptions_;  ///< uncaught ones when the call began
  detail::Collective collective_;
  mutable std::string reason_;  ///< of a rejection
  Timeout timeout_;
};

/// Seconds as a float or an int, or a datetime.timedelta.
std::chrono::duration<double> seconds_of(nanobind::handle timeout, const ErrorContext& context);

}  // namespace lockstep::python
