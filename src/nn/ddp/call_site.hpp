#pragma once

#include <fmt/format.h>

#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <source_location>
#include <string>
#include <string_view>
#include <typeinfo>

#include "nn/error.hpp"

namespace lockstep::nn::detail {

/// The operation's name in errors.
inline constexpr const char* kOperation = "DistributedDataParallel";

/// Where DistributedDataParallel communicates, and what its errors say.
struct CallSite {
  /// What errors add. join: a TimeoutError asks whether the ranks have different numbers of
  /// batches; body: a TimeoutError and a MismatchError say that body must not communicate.
  enum class Hint { none, join, body };

  Group group;
  std::source_location where;  // of the last forward or join
  bool is_in_join = false;

  ErrorContext context() const { return context_of(kOperation, group, where); }
  /// Calls f; adds what() and `hint` to the error of a collective, once.
  template <class What, class F>
  void explain(const What& what, const F& f, Hint hint = Hint::none) const;

 private:
  template <class E>
  static void throw_with_note(const Error& error, const std::string& note) {
    if (typeid(error) == typeid(E)) throw E(error.context(), error.text() + note);
  }
};

template <class What, class F>
void CallSite::explain(const What& what, const F& f, Hint hint) const {
  try {
    f();
  } catch (const Error& error) {
    constexpr std::string_view kThis = "\n  This is DistributedDataParallel, ";
    // Its own errors have this context already, and others may have passed here before.
    if (error.context().operation == context().operation ||
        error.text().find(kThis) != std::string::npos) {
      throw;
    }
    const std::string note = fmt::format("{}{}.", kThis, what());
    const char* body_note =
        hint == Hint::body
            ? " Ranks out of data only shadow its forwards and backwards: the body of "
              "join must not communicate by other means (all_reduce, barrier)."
            : "";
    const char* timeout_note = hint == Hint::join && !is_in_join
                                   ? " Do the ranks have different numbers of batches? Then run "
                                     "the training loop in its join()."
                                   : body_note;
    throw_with_note<TimeoutError>(error, note + timeout_note);
    throw_with_note<MismatchError>(error, note + body_note);
    throw_with_note<PeerLost>(error, note);
    throw_with_note<PeerFailed>(error, note);
    throw_with_note<EngineError>(error, note);
    throw;
  }
}

}  // namespace lockstep::nn::detail
