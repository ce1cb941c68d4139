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

/// The parts that are used here of DLPack's exchange of a tensor in C.
struct DlpackManagedTensor {
  std::uint32_t major, minor;
  void* manager_ctx;
  void (*deleter)(DlpackManagedTensor*);
};
struct DlpackExchangeApi {
  std::uint32_t major, minor;
  void* prev_api;
  void* managed_tensor_allocator;
  int (*managed_tensor_from_py_object_no_sync)(void* py_object, DlpackManagedTensor** out);
};

/// Null if the object's type has none of its own: a subclass may have its elements elsewhere.
const DlpackExchangeApi* exchange_api_of(nb::handle object) {
  static PyObject* last = nullptr;  // the last type that was asked
  static const DlpackExchangeApi* api = nullptr;
  PyObject* const type = object.type().ptr();
  if (type == last) return api;
  const nb::object own = nb::handle(type).attr("__dict__").attr("get")("__dlpack_c_exchange_api__");
  api =
      static_cast<const DlpackExchangeApi*>(PyCapsule_GetPointer(own.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) PyErr_Clear();
  if (api != nullptr && api->major != nb::dlpack::major_version) api = nullptr;
  Py_INCREF(type);  // no other type gets its address
  Py_XDECREF(std::exchange(last, type));
  return api;
}

/// What object.__dlpack__(max_version=...) returns, in a tenth of the time (torch: 2.5 us), or the
/// object itself where that is to be called.
nb::object export_by_dlpack(nb::handle object) {
  static constexpr const char* kName = "dltensor_versioned";
  const DlpackExchangeApi* const api = exchange_api_of(object);
  if (api == nullptr) return nb::borrow(object);
  DlpackManagedTensor* tensor = nullptr;
  if (api->managed_tensor_from_py_object_no_sync(object.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return nb::borrow(object);  // it may know more; else the error is the same
  }
  const auto destroy = [](PyObject* capsule) {  // renamed if its tensor was taken
    if (PyCapsule_IsValid(capsule, kName) == 0) return;
    auto* const owned = static_cast<DlpackManagedTensor*>(PyCapsule_GetPointer(capsule, kName));
    owned->deleter(owned);
  };
  PyObject* const capsule = PyCapsule_New(tensor, kName, destroy);
  if (capsule == nullptr) {
    tensor->deleter(tensor);
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

/// As errors call it: "data (list)".
std::string described(const char* parameter, nb::handle object) {
  return fmt::format("{} ({})", parameter, name_of_type(object));
}

[[noreturn]] void reject_dtype(const Call& call, const std::string& name, std::string_view dtype) {
  call.reject(fmt::format("{} has elements of type {}; expected {}, in native byte order", name,
                          dtype, kTypes));
}

/// An attribute that the object may have; null without it.
nb::object attribute(nb::handle object, PyObject* name) {
  PyObject* const value = PyObject_GetAttr(object.ptr(), name);
  if (value == nullptr) PyErr_Clear();
  return nb::steal(value);
}

/// Whether object.method() is true; false without such a method.
bool returns_true(nb::handle object, PyObject* method) {
  const nb::object function = attribute(object, method);
  return function.is_valid() && nb::cast<bool>(function());
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
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  static PyObject* const is_inference = PyUnicode_InternFromString("is_inference");
  // Newer versions of torch export such a tensor through DLPack without an error.
  const nb::object has_gradient = attribute(object, requires_grad);
  if (has_gradient.is_valid() && nb::cast<bool>(has_gradient)) {
    call.reject(fmt::format("{} requires a gradient, which would be lost: pass x.detach()",
                            described(parameter, object)));
  }
  nb::object resolved;
  if (returns_true(object, is_neg)) {
    if (access == Access::write) {
      call.reject(
          fmt::format("{} has the negative bit (as z.conj().imag), so that its memory holds "
                      "the opposite values: pass x.resolve_neg(), and copy the result back",
                      described(parameter, object)));
    }
    resolved = object.attr("resolve_neg")();
    object = resolved;
  }
  const nb::object exported = export_by_dlpack(object);
  const auto take = [&](auto& tensor) {
    if (!nb::try_cast(exported, tensor) || tensor.device_type() != nb::device::cpu::value) {
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
    const nb::object function = attribute(object, is_inference);
    if (function.is_valid() && !nb::cast<bool>(function())) tensor_ = nb::borrow(object);
  } else {
    take(readable_);
  }
}

void Data::bump_version() const {
  if (!tensor_) return;
  static const nb::handle increment =
      nb::object(nb::module_::import_("torch.autograd.graph").attr("increment_version")).release();
  increment(tensor_);
}

}  // namespace lockstep::python
