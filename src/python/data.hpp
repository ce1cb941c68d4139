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
/// A tensor of torch with the negative bit, whose memory holds the opposite values, is read as a
/// copy. Throws UsageError through `call` if it has neither, is not C-contiguous, has elements of
/// another type or byte order, or if it is to be written and is read-only or has the negative bit.
/// Needs the GIL, also to be destroyed.
class Data {
 public:
  /// parameter: its name, for errors.
  Data(nanobind::handle object, Access access, const Call& call, const char* parameter = "data");
  Data(const Data&) = delete;
  Data& operator=(const Data&) = delete;

  const Elements& elements() const { return elements_; }
  /// To be called where the elements are written, as torch's own operations in place do: backward
  /// then finds out if a graph has saved them. Nothing if they are not those of a tensor of torch.
  void bump_version() const;

 private:
  void read_buffer(nanobind::handle object, Access access, const Call& call, const char* parameter);
  void read_dlpack(nanobind::handle object, Access access, const Call& call, const char* parameter);

  struct Buffer {
    Py_buffer view{};
    Buffer() = default;
    ~Buffer() { PyBuffer_Release(&view); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
  };

  Buffer buffer_;
  nanobind::object tensor_;  // whose elements they are, if the object has no buffer
  nanobind::ndarray<> writable_;
  nanobind::ndarray<nanobind::ro> readable_;
  bool is_versioned_ = false;  // a tensor of torch, and to be written
  Elements elements_;
};

}  // namespace lockstep::python
