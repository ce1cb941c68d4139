#include "python/call.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <string_view>

#include "python/exceptions.hpp"
#include "python/str.hpp"

namespace nb = nanobind;

namespace lockstep::python {

std::chrono::duration<double> seconds_of(nb::handle timeout, const ErrorContext& context) {
  const nb::object number = nb::hasattr(timeout, "total_seconds") ? timeout.attr("total_seconds")()
                                                                  : nb::borrow<nb::object>(timeout);
  const double seconds = PyFloat_AsDouble(number.ptr());
  if (PyErr_Occurred() != nullptr || std::isnan(seconds)) {
    PyErr_Clear();
    throw UsageError(context,
                     fmt::format("timeout is {}; expected seconds, such as 30 or 0.5, or a "
                                 "datetime.timedelta",
                                 text_of(nb::repr(timeout))));
  }
  return std::chrono::duration<double>(seconds);
}

Call::Call(const char* operation, const Group* group, nb::handle timeout, Timeout default_timeout)
    : operation_(operation),
      where_(python::where()),
      group_(group != nullptr ? *group : default_group(where_)),
      n_exceptions_(std::uncaught_exceptions()),
      collective_(operation, group_, where_),
      timeout_(default_timeout) {
  if (timeout.is_none()) return;
  collective_.run(
      [&] { timeout_ = Timeout(seconds_of(timeout, {.operation = operation, .where = where_})); });
}

Call::~Call() {
  if (std::uncaught_exceptions() == n_exceptions_ || collective_.has_begun()) return;
  collective_.refuse(reason_.empty() ? "it raised an exception before it sent anything" : reason_);
}

int Call::integer(const char* parameter, nb::handle value) const {
  int number = 0;
  if (!nb::try_cast(value, number)) {
    reject(fmt::format("{} is {}; it must be an int", parameter, text_of(nb::repr(value))));
  }
  return number;
}

ErrorContext Call::context() const {
  return {.operation = operation_, .group = group_.name(), .rank = group_.rank(), .where = where_};
}

void Call::reject(const std::string& text) const {
  reason_ = text;
  throw UsageError(context(), text);
}

void Call::reject_type(const std::string& text) const {
  reason_ = text;
  throw UsageTypeError(context(), text);
}

const Group* group_in(nb::handle argument, const char* operation) {
  if (argument.is_none()) return nullptr;
  if (nb::isinstance<Group>(argument)) return nb::inst_ptr<Group>(argument);
  throw UsageTypeError({.operation = operation, .where = where()},
                       fmt::format("group is {}; it must be a lockstep.Group, or None for the "
                                   "default group",
                                   text_of(nb::repr(argument))));
}

void refuse_arguments(const char* operation, nb::handle group, const std::string& text) {
  const Call call(operation, group_in(group, operation), nb::none());
  call.reject_type(text);
}

void refuse_arguments(const char* operation, const std::vector<std::string>& parameters,
                      const nb::args& positional, const nb::kwargs& named, nb::handle group) {
  std::vector<std::string> given;
  for (const nb::handle each : positional) given.push_back(name_of_type(each));
  for (const auto [name, each] : named) given.push_back(text_of(name) + "=" + name_of_type(each));
  nb::object of_call = nb::borrow(group.is_valid() ? group : nb::none());
  if (!group.is_valid()) {
    const auto place =
        static_cast<std::size_t>(std::ranges::find(parameters, "group") - parameters.begin());
    if (place < positional.size()) of_call = positional[place];
    if (named.contains("group")) of_call = named["group"];
  }
  refuse_arguments(operation, of_call,
                   fmt::format("the arguments are ({}); expected ({})", fmt::join(given, ", "),
                               fmt::join(parameters, ", ")));
}

ReduceOp Call::parse_op(nb::handle op) const {
  Py_ssize_t n_bytes = 0;
  const char* const utf8 =
      nb::isinstance<nb::str>(op) ? PyUnicode_AsUTF8AndSize(op.ptr(), &n_bytes) : nullptr;
  if (utf8 == nullptr) {
    PyErr_Clear();
    reject(fmt::format("op is {}; expected a name such as \"sum\"", text_of(nb::repr(op))));
  }
  // The usual spellings without the copies that the others take.
  const std::string_view name{utf8, static_cast<std::size_t>(n_bytes)};
  for (const ReduceOpTraits& known : kReduceOps) {
    if (name == known.name) return known.op;
  }
  try {
    return parse_reduce_op(name);
  } catch (const UsageError& error) {
    reject(error.text());
  }
}

}  // namespace lockstep::python
