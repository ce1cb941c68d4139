#include "python/data.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "python/str.hpp"

namespace nb = nanobind;

namespace lockstep::python {
namespace {

constexpr std::string_view kTypes =
    "bool, integers of 8 to 64 bits, float16, bfloat16 (tensors), float32 and float64";

std::optional<DType> integer(bool is_signed, std::size_t n_bytes) {
  switch (n_bytes) {
    case 1: return is_signed ? DType::i8 : DType::u8;
    case 2: return is_signed ? DType::i16 : DType::u16;
    case 4: return is_signed ? DType::i32 : DType::u32;
    case 8: return is_signed ? DType::i64 : DType::u64;
    default: return std::nullopt;
  }
}

/// The element type of a format of the struct module.
std::optional<DType> dtype_of(std::string_view format, std::size_t n_bytes) {
  static_assert(std::endian::native == std::endian::little);
  if (!format.empty() && std::string_view("@=<").find(format.front()) != std::string_view::npos)
    format.remove_prefix(1);
  if (format.size() != 1) return std::nullopt;
  switch (format.front()) {
    case '?': return n_bytes == 1 ? std::optional(DType::boolean) : std::nullopt;
    case 'e': return DType::f16;
    case 'f': return DType::f32;
    case 'd': return DType::f64;
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
    case 'n': return integer(/*is_signed=*/true, n_bytes);
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
    case 'N': return integer(/*is_signed=*/false, n_bytes);
    default: return std::nullopt;
  }
}

std::optional<DType> dtype_of(nb::dlpack::dtype dtype) {
  if (dtype.lanes != 1) return std::nullopt;
  const std::size_t n_bytes = dtype.bits / 8U;
  switch (static_cast<nb::dlpack::dtype_code>(dtype.code)) {
    case nb::dlpack::dtype_code::Int: return integer(/*is_signed=*/true, n_bytes);
    case nb::dlpack::dtype_code::UInt: return integer(/*is_signed=*/false, n_bytes);
    case nb::dlpack::dtype_code::Bool: return DType::boolean;
    case nb::dlpack::dtype_code::Bfloat: return DType::bf16;
    case nb::dlpack::dtype_code::Float:
      if (n_bytes == 2) return DType::f16;
      if (n_bytes == 4) return DType::f32;
      if (n_bytes == 8) return DType::f64;
      return std::nullopt;
    default: return std::nullopt;
  }
}

std::string text_of_current_error() {
  const nb::python_error error;
  return text_of(nb::str(error.value()));
}

/// numpy.ma.MaskedArray: its buffer would be taken without the mask.
bool is_masked(nb::handle object) {
  static PyObject* last = nullptr;  // the last type found not to be masked, to look it up once
  PyObject* const type = object.type().ptr();
  if (type == last) return false;
  if (PyObject_HasAttrString(type, "harden_mask") != 0) return true;
  Py_INCREF(type);  // no other type gets its address
  Py_XDECREF(std::exchange(last, type));
  return false;
}

/// As errors call it: "data (list)".
std::string described(const char* parameter, nb::handle object) {
  return fmt::format("{} ({})", parameter, name_of_type(object));
}

[[noreturn]] void reject_dtype(const Call& call, const std::string& name, std::string_view dtype) {
  call.reject(fmt::format("{} has elements of type {}; expected {}, in native byte order", name,
                          dtype, kTypes));
}

/// Whether object.method() is true; false without such a method.
bool returns_true(nb::handle object, const char* method) {
  return nb::hasattr(object, method) && nb::cast<bool>(object.attr(method)());
}

[[noreturn]] void reject_layout(const Call& call, const std::string& name) {
  call.reject(
      fmt::format("{} is not C-contiguous: pass a contiguous copy (numpy.ascontiguousarray(x), "
                  "x.contiguous()), and copy the result back if one is written",
                  name));
}

}  // namespace

Data::Data(nb::handle object, Access access, const Call& call, const char* parameter) {
  if (is_masked(object)) {
    call.reject(fmt::format("{} has a mask, which would be lost: pass x.data or x.filled()",
                            described(parameter, object)));
  }
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    read_buffer(object, access, call, parameter);
  } else if (nb::hasattr(object, "__dlpack__")) {
    read_dlpack(object, access, call, parameter);
  } else {
    call.reject(
        fmt::format("{} has neither the buffer protocol nor DLPack: pass a numpy array or a "
                    "tensor; for other objects use all_gather_object, gather_object or "
                    "broadcast_object_list",
                    described(parameter, object)));
  }
}

