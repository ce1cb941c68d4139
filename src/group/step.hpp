#pragma once

#include <cstddef>
#include <lockstep/engine.hpp>
#include <vector>

namespace lockstep::internal {

/// The call of the group of which `call` is a step, or a step of a step; or itself.
inline const Call& outermost(const Call& call) {
  const Call* whole = &call;
  while (whole->parent_call != nullptr) whole = whole->parent_call;
  return *whole;
}

/// A step of `call`: the same except for these. Ranks compare both, and report the call itself.
inline Call step_of(const Call& call, Op op, int root) {
  Call step = call;
  step.parent_call = &call;
  step.op = op;
  step.root = root;
  return step;
}

inline Call barrier_of(const Call& call) {
  Call step = step_of(call, Op::barrier, /*root=*/-1);
  step.count = 0;
  step.counts = {};
  return step;
}

/// Every rank's value, in rank order. Throws what all_gather throws.
template <class T>
std::vector<T> gather_values(Engine& engine, const Call& call, const T& mine) {
  std::vector<T> all(static_cast<std::size_t>(engine.size()));
  const std::vector<std::size_t> counts(all.size(), sizeof(T));
  Call gather = call;
  gather.op = Op::all_gather;
  gather.dtype = DType::u8;
  gather.count = sizeof(T);
  gather.in = &mine;
  gather.out = all.data();
  gather.counts = counts;
  engine.run(gather);
  return all;
}

}  // namespace lockstep::internal
