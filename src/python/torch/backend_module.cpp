#include <lockstep/group.hpp>

#include "python/torch/torch_module.hpp"

namespace lockstep::python {

void define_backend(pybind11::module_& module) {
  module.def("solo_size", [] { return Group().size(); });
}

}  // namespace lockstep::python
