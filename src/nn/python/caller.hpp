#pragma once

#include <lockstep/group.hpp>
#include <source_location>

#include "python/core_api.hpp"

namespace lockstep::python {

/// Of lockstep._core.
const CoreApi& core();

/// The caller's line of Python. Takes the GIL.
std::source_location python_line();

/// Without the GIL, if this thread holds it: other threads may need it to end.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_ = nullptr;
};

/// A call on `group` by this thread, which Ctrl-C ends. Takes the GIL when it begins and ends.
class CallOfPython {
 public:
  explicit CallOfPython(const Group& group);
  ~CallOfPython();
  CallOfPython(const CallOfPython&) = delete;
  CallOfPython& operator=(const CallOfPython&) = delete;

  std::source_location where() const { return where_; }

 private:
  const Group* before_ = nullptr;
  std::source_location where_;
};

}  // namespace lockstep::python
