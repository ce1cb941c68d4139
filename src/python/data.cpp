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

/// The parts that are used here of DLPack's exchange of a tensor in C.
struct DlpackExchangeApi {
  std::uint32_t major, minor;
  void* prev_api;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* py_object, nb::dlpack::dltensor* out);
};

/// Of torch.Tensor; null for any other type. A subclass may override __dlpack__, and types of other
/// libraries may have read-only tensors, which a dltensor does not tell.
const DlpackExchangeApi* exchange_api_of(nb::handle type) {
  const nb::object module = nb::getattr(type, "__module__", nb::none());
  const nb::object name = nb::getattr(type, "__name__", nb::none());
  if (!nb::str("torch").equal(module) || !nb::str("Tensor").equal(name)) return nullptr;
  constexpr const char* kName = "dlpack_exchange_api";
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), kName) == 0) return nullptr;
  const auto* const api =
      static_cast<const DlpackExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), kName));
  const bool is_known =
      api->major == nb::dlpack::major_version && api->dltensor_from_py_object_no_sync != nullptr;
  return is_known ? api : nullptr;
}

/// What depends on an object's type alone.
struct TypeFacts {
  bool is_masked = false;  ///< numpy.ma.MaskedArray: its buffer would be taken without the mask
  const DlpackExchangeApi* api = nullptr;
};

TypeFacts facts_of_type(nb::handle object) {
  static PyObject* last = nullptr;  // the last type that was looked up
  static TypeFacts facts;
  const nb::handle type = object.type();
  if (type.ptr() == last) return facts;
  const TypeFacts found{.is_masked = PyObject_HasAttrString(type.ptr(), "harden_mask") != 0,
                        .api = exchange_api_of(type)};
  Py_INCREF(type.ptr());  // no other type gets its address
  Py_XDECREF(std::exchange(last, type.ptr()));
  facts = found;
  return found;
}

/// Sets `view` to a tensor of torch, which goes on to own its memory, without the 2.2 us of
/// torch.Tensor.__dlpack__. False if this torch cannot; then __dlpack__ may, or gives the error.
bool view_tensor(nb::handle object, nb::dlpack::dltensor& view) {
  const DlpackExchangeApi* const api = facts_of_type(object).api;
  if (api == nullptr) return false;
  if (api->dltensor_from_py_object_no_sync(object.ptr(), &view) == 0) return true;
  PyErr_Clear();
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

/// Never freed.
PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

bool is_true(nb::handle object) {
  const int result = PyObject_IsTrue(object.ptr());
  if (result < 0) throw nb::python_error();
  return result != 0;
}

/// Null if the object has none.
nb::object attribute(nb::handle object, PyObject* name) {
  PyObject* const value = PyObject_GetAttr(object.ptr(), name);
  if (value == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw nb::python_error();
    PyErr_Clear();
  }
  return nb::steal(value);
}

/// What object.method() returns; nullopt without such a method.
std::optional<bool> ask(nb::handle object, PyObject* method) {
  PyObject* arguments[] = {object.ptr()};
  const auto answer =
      nb::steal(PyObject_VectorcallMethod(method, arguments, /*nargsf=*/1, /*kwnames=*/nullptr));
  if (answer.is_valid()) return is_true(answer);
  nb::python_error error;
  // An AttributeError may also come from within the method.
  if (!error.matches(PyExc_AttributeError) || PyObject_HasAttr(object.ptr(), method) != 0) {
    throw error;
  }
  return std::nullopt;
}

/// Whether torch exports elements of less than a byte (int4) as such bytes.
bool is_less_than_a_byte(DType dtype, nb::handle type) {
  if (!type.is_valid() || (dtype != DType::i8 && dtype != DType::u8)) return false;
  const std::string name = text_of(nb::repr(type));
  return name.starts_with("torch.") && !name.ends_with("int8");
}

[[noreturn]] void reject_layout(const Call& call, const std::string& name) {
  call.reject(
      fmt::format("{} is not C-contiguous: pass a contiguous copy (numpy.ascontiguousarray(x), "
                  "x.contiguous()), and copy the result back if one is written",
                  name));
}

std::size_t count_of(const nb::dlpack::dltensor& view) {
  std::size_t count = 1;
  for (std::int32_t i = 0; i < view.ndim; ++i) count *= static_cast<std::size_t>(view.shape[i]);
  return count;
}

bool is_contiguous(const nb::dlpack::dltensor& view) {
  if (view.strides == nullptr || count_of(view) == 0) return true;
  std::int64_t expected = 1;
  for (std::int32_t i = view.ndim; i-- > 0;) {
    if (view.shape[i] != 1 && view.strides[i] != expected) return false;
    expected *= view.shape[i];
  }
  return true;
}

}  // namespace

