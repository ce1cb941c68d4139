#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>

namespace lockstep::python {

/// The UTF-8 of a str, with its nulls; distinct texts stay distinct, also with lone surrogates,
/// whose bytes are not valid UTF-8.
inline std::string text_of(nanobind::handle str) {
  Py_ssize_t n_bytes = 0;
  if (const char* const utf8 = PyUnicode_AsUTF8AndSize(str.ptr(), &n_bytes)) {
    return {utf8, static_cast<std::size_t>(n_bytes)};
  }
  PyErr_Clear();
  const auto bytes = nanobind::steal<nanobind::bytes>(
      PyUnicode_AsEncodedString(str.ptr(), "utf-8", "surrogatepass"));
  if (!bytes.is_valid()) throw nanobind::python_error();
  return {bytes.c_str(), bytes.size()};
}

inline std::string name_of_type(nanobind::handle object) {
  return text_of(object.type().attr("__name__"));
}

/// A str of any bytes: invalid UTF-8 is replaced.
inline nanobind::object str_of(std::string_view text) {
  auto str = nanobind::steal<nanobind::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  if (!str.is_valid()) throw nanobind::python_error();
  return str;
}

}  // namespace lockstep::python
