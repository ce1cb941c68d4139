#pragma once

#include <nanobind/nanobind.h>

#include <lockstep/detail/collective.hpp>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <lockstep/types.hpp>
#include <lockstep/world.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/gil.hpp"
#include "python/interrupts.hpp"
#include "python/where.hpp"

namespace lockstep::python {

/// State common to all functions that communicate: the group, the timeout, and the caller's line.
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
  [[noreturn]] void reject(const std::string& text) const;       // UsageError
  [[noreturn]] void reject_type(const std::string& text) const;  // UsageTypeError
  ReduceOp parse_op(nanobind::handle op) const;
  /// A rank of the group, or a number: what the binding would reject before the call exists.
  int integer(const char* parameter, nanobind::handle value) const;

  /// Runs f without the GIL; Ctrl-C ends it.
  template <class F>
  auto run(F f) const {
    const InterruptibleCall interruptible(&group_);
    const GilReleased released;
    return f();
  }

 private:
  ErrorContext context() const;

  const char* operation_;
  std::source_location where_;
  Group group_;
  int n_exceptions_;  ///< uncaught ones when the call began
  detail::Collective collective_;
  mutable std::string reason_;  ///< of a rejection
  Timeout timeout_;
};

/// The Group of an argument; null for None, the default group. Throws UsageTypeError if it is not a
/// group: such a call is not counted as refused on any group.
const Group* group_in(nanobind::handle argument, const char* operation);

/// Counts a call whose arguments do not fit the parameters, and throws UsageTypeError.
[[noreturn]] void refuse_arguments(const char* operation, nanobind::handle group,
                                   const std::string& text);
/// The same for a function of Python: its positional and named arguments.
[[noreturn]] void refuse_arguments(const char* operation,
                                   const std::vector<std::string>& parameters,
                                   const nanobind::args& positional, const nanobind::kwargs& named,
                                   nanobind::handle group);

/// Defines an operation in a module or as a method of Group. Arguments that nanobind rejects,
/// because of their number, names or types, make a refused call. `extra`: a nanobind::arg for each
/// parameter, and the docstring.
template <class Scope, class F, class... Extra>
void define_operation(Scope& scope, const char* name, F&& f, const Extra&... extra) {
  std::vector<std::string> parameters;
  const char* doc = "";
  const auto read = [&](const auto& each) {
    if constexpr (std::is_convertible_v<decltype(each), const char*>) {
      doc = each;
    } else {
      parameters.emplace_back(each.name_);
    }
  };
  (read(extra), ...);
  scope.def(name, std::forward<F>(f), extra...);
  // nanobind tries it next, without cost for calls that the first takes.
  if constexpr (std::is_same_v<Scope, nanobind::module_>) {
    scope.def(
        name,
        [name, parameters](const nanobind::args& positional, const nanobind::kwargs& named) {
          refuse_arguments(name, parameters, positional, named, nanobind::handle());
        },
        doc);
  } else {
    scope.def(
        name,
        [name, parameters](nanobind::handle self, const nanobind::args& positional,
                           const nanobind::kwargs& named) {
          refuse_arguments(name, parameters, positional, named, self);
        },
        doc);
  }
}

/// Seconds as a float or an int, or a datetime.timedelta.
std::chrono::duration<double> seconds_of(nanobind::handle timeout, const ErrorContext& context);

}  // namespace lockstep::python
