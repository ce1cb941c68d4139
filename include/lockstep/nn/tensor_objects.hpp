#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>

#include <lockstep/detail/codec.hpp>
#include <lockstep/objects.hpp>

/// @file
/// Tensors as objects, alone or in any container that objects.hpp accepts:
///
///     auto predictions = lockstep::collect_results(std::vector<at::Tensor>{...}, size);
///
/// A tensor arrives contiguous, on the CPU, with its type and sizes; an undefined one undefined.
/// Autograd state is not transferred. Ranks may have tensors of different sizes and types. The
/// sending rank throws UsageError for a sparse, quantised or other tensor that is not a dense array
/// of bool, integers, floats or complex numbers.
namespace lockstep::detail {

void save_tensor(Writer& out, const at::Tensor& tensor);
void load_tensor(Reader& in, at::Tensor& tensor);

// Templates, because other types convert to a tensor implicitly.
template <std::same_as<at::Tensor> T>
void CEREAL_SAVE_FUNCTION_NAME(Writer& out, const T& value) {
  save_tensor(out, value);
}
template <std::same_as<at::Tensor> T>
void CEREAL_LOAD_FUNCTION_NAME(Reader& in, T& value) {
  load_tensor(in, value);
}

}  // namespace lockstep::detail
