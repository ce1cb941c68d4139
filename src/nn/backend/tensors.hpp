#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <lockstep/error.hpp>
#include <lockstep/types.hpp>
#include <vector>

#include "nn/elements/elements.hpp"
#include "nn/elements/memory_ranges.hpp"

namespace lockstep::backend {

using Tensors = std::vector<at::Tensor>;
using nn::write_back;

/// A tensor's elements, for operations that only move them: of types that lockstep lacks, their
/// bytes. The tensor is contiguous.
Elements elements_of(const at::Tensor& tensor);
/// Of each tensor, as Elements or ConstElements.
template <class E = Elements>
std::vector<E> elements_of_each(const Tensors& tensors) {
  std::vector<E> all;
  all.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) all.push_back(elements_of(tensor));
  return all;
}

/// Elements and what to do with them. Sums of complex numbers are those of their parts; of bool,
/// sum and max are "or", product and min are "and", as NCCL has it.
struct Reduction {
  Elements elements;
  ReduceOp op;
};
/// Throws UsageError where lockstep cannot reduce so.
Reduction reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& op,
                       const ErrorContext& context);

/// The tensor of a list of one. Throws UsageError for others.
const at::Tensor& only(const Tensors& tensors, const ErrorContext& context);

/// `tensor`, or a contiguous copy, for write_back. Throws UsageError unless it is a dense
/// tensor of the CPU.
at::Tensor contiguous(const at::Tensor& tensor, const ErrorContext& context);
/// Throws UsageError if a result cannot be written to it.
void check_output(const at::Tensor& tensor, const ErrorContext& context);
/// Throws UsageError if two of the tensors, which get different results, share memory.
void check_outputs_apart(const Tensors& tensors, const ErrorContext& context);
/// Both of contiguous and check_output.
at::Tensor contiguous_output(const at::Tensor& tensor, const ErrorContext& context);

std::vector<nn::MemoryRange> ranges_of(const Tensors& tensors);
/// `input`, or a copy if a result is written to memory of it.
at::Tensor apart_from(const std::vector<nn::MemoryRange>& outputs, const at::Tensor& input);

/// The memory of tensors, which keeps it.
using Storages = std::vector<c10::Storage>;
Storages storages_of(const Tensors& some, const Tensors& others);

}  // namespace lockstep::backend
