#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <lockstep/error.hpp>
#include <string_view>
#include <typeinfo>

#include "nn/ddp/reducer.hpp"
#include "nn/error.hpp"

/// Shared by the source files of the Reducer.
namespace lockstep::nn::detail {

/// The operation's name in errors.
inline constexpr const char* kOperation = "DistributedDataParallel";

/// A tensor over part of a bucket, not a view: optimizers detach gradients in place.
inline at::Tensor slice_of(const SharedBuffer& memory, std::size_t offset_bytes,
                           at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  return at::from_blob(
      memory.data() + offset_bytes, sizes, strides, [memory](void*) {}, at::TensorOptions(type));
}

template <class E>
void throw_with_note(const Error& error, const std::string& note) {
  if (typeid(error) == typeid(E)) throw E(error.context(), error.text() + note);
}

template <class F>
void Reducer::explain(const std::function<std::string()>& what, const F& f, Hint hint) const {
  try {
    f();
  } catch (const Error& error) {
    constexpr std::string_view kThis = "\n  This is DistributedDataParallel, ";
    // The Reducer's own errors have this context already, and others may have passed here before.
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
    const char* timeout_note = hint == Hint::join && !join_
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
