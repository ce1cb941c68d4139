#include "python/core_module.hpp"

#include <string>

#include "python/exceptions.hpp"
#include "python/str.hpp"
#include "python/where.hpp"

namespace nb = nanobind;

NB_MODULE(_core, module) {
  nb::set_leak_warnings(false);  // groups may live as long as the interpreter
  module.doc() = "The C++ half of lockstep.";
  module.attr("__version__") = LOCKSTEP_VERSION;
  const nb::object folder = nb::module_::import_("lockstep").attr("__path__")[nb::int_(0)];
  lockstep::python::add_library_folder(lockstep::python::text_of(folder));
  lockstep::python::register_errors();
  lockstep::python::define_ranks(module);
  lockstep::python::define_arrays(module);
  lockstep::python::define_objects(module);
  lockstep::python::define_api(module);
}
