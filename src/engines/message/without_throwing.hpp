#pragma once

#include <new>

namespace lockstep::message {

/// A function of a module that allocates: an exception must not leave the module. kNoMemory: what
/// it returns then.
template <auto kFunction, int kNoMemory>
struct WithoutThrowing;
template <class... Args, int (*kFunction)(Args...), int kNoMemory>
struct WithoutThrowing<kFunction, kNoMemory> {
  static int call(Args... args) noexcept {
    try {
      return kFunction(args...);
    } catch (const std::bad_alloc&) {
      return kNoMemory;
    }
  }
};

}  // namespace lockstep::message
