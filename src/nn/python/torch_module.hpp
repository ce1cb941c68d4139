#pragma once

#include <pybind11/pybind11.h>

namespace lockstep::python {

// What each source file adds to lockstep._torch.
void define_backend(pybind11::module_& module);
void define_batch_norm(pybind11::module_& module);

}  // namespace lockstep::python
