// oneCCL's side of bench/compare: one rank of its library for CPUs. Not for use by hand.
//
// MPI launches and connects the ranks; what carries the data is oneCCL's own choice
// (CCL_ATL_TRANSPORT).
#include <mpi.h>

#include <cstdio>
#include <oneapi/ccl.hpp>
#include <stdexcept>
#include <string>

#include "protocol.hpp"

namespace {

using lockstep::DType;
using namespace lockstep::bench;

ccl::datatype datatype_of(DType type) {
  switch (type) {
    case DType::u8: return ccl::datatype::uint8;
    case DType::i32: return ccl::datatype::int32;
    case DType::i64: return ccl::datatype::int64;
    case DType::f16: return ccl::datatype::float16;
    case DType::bf16: return ccl::datatype::bfloat16;
    case DType::f32: return ccl::datatype::float32;
    case DType::f64: return ccl::datatype::float64;
    case DType::i8:
    case DType::i16:
    case DType::u16:
    case DType::u32:
    case DType::u64:
    case DType::boolean: break;
  }
  throw std::runtime_error("a type that is not measured");
}

/// Rank 0's, on every rank.
ccl::shared_ptr_class<ccl::kvs> shared_kvs(int rank) {
  ccl::shared_ptr_class<ccl::kvs> kvs;
  ccl::kvs::address_type address{};
  if (rank == 0) {
    kvs = ccl::create_main_kvs();
    address = kvs->get_address();
  }
  MPI_Bcast(address.data(), static_cast<int>(address.size()), MPI_BYTE, 0, MPI_COMM_WORLD);
  return rank == 0 ? kvs : ccl::create_kvs(address);
}

class OneCcl : public Collectives {
 public:
  OneCcl(int rank, int n_ranks)
      : communicator_(ccl::create_communicator(n_ranks, rank, shared_kvs(rank))) {}

  void barrier() override { ccl::barrier(communicator_).wait(); }

  void call(const Block& block, void* in, void* out) override {
    const ccl::datatype type = datatype_of(block.type);
    const std::size_t n = block.count;
    switch (block.operation) {
      case Operation::barrier: barrier(); break;
      case Operation::all_reduce:
        name(block);
        ccl::allreduce(out, out, n, type, ccl::reduction::sum, communicator_, attributes_).wait();
        break;
      case Operation::broadcast: ccl::broadcast(out, n, type, 0, communicator_).wait(); break;
      case Operation::all_gather: ccl::allgather(in, out, n, type, communicator_).wait(); break;
      case Operation::reduce_scatter:
        ccl::reduce_scatter(in, out, n, type, ccl::reduction::sum, communicator_).wait();
        break;
      case Operation::all_to_all: ccl::alltoall(in, out, n, type, communicator_).wait(); break;
    }
  }

 private:
  /// Calls of one name share a schedule, which oneCCL would otherwise build anew for each.
  void name(const Block& block) {
    if (block.count == named_.count && block.type == named_.type) return;
    named_ = block;
    const std::string name =
        std::to_string(block.count) + " of type " + std::to_string(static_cast<int>(block.type));
    attributes_.set<ccl::operation_attr_id::match_id>(ccl::string_class(name));
    attributes_.set<ccl::operation_attr_id::to_cache>(true);
  }

  ccl::communicator communicator_;
  ccl::allreduce_attr attributes_ = ccl::create_operation_attr<ccl::allreduce_attr>();
  Block named_{};
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "a part of bench/compare\n"), 2;
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  int rank = 0;
  int n_ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &n_ranks);
  int code = 0;
  try {
    Rank me(argv[1], rank, n_ranks);
    ccl::init();
    OneCcl library(rank, n_ranks);
    me.serve(library);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    code = 1;
  }
  MPI_Finalize();
  return code;
}
