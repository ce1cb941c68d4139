#pragma once

#include "protocol.hpp"

namespace lockstep::bench {

/// What bounds lockstep's own times: supports barrier, and all_reduce of f32.
class Limit : public Collectives {
 public:
  void call(const Block& block, void* /*in*/, void* out) final {
    if (block.operation == Operation::barrier) return barrier();
    if (block.operation != Operation::all_reduce || block.type != DType::f32) {
      throw std::runtime_error("does barrier, and all_reduce of f32");
    }
    all_reduce(static_cast<float*>(out), block.count);
  }

 private:
  virtual void all_reduce(float* data, std::size_t count) = 0;
};

}  // namespace lockstep::bench
