#pragma once

#include <lockstep/engine.hpp>

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

}  // namespace lockstep::internal
