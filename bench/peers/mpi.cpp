// MPI's side of bench/compare: one rank of Open MPI or of MPICH. Not for use by hand.
#include <mpi.h>

#include <cstdio>
#include <limits>
#include <stdexcept>
#include <string>

#include "protocol.hpp"

namespace {

using lockstep::DType;
using namespace lockstep::bench;

void check(int code) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw std::runtime_error(text);
}

MPI_Datatype datatype_of(DType type) {
  switch (type) {
    case DType::u8: return MPI_UINT8_T;
    case DType::i32: return MPI_INT32_T;
    case DType::i64: return MPI_INT64_T;
    case DType::f32: return MPI_FLOAT;
    case DType::f64: return MPI_DOUBLE;
    case DType::f16:
    case DType::bf16: throw std::runtime_error("MPI has no 16-bit floats");
    case DType::i8:
    case DType::i16:
    case DType::u16:
    case DType::u32:
    case DType::u64:
    case DType::boolean: break;
  }
  return MPI_BYTE;
}

class Mpi : public Collectives {
 public:
  void barrier() override { check(MPI_Barrier(MPI_COMM_WORLD)); }

  void call(const Block& block, void* in, void* out) override {
    if (block.count > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) {
      throw std::runtime_error("more elements than an int counts");
    }
    const MPI_Datatype type = datatype_of(block.type);
    const int n = static_cast<int>(block.count);
    switch (block.operation) {
      case Operation::barrier: barrier(); break;
      case Operation::all_reduce:
        check(MPI_Allreduce(MPI_IN_PLACE, out, n, type, MPI_SUM, MPI_COMM_WORLD));
        break;
      case Operation::broadcast: check(MPI_Bcast(out, n, type, 0, MPI_COMM_WORLD)); break;
      case Operation::all_gather:
        check(MPI_Allgather(in, n, type, out, n, type, MPI_COMM_WORLD));
        break;
      case Operation::reduce_scatter:
        check(MPI_Reduce_scatter_block(in, out, n, type, MPI_SUM, MPI_COMM_WORLD));
        break;
      case Operation::all_to_all:
        check(MPI_Alltoall(in, n, type, out, n, type, MPI_COMM_WORLD));
        break;
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "a part of bench/compare\n"), 2;
  MPI_Init(&argc, &argv);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  int rank = 0;
  int n_ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &n_ranks);
  int code = 0;
  try {
    Mpi library;
    Rank(argv[1], rank, n_ranks).serve(library);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    code = 1;
  }
  MPI_Finalize();
  return code;
}
