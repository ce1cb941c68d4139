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
struct DlpackExchangeApi {
  std::uint32_t major, minor;
  void* prev_api;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* py_object, nb::dlpack::dltensor* out);
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
  const bool is_known = api != nullptr && api->major == nb::dlpack::major_version &&
                        api->dltensor_from_py_object_no_sync != nullptr;
  if (!is_known) api = nullptr;
  Py_INCREF(type);  // no other type gets its address
  Py_XDECREF(std::exchange(last, type));
  return api;
}

/// Where the elements are that object.__dlpack__() would export, in a hundredth of the time
/// (torch: 2.2 us). nullopt where that is to be called: it may know more, else the error is the
/// same.
std::optional<nb::dlpack::dltensor> view_by_dlpack(nb::handle object) {
  const DlpackExchangeApi* const api = exchange_api_of(object);
  nb::dlpack::dltensor view;
  if (api == nullptr) return std::nullopt;
  if (api->dltensor_from_py_object_no_sync(object.ptr(), &view) == 0) return view;
  PyErr_Clear();
  return std::nullopt;
}

/// As errors call it: "data (list)".
std::string described(const char* parameter, nb::handle object) {
  return fmt::format("{} ({})", parameter, name_of_type(object));
}

[[noreturn]] void reject_dtype(const Call& call, const std::string& name, std::string_view dtype) {
  call.reject(fmt::format("{} has elements of type {}; expected {}, in native byte order", name,
                          dtype, kTypes));
}

/// A name that is looked up in each call.
PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

/// What object.method() returns; nullopt without such a method.
std::optional<bool> ask(nb::handle object, PyObject* method) {
  PyObject* arguments[] = {object.ptr()};
  const auto answer =
      nb::steal(PyObject_VectorcallMethod(method, arguments, /*nargsf=*/1, /*kwnames=*/nullptr));
  if (answer.is_valid()) return nb::cast<bool>(answer);
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw nb::python_error();
  PyErr_Clear();
  return std::nullopt;
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
  static PyObject* const requires_grad = interned("requires_grad");
  static PyObject* const is_neg = interned("is_neg");
  // Newer versions of torch export such a tensor through DLPack without an error.
  const auto has_gradient = nb::steal(PyObject_GetAttr(object.ptr(), requires_grad));
  if (!has_gradient.is_valid()) PyErr_Clear();
  if (has_gradient.is_valid() && nb::cast<bool>(has_gradient)) {
    call.reject(fmt::format("{} requires a gradient, which would be lost: pass x.detach()",
                            described(parameter, object)));
  }
  owner_ = nb::borrow(object);
  const std::optional<bool> has_opposite_values = ask(object, is_neg);
  if (has_opposite_values.value_or(false)) {
    if (access == Access::write) {
      call.reject(
          fmt::format("{} has the negative bit (as z.conj().imag), so that its memory holds "
                      "the opposite values: pass x.resolve_neg(), and copy the result back",
                      described(parameter, object)));
    }
    owner_ = object.attr("resolve_neg")();
    object = owner_;
  }
  std::optional<nb::dlpack::dltensor> view = view_by_dlpack(object);
  const auto take = [&view](const auto& array) {
    view = {.data = const_cast<void*>(static_cast<const void*>(array.data())),
            .device = {array.device_type(), array.device_id()},
            .ndim = static_cast<std::int32_t>(array.ndim()),
            .dtype = array.dtype(),
            .shape = const_cast<std::int64_t*>(array.shape_ptr()),
            .strides = const_cast<std::int64_t*>(array.stride_ptr())};
  };
  if (!view && access == Access::write && nb::try_cast(object, writable_)) take(writable_);
  if (!view && access == Access::read && nb::try_cast(object, readable_)) take(readable_);
  if (!view || view->device.device_type != nb::device::cpu::value) {
    call.reject(fmt::format("{} must be a {} CPU tensor: pass x.cpu()",
                            described(parameter, object),
                            access == Access::write ? "writable" : "readable"));
  }
  const auto dtype = dtype_of(view->dtype);
  if (!dtype) {
    reject_dtype(
        call, described(parameter, object),
        nb::hasattr(object, "dtype") ? text_of(nb::repr(object.attr("dtype"))) : "unknown");
  }
  std::int64_t count = 1;
  for (std::int32_t i = 0; i < view->ndim; ++i) count *= view->shape[i];
  std::int64_t expected = 1;
  for (std::int32_t i = view->ndim; i-- > 0;) {
    const std::int64_t extent = view->shape[i];
    const bool is_dense = view->strides == nullptr || view->strides[i] == expected;
    if (extent != 1 && !is_dense && count > 0) reject_layout(call, described(parameter, object));
    expected *= extent;
  }
  elements_ = {.data = static_cast<std::byte*>(view->data) + view->byte_offset,
               .count = static_cast<std::size_t>(count),
               .dtype = *dtype};
  has_version_ = has_opposite_values.has_value();  // so it is a tensor of torch
}

void Data::bump_version() const {
  if (!has_version_) return;
  static const nb::handle increment =
      nb::object(nb::module_::import_("torch.autograd.graph").attr("increment_version")).release();
  try {
    increment(owner_);
  } catch (const nb::python_error&) {
    static PyObject* const is_inference = interned("is_inference");
    if (!ask(owner_, is_inference).value_or(false)) throw;  // those of inference mode have none
  }
}

}  // namespace lockstep::python
