#pragma once

#include <exception>

namespace lockstep::python {

/// For an error of lockstep that passes through torch's C++ (autograd, a future): one that torch
/// raises as the same class of lockstep.errors instead of a RuntimeError. Others are returned.
std::exception_ptr error_for_torch(std::exception_ptr thrown);

/// Translates these errors where they pass through pybind11 instead. Needs the GIL.
void register_torch_errors();

}  // namespace lockstep::python
