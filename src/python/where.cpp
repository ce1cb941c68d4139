#include "python/where.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "group/source_place.hpp"
#include "python/str.hpp"

namespace nb = nanobind;

namespace lockstep::python {
namespace {

using Place = internal::SourcePlace;

int position_in(PyFrameObject* frame) {
#if defined(Py_LIMITED_API) || PY_VERSION_HEX < 0x030B0000
  return PyFrame_GetLineNumber(frame);
#else
  return PyFrame_GetLasti(frame);  // the line is decoded once, as it takes long in a large function
#endif
}

nb::object caller_of(PyFrameObject* frame) {
#ifdef Py_LIMITED_API
  return nb::handle(reinterpret_cast<PyObject*>(frame)).attr("f_back");
#else
  return nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(frame)));
#endif
}

std::vector<std::string>& library_folders() {
  static auto& folders = *new std::vector<std::string>;
  return folders;
}

/// Null for a frame of the library folders.
const Place* find_place(nb::handle code, PyFrameObject* frame) {
  static auto& places =
      *new std::map<std::pair<std::string, unsigned>, Place>;  // errors point there
  const nb::object name = code.attr("co_filename");
  const std::string path = nb::isinstance<nb::str>(name) ? text_of(name) : "";
  for (const std::string& folder : library_folders()) {
    if (path.starts_with(folder)) return nullptr;
  }
  const int line = PyFrame_GetLineNumber(frame);
  const auto [place, is_new] =
      places.try_emplace({path, static_cast<unsigned>(line > 0 ? line : 0)});
  if (is_new) place->second = {.file = place->first.first.c_str(), .line = place->first.second};
  return &place->second;
}

/// The places of a code object: by instruction or, where Python hides that, by line.
struct Code {
  nb::object reference;  // weak; its callback is on_code_end
  std::unordered_map<int, const Place*> places;
};
/// Guarded by the GIL.
std::unordered_map<const PyObject*, Code>& known_codes() {
  static auto& codes = *new std::unordered_map<const PyObject*, Code>;
  return codes;
}

/// Another code object may get the address.
PyObject* on_code_end(PyObject* /*self*/, PyObject* reference) {
  auto& codes = known_codes();
  const auto ended = std::ranges::find_if(
      codes, [&](const auto& code) { return code.second.reference.ptr() == reference; });
  if (ended != codes.end()) codes.erase(ended);
  Py_RETURN_NONE;
}

nb::object weak_reference_to(nb::handle code) {
  static PyMethodDef definition{"on_code_end", on_code_end, METH_O, nullptr};
  static PyObject* const callback = PyCFunction_NewEx(&definition, nullptr, nullptr);
  nb::object reference = nb::steal(PyWeakref_NewRef(code.ptr(), callback));
  if (!reference.is_valid()) throw nb::python_error();
  return reference;
}

const Place* place_of(PyFrameObject* frame) {
  const auto code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  const int position = position_in(frame);
  const auto known = known_codes().find(code.ptr());
  const bool is_known = known != known_codes().end();
  if (is_known) {
    const auto found = known->second.places.find(position);
    if (found != known->second.places.end()) return found->second;
  }
  const Place* const place = find_place(code, frame);
  nb::object reference = is_known ? nb::object() : weak_reference_to(code);
  Code& of_code = known_codes()[code.ptr()];
  if (reference.is_valid()) of_code.reference = std::move(reference);
  of_code.places.emplace(position, place);
  return place;
}

}  // namespace

void add_library_folder(const std::string& folder) { library_folders().push_back(folder + "/"); }

std::source_location where() {
  auto frame = nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame.is_valid() && !frame.is_none()) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    if (const Place* const place = place_of(raw)) {
      return internal::location_of(*place);
    }
    frame = caller_of(raw);
  }
  return {};
}

}  // namespace lockstep::python
