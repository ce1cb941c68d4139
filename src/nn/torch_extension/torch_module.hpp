#pragma once

#include <pybind11/pybind11.h>

#include <exception>

#include "python/core_api.hpp"

namespace lockstep::python {

/// The C++ interface of lockstep._core.
const CoreApi& core();

/// For an error of lockstep that passes through torch's C++ (autograd, a future): one that torch
/// raises as the same class of lockstep.errors instead of a RuntimeError. Others are returned.
std::exception_ptr error_for_torch(std::exception_ptr thrown);

// What each source file adds to lockstep_torch._torch.
void define_backend(pybind11::module_& module);
void define_batch_norm(pybind11::module_& module);
void define_parameters(pybind11::module_& module);

}  // namespace lockstep::python