void Data::read_buffer(nb::handle object, Access access, const Call& call, const char* parameter) {
  Py_buffer& view = buffer_.view;
  if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    const std::string text = text_of_current_error();
    call.reject(fmt::format("{} cannot export a buffer: {}", described(parameter, object), text));
  }
  const auto n_bytes = static_cast<std::size_t>(view.itemsize);
  const std::string_view format = view.format == nullptr ? "B" : view.format;
  const auto dtype = dtype_of(format, n_bytes);
  if (!dtype)
    reject_dtype(call, described(parameter, object), fmt::format("'{}' (struct module)", format));
  if (access == Access::write && view.readonly != 0) {
    call.reject(fmt::format("{} is read-only, and the result is written to it",
                            described(parameter, object)));
  }
  if (PyBuffer_IsContiguous(&view, 'C') == 0) reject_layout(call, described(parameter, object));
  elements_ = {
      .data = view.buf, .count = static_cast<std::size_t>(view.len) / n_bytes, .dtype = *dtype};
}

void Data::read_dlpack(nb::handle object, Access access, const Call& call, const char* parameter) {
  // Newer versions of torch export such a tensor through DLPack without an error.
  if (nb::hasattr(object, "requires_grad") && nb::cast<bool>(object.attr("requires_grad"))) {
    call.reject(fmt::format("{} requires a gradient, which would be lost: pass x.detach()",
                            described(parameter, object)));
  }
  nb::object resolved;
  if (returns_true(object, "is_neg")) {
    if (access == Access::write) {
      call.reject(
          fmt::format("{} has the negative bit (as z.conj().imag), so that its memory holds "
                      "the opposite values: pass x.resolve_neg(), and copy the result back",
                      described(parameter, object)));
    }
    resolved = object.attr("resolve_neg")();
    object = resolved;
  }
  const auto take = [&](auto& tensor) {
    if (!nb::try_cast(object, tensor) || tensor.device_type() != nb::device::cpu::value) {
      call.reject(fmt::format("{} must be a {} CPU tensor: pass x.cpu()",
                              described(parameter, object),
                              access == Access::write ? "writable" : "readable"));
    }
    const auto dtype = dtype_of(tensor.dtype());
    if (!dtype) {
      reject_dtype(
          call, described(parameter, object),
          nb::hasattr(object, "dtype") ? text_of(nb::repr(object.attr("dtype"))) : "unknown");
    }
    std::int64_t expected = 1;
    for (std::size_t i = tensor.ndim(); i-- > 0;) {
      const auto extent = static_cast<std::int64_t>(tensor.shape(i));
      if (extent != 1 && tensor.stride(i) != expected && tensor.size() > 0) {
        reject_layout(call, described(parameter, object));
      }
      expected *= extent;
    }
    elements_ = {.data = const_cast<void*>(static_cast<const void*>(tensor.data())),
                 .count = tensor.size(),
                 .dtype = *dtype};
  };
  if (access == Access::write) {
    take(writable_);
    // Tensors of other libraries, and those of inference mode, have no version.
    if (nb::hasattr(object, "is_inference") && !returns_true(object, "is_inference")) {
      tensor_ = nb::borrow<nb::object>(object);
    }
  } else {
    take(readable_);
  }
}

void Data::bump_version() const {
  if (!tensor_) return;
  nb::module_::import_("torch.autograd.graph").attr("increment_version")(tensor_);
}

}  // namespace lockstep::python
