#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/sync.hpp>
#include <string>
#include <vector>

#include "cli/bench/bench.hpp"
#include "cli/bench/wire.hpp"
#include "world/environment.hpp"

namespace lockstep::bench {
namespace {

DType dtype_of(Type type) {
  switch (type) {
    case Type::u8: return DType::u8;
    case Type::i32: return DType::i32;
    case Type::i64: return DType::i64;
    case Type::f16: return DType::f16;
    case Type::bf16: return DType::bf16;
    case Type::f32: return DType::f32;
    case Type::f64: return DType::f64;
  }
  return DType::u8;
}

class Lockstep : public Contestant {
 public:
  Lockstep(Group group, bool of_threads) : group_(std::move(group)), of_threads_(of_threads) {}

  void barrier() override { group_.barrier(); }

  void call(const Block& block, void* in, void* out) override {
    const DType dtype = dtype_of(block.type);
    const std::size_t n = block.count;
    const std::size_t all = n * static_cast<std::size_t>(group_.size());
    switch (block.operation) {
      case Operation::barrier: group_.barrier(); break;
      case Operation::all_reduce: group_.all_reduce({out, n, dtype}); break;
      case Operation::broadcast: group_.broadcast({out, n, dtype}); break;
      case Operation::all_gather: group_.all_gather({in, n, dtype}, {out, all, dtype}); break;
      case Operation::reduce_scatter:
        group_.reduce_scatter({in, all, dtype}, {out, n, dtype});
        break;
      case Operation::all_to_all: group_.all_to_all({in, all, dtype}, {out, all, dtype}); break;
    }
  }

  /// Threads use each other's ordinary memory.
  std::byte* allocate(std::size_t n_bytes) override {
    if (of_threads_) return nullptr;
    memory_ = {};
    memory_ = group_.allocate(n_bytes);
    return memory_.data();
  }

 private:
  Group group_;
  bool of_threads_;
  SharedBuffer memory_;
};

/// The rank identifies itself and binds to its core before it joins: the engine checks the cores.
void serve(const std::string& socket, int rank, int n_ranks, bool of_threads) {
  Rank me(socket, rank, n_ranks);
  const bool is_alone = !is_distributed();
  if (is_alone) init_dist();
  Lockstep contestant(default_group(), of_threads);
  me.serve(contestant);
  if (is_alone) destroy_dist();
}

}  // namespace

int work(const std::string& socket, int n_threads) {
  if (n_threads > 0) {
    run_ranks(n_threads, [&] { serve(socket, get_rank(), n_threads, /*of_threads=*/true); });
  } else {
    const internal::World world = internal::read_world(Launcher::lockstep);
    serve(socket, world.rank, world.size, /*of_threads=*/false);
  }
  return 0;
}

}  // namespace lockstep::bench
