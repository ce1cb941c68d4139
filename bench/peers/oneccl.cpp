// oneCCL's side of bench/compare: one rank of its library for CPUs. Not for use by hand.
//
// MPI launches and connects the ranks; what carries the data is oneCCL's own choice
// (CCL_ATL_TRANSPORT).
#include <mpi.h>

#include <cstdint>
#include <cstdio>
#include <oneapi/ccl.hpp>
#include <stdexcept>
#include <string>

#include "protocol.hpp"

namespace {

using lockstep::DType;
using namespace lockstep::bench;

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

  void call(const Block& block, void* /*in*/, void* out) override {
    if (block.operation == Operation::barrier) return barrier();
    if (block.operation != Operation::all_reduce || block.type != DType::f32) {
      throw std::runtime_error("only barrier, and all_reduce of f32, are measured");
    }
    name(block);
    ccl::allreduce(out, out, block.count, ccl::datatype::float32, ccl::reduction::sum,
                   communicator_, attributes_)
        .wait();
  }

 private:
  /// Calls of one name share a schedule, which oneCCL would otherwise build anew for each.
  void name(const Block& block) {
    if (block.count == named_) return;
    named_ = block.count;
    attributes_.set<ccl::operation_attr_id::match_id>(ccl::string_class(std::to_string(named_)));
    attributes_.set<ccl::operation_attr_id::to_cache>(true);
  }

  ccl::communicator communicator_;
  ccl::allreduce_attr attributes_ = ccl::create_operation_attr<ccl::allreduce_attr>();
  std::uint64_t named_ = 0;
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
