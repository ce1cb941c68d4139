// c10d's side of bench/compare: one rank of libtorch's ProcessGroupGloo, used in the normal way.
// Not for use by hand.
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "protocol.hpp"

namespace {

using lockstep::DType;
using namespace lockstep::bench;

at::ScalarType dtype_of(DType type) {
  static const std::map<DType, at::ScalarType> types = {
      {DType::u8, at::kByte},   {DType::i32, at::kInt},       {DType::i64, at::kLong},
      {DType::f16, at::kHalf},  {DType::bf16, at::kBFloat16}, {DType::f32, at::kFloat},
      {DType::f64, at::kDouble}};
  return types.at(type);
}

class Gloo : public Collectives {
 public:
  Gloo(c10d::ProcessGroupGloo& group, int n_ranks) : group_(group), n_ranks_(n_ranks) {}

  void barrier() override { group_.barrier()->wait(); }

  void call(const Block& block, void* in, void* out) override {
    const auto n = static_cast<std::int64_t>(block.count);
    const auto tensor = [&](void* data, std::int64_t count) {
      return at::from_blob(data, {count}, dtype_of(block.type));
    };
    switch (block.operation) {
      case Operation::barrier: barrier(); break;
      case Operation::all_reduce: {
        std::vector<at::Tensor> tensors{tensor(out, n)};
        group_.allreduce(tensors)->wait();
        break;
      }
      case Operation::broadcast: {
        std::vector<at::Tensor> tensors{tensor(out, n)};
        group_.broadcast(tensors)->wait();
        break;
      }
      case Operation::all_gather: {
        std::vector<at::Tensor> input{tensor(in, n)};
        const auto pieces = tensor(out, n * n_ranks_).chunk(n_ranks_);
        std::vector<std::vector<at::Tensor>> output{{pieces.begin(), pieces.end()}};
        group_.allgather(output, input)->wait();
        break;
      }
      case Operation::reduce_scatter: throw std::runtime_error("ProcessGroupGloo has none");
      case Operation::all_to_all: {
        at::Tensor input = tensor(in, n * n_ranks_);
        at::Tensor output = tensor(out, n * n_ranks_);
        std::vector<std::int64_t> equal;
        group_.alltoall_base(output, input, equal, equal)->wait();
        break;
      }
    }
  }

 private:
  c10d::ProcessGroupGloo& group_;
  int n_ranks_;
};

int number(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) throw std::runtime_error(std::string(name) + " is not set");
  return std::atoi(text);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "a part of bench/compare\n"), 2;
  try {
    const int rank = number("RANK");
    const int n_ranks = number("WORLD_SIZE");
    Rank me(argv[1], rank, n_ranks);
    c10d::TCPStoreOptions where;
    where.port = static_cast<std::uint16_t>(number("MASTER_PORT"));
    where.isServer = rank == 0;
    where.numWorkers = n_ranks;
    auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", where);
    auto options = c10d::ProcessGroupGloo::Options::create();
    options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
    c10d::ProcessGroupGloo group(store, rank, n_ranks, options);
    Gloo library(group, n_ranks);
    me.serve(library);
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
  }
  return 0;
}
