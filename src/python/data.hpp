#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <lockstep/types.hpp>
#include <string>

#include "python/call.hpp"

namespace lockstep::python {

enum class Access : std::uint8_t { read, write };

/// The elements of a Python object, which it holds: one with the buffer protocol (numpy.ndarray,
/// bytearray, array.array, memoryview) or, if it has none, with DLPack on the CPU (torch.Tensor).
/// Throws UsageError through `call` if it has neither, is not C-contiguous, has elements of another
/// type or byte order, or is read-only and to be written. Needs the GIL, also to be destroyed.
class Data {
 public:
  /// parameter: its name, for errors.
  Data(nanobind::handle object, Access access, const Call& call, const char* parameter = "data");
  Data(const Data&) = delete;
  Data& operator=(const Data&) = delete;

  const Elements& elements() const { return elements_; }

 private:
  void take_buffer(nanobind::handle object, Access access, const Call& call, const char* parameter);
  void take_tensor(nanobind::handle object, Access access, const Call& call, const char* parameter);

  struct Buffer {
    Py_buffer view{};
    Buffer() = default;
    ~Buffer() { PyBuffer_Release(&view); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
  };

  Buffer buffer_;
  nanobind::ndarray<> writable_;
  nanobind::ndarray<nanobind::ro> readable_;
  Elements elements_;
};

}  // namespace lockstep::python
