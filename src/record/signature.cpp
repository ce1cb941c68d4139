#include "record/signature.hpp"

namespace lockstep::internal {

bool has_root(Op op) noexcept {
  switch (op) {
    case Op::reduce:
    case Op::broadcast:
    case Op::gather:
    case Op::scatter:
    case Op::send:
    case Op::recv: return true;
    case Op::barrier:
    case Op::all_reduce:
    case Op::all_gather:
    case Op::reduce_scatter:
    case Op::all_to_all:
    case Op::split:
    case Op::allocate: return false;
  }
  return false;
}

bool has_reduction(Op op) noexcept {
  return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter;
}

}  // namespace lockstep::internal
