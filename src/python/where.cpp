#include "python/where.hpp"

#include <nanobind/nanobind.h>

#include <cstddef>
#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "group/source_place.hpp"
#include "python/str.hpp"

namespace nb = nanobind;

namespace lockstep::python {
namespace {

using Place = internal::SourcePlace;

/// Where a frame is: a code object, and an instruction or, where Python hides that, a line of it.
struct Site {
  const PyObject* code;
  int position;
  friend bool operator==(const Site&, const Site&) = default;
};
struct HashOfSite {
  std::size_t operator()(const Site& site) const noexcept {
    return std::hash<const void*>()(site.code) ^ static_cast<std::size_t>(site.position) << 4U;
  }
};

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
  static auto& paths = *new std::unordered_set<std::string>;  // never destroyed: errors point there
  const nb::object name = code.attr("co_filename");
  const std::string path = nb::isinstance<nb::str>(name) ? text_of(name) : "";
  for (const std::string& folder : library_folders()) {
    if (path.starts_with(folder)) return nullptr;
  }
  const int line = PyFrame_GetLineNumber(frame);
  return new const Place{.file = paths.insert(path).first->c_str(),
                         .line = static_cast<unsigned>(line > 0 ? line : 0)};
}

/// Guarded by the GIL. A code object in it lives on, so that no other gets its address.
const Place* place_of(PyFrameObject* frame) {
  static auto& places = *new std::unordered_map<Site, const Place*, HashOfSite>;
  auto code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  const Site site{.code = code.ptr(), .position = position_in(frame)};
  const auto found = places.find(site);
  if (found != places.end()) return found->second;
  const Place* const place = find_place(code, frame);
  places.emplace(site, place);
  code.release();
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
