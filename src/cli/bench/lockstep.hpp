#pragma once

#include <lockstep/group.hpp>
#include <utility>

#include "cli/bench/meter.hpp"

namespace lockstep::bench {

/// lockstep's own collectives.
class Lockstep : public Collectives {
 public:
  Lockstep(Group group, bool of_threads) : group_(std::move(group)), of_threads_(of_threads) {}

  void barrier() override { group_.barrier(); }

  void call(const Block& block, void* in, void* out) override {
    const DType type = block.type;
    const std::size_t n = block.count;
    const std::size_t all = n * static_cast<std::size_t>(group_.size());
    switch (block.operation) {
      case Operation::barrier: group_.barrier(); break;
      case Operation::all_reduce: group_.all_reduce({out, n, type}); break;
      case Operation::broadcast: group_.broadcast({out, n, type}); break;
      case Operation::all_gather: group_.all_gather({in, n, type}, {out, all, type}); break;
      case Operation::reduce_scatter: group_.reduce_scatter({in, all, type}, {out, n, type}); break;
      case Operation::all_to_all: group_.all_to_all({in, all, type}, {out, all, type}); break;
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

}  // namespace lockstep::bench
