#include "python/core_api.hpp"

#include <nanobind/nanobind.h>

#include "python/core_module.hpp"
#include "python/exceptions.hpp"
#include "python/interrupts.hpp"
#include "python/where.hpp"

namespace nb = nanobind;

namespace lockstep::python {

void define_api(nb::module_& module) {
  static constexpr CoreApi kApi{
      .where = where,
      .add_folder = [](const char* folder) { add_library_folder(folder); },
      .raise = raise_error,
      .class_of = class_of_error,
      .begin_call = begin_call,
      .end_call = end_call,
      .watch_interrupts = watch_interrupts,
      .group_of = [](PyObject* object) -> const Group* {
        return nb::isinstance<Group>(object) ? nb::inst_ptr<Group>(object) : nullptr;
      },
  };
  module.attr("_api") = nb::capsule(&kApi, kCoreApi);
  // Before it loads the other extension, lockstep._extension compares it with that one's.
  module.attr("_binary_interface") = LOCKSTEP_BINARY_INTERFACE;
}

}  // namespace lockstep::python
