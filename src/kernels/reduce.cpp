#include "kernels/reduce.hpp"

#include <cstring>

#include "kernels/reduce_isa.hpp"

namespace lockstep::kernels {

const ReduceTable& reduce_table(Isa isa) {
  switch (isa) {
    case Isa::scalar: break;
#if defined(__x86_64__)
    case Isa::avx2: return avx2::kReduceTable;
    case Isa::avx512: return avx512::kReduceTable;
#else
    case Isa::avx2:
    case Isa::avx512: break;
#endif
  }
  return scalar::kReduceTable;
}

void reduce(DType dtype, ReduceOp op, const void* const* in, int n, void* out, std::size_t count) {
  static const ReduceTable& table = reduce_table(chosen_isa());
  if (count == 0) return;
  if (n == 1) {
    if (out != in[0]) std::memcpy(out, in[0], count * size_of(dtype));
    return;
  }
  table.function[static_cast<int>(dtype)][static_cast<int>(op)](in, n, out, count);
}

}  // namespace lockstep::kernels
