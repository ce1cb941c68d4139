#include "nn/python/torch_module.hpp"

PYBIND11_MODULE(_torch, module) {
  module.doc() = "The C++ half of what lockstep adds to torch.";
  lockstep::python::define_backend(module);
  lockstep::python::define_batch_norm(module);
}
