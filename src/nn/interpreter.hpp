#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <lockstep/group.hpp>
#include <source_location>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace lockstep::nn {

/// What layers and the backend of c10d take from the language of the program. The defaults are
/// those of C++.
struct Interpreter {
  struct Gloo {
    const c10::intrusive_ptr<c10d::Store>& store;
    int rank;
    int size;
    std::chrono::milliseconds timeout;
    bool is_on_one_host;
  };

  /// The caller's line.
  std::source_location (*where)() = [] { return std::source_location(); };
  /// This thread begins a call on `group`; until end_call(*before), an interrupt (Ctrl-C) ends that
  /// call. *before: the group of the enclosing call, null if there is none. Returns the caller's
  /// line. Throws if an interrupt has already come.
  std::source_location (*begin_call)(const Group& group, const Group** before) =
      [](const Group&, const Group**) { return std::source_location(); };
  void (*end_call)(const Group* before) = [](const Group*) {};
  /// From now on interrupts end calls of the main thread.
  void (*watch_interrupts)() = [] {};
  /// Releases the interpreter's lock (GIL) if this thread holds it, because threads for which it
  /// waits may need that lock. The result goes to reacquire.
  void* (*release)() = []() -> void* { return nullptr; };
  void (*reacquire)(void* released) = [](void*) {};
  /// Makes a ProcessGroupGloo, whose headers PyTorch's package lacks. Null in C++.
  c10::intrusive_ptr<c10d::Backend> (*make_gloo)(const Gloo& gloo) = nullptr;
};

/// Of this process. Set it before the first layer or backend is made.
const Interpreter& interpreter() noexcept;
void set_interpreter(const Interpreter& interpreter) noexcept;

/// Without the interpreter's lock.
class Released {
 public:
  Released() : state_(interpreter().release()) {}
  ~Released() { interpreter().reacquire(state_); }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  void* state_;
};

/// begin_call and end_call.
class InterruptibleCall {
 public:
  explicit InterruptibleCall(const Group& group)
      : where_(interpreter().begin_call(group, &before_)) {}
  ~InterruptibleCall() { interpreter().end_call(before_); }
  InterruptibleCall(const InterruptibleCall&) = delete;
  InterruptibleCall& operator=(const InterruptibleCall&) = delete;

  std::source_location where() const { return where_; }

 private:
  const Group* before_ = nullptr;
  std::source_location where_;
};

}  // namespace lockstep::nn
