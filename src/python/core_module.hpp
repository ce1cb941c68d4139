#pragma once

#include <nanobind/nanobind.h>

/// The parts of the module lockstep._core. The Python half is python/lockstep/.
namespace lockstep::python {

void define_ranks(nanobind::module_& module);    // init_dist, Group, ...
void define_arrays(nanobind::module_& module);   // all_reduce, all_gather, ...
void define_objects(nanobind::module_& module);  // pickled, and dicts
void define_api(nanobind::module_& module);      // for lockstep_torch._torch

}  // namespace lockstep::python
