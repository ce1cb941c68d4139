#pragma once

#include <ATen/ATen.h>

#include <lockstep/error.hpp>
#include <typeinfo>

#include "nn/ddp/reducer.hpp"
#include "nn/error.hpp"

/// Shared by the source files of the Reducer.
namespace lockstep::nn::detail {

/// What errors call it.
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
    // The Reducer's own errors have this context already.
    if (error.context().operation == context().operation) throw;
    const std::string note = "\n  This is DistributedDataParallel, " + what() + ".";
    throw_with_note<TimeoutError>(
        error, note + (hint == Hint::none || joining_
                           ? ""
                           : " Do the ranks have different numbers of batches? Then run the "
                             "training loop in its join()."));
    throw_with_note<MismatchError>(error, note);
    throw_with_note<PeerLost>(error, note);
    throw_with_note<PeerFailed>(error, note);
    throw_with_note<EngineError>(error, note);
    throw;
  }
}

}  // namespace lockstep::nn::detail
