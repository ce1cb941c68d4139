#include <lockstep/nn/tensor_objects.hpp>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <lockstep/error.hpp>
#include <span>
#include <stdexcept>
#include <vector>

#include "nn/elements/dense.hpp"

/// A tensor in a message: its type (kUndefined ends it); its number of dimensions; its sizes; the
/// number of bytes; the bytes.
namespace lockstep::detail {
namespace {

constexpr std::uint8_t kUndefined = 0xff;

bool is_serialisable(at::ScalarType type) {
  constexpr at::ScalarType kTypes[] = {
      at::kBool, at::kByte,     at::kChar,  at::kShort,  at::kInt,          at::kLong,
      at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble};
  return std::find(std::begin(kTypes), std::end(kTypes), type) != std::end(kTypes);
}

}  // namespace

void save_tensor(Writer& out, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    out(kUndefined);
    return;
  }
  if (tensor.layout() != at::kStrided || !is_serialisable(tensor.scalar_type())) {
    throw UsageError({.operation = "tensor as an object"},
                     fmt::format("expected a dense tensor of bool, integers, floats or complex "
                                 "numbers, got {}: convert it with to_dense() or to()",
                                 tensor.toString()));
  }
  const at::NoGradGuard no_grad;
  const at::Tensor values = nn::dense(tensor.detach().cpu());
  out(static_cast<std::uint8_t>(values.scalar_type()), static_cast<std::uint8_t>(values.dim()));
  for (const std::int64_t size : values.sizes()) out(size);
  out.write_size(values.nbytes());
  out.write(values.data_ptr(), values.nbytes());
}

void load_tensor(Reader& in, at::Tensor& tensor) {
  std::uint8_t code = 0, n_dims = 0;
  in(code);
  if (code == kUndefined) {
    tensor = at::Tensor();
    return;
  }
  const auto type = static_cast<at::ScalarType>(code);
  if (!is_serialisable(type)) throw std::runtime_error(fmt::format("invalid tensor type {}", code));
  in(n_dims);
  std::vector<std::int64_t> sizes(n_dims);
  // Strides must fit too; they count an empty dimension as one element.
  std::int64_t n_elements = 1, n_strides = static_cast<std::int64_t>(c10::elementSize(type));
  for (std::int64_t& size : sizes) {
    in(size);
    const std::int64_t steps = std::max<std::int64_t>(size, 1);
    if (size < 0 || steps > std::numeric_limits<std::int64_t>::max() / n_strides) {
      throw std::runtime_error("invalid tensor sizes");
    }
    n_strides *= steps;
    n_elements *= size;
  }
  const std::uint64_t n_bytes = in.read_size();
  if (n_bytes != static_cast<std::uint64_t>(n_elements) * c10::elementSize(type)) {
    throw std::runtime_error(
        fmt::format("a tensor of {} elements has {} bytes", n_elements, n_bytes));
  }
  at::Tensor read = at::empty(sizes, at::TensorOptions(type));
  in.read(read.data_ptr(), n_bytes);
  if (type == at::kBool) {
    const std::span bytes(static_cast<const std::uint8_t*>(read.data_ptr()), n_bytes);
    if (std::any_of(bytes.begin(), bytes.end(), [](std::uint8_t byte) { return byte > 1; })) {
      throw std::runtime_error("invalid value in a bool tensor");
    }
  }
  tensor = std::move(read);
}

}  // namespace lockstep::detail