Data::Data(nb::handle object, Access access, const Call& call, const char* parameter) {
  if (facts_of_type(object).is_masked) {
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
  if (!dtype) {
    const nb::object of_numpy = nb::getattr(object, "dtype", nb::none());
    reject_dtype(call, described(parameter, object),
                 of_numpy.is_none() ? fmt::format("'{}' (struct module)", format)
                                    : text_of(nb::str(nb::handle(of_numpy))));
  }
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
  static PyObject* const is_inference = interned("is_inference");
  const bool writes = access == Access::write;
  // Newer versions of torch export such a tensor through DLPack without an error.
  const nb::object has_gradient = attribute(object, requires_grad);
  if (has_gradient.is_valid() && is_true(has_gradient)) {
    call.reject(fmt::format("{} requires a gradient, which would be lost: pass x.detach()",
                            described(parameter, object)));
  }
  tensor_ = nb::borrow(object);
  if (ask(object, is_neg).value_or(false)) {
    if (writes) {
      call.reject(
          fmt::format("{} has the negative bit (as z.conj().imag), so that its memory holds "
                      "the opposite values: pass x.resolve_neg(), and copy the result back",
                      described(parameter, object)));
    }
    tensor_ = object.attr("resolve_neg")();
  }
  nb::dlpack::dltensor view;
  const auto import_as = [this, &view](auto& array) {
    if (!nb::try_cast(tensor_, array)) return false;
    view = {.data = const_cast<void*>(static_cast<const void*>(array.data())),
            .device = {array.device_type(), array.device_id()},
            .ndim = static_cast<std::int32_t>(array.ndim()),
            .dtype = array.dtype(),
            .shape = const_cast<std::int64_t*>(array.shape_ptr()),
            .strides = const_cast<std::int64_t*>(array.stride_ptr())};
    return true;
  };
  const bool has_view =
      view_tensor(tensor_, view) || (writes ? import_as(writable_) : import_as(readable_));
  if (!has_view || view.device.device_type != nb::device::cpu::value) {
    call.reject(fmt::format("{} must be a {} CPU tensor: pass x.cpu()",
                            described(parameter, object), writes ? "writable" : "readable"));
  }
  static PyObject* const dtype_name = interned("dtype");
  const nb::object type = attribute(object, dtype_name);
  const auto dtype = dtype_of(view.dtype);
  if (!dtype || is_less_than_a_byte(*dtype, type)) {
    reject_dtype(call, described(parameter, object),
                 type.is_valid() ? text_of(nb::repr(type)) : "unknown");
  }
  if (!is_contiguous(view)) reject_layout(call, described(parameter, object));
  elements_ = {.data = static_cast<std::byte*>(view.data) + view.byte_offset,
               .count = count_of(view),
               .dtype = *dtype};
  // Tensors of other libraries, and those of inference mode, have no version.
  is_versioned_ = writes && !ask(object, is_inference).value_or(true);
}

void Data::bump_version() const {
  if (!is_versioned_) return;
  // Not initialised as a static: the import may release the GIL, and another thread then waits.
  static nb::handle increment;
  if (!increment.is_valid()) {
    const auto module = nb::module_::import_("torch.autograd.graph");
    increment = nb::object(module.attr("increment_version")).release();
  }
  increment(tensor_);
}

}  // namespace lockstep::python
