#include "engines/solo/solo.hpp"

#include <cstring>
#include <iterator>
#include <lockstep/group.hpp>
#include <vector>

#include "engines/shared/algorithms/host_engine.hpp"
#include "group/native_engine.hpp"

namespace lockstep::solo {
namespace {

class Buffer final : public SharedMemory {
 public:
  explicit Buffer(std::size_t n_bytes) : bytes_(n_bytes) {}
  std::byte* data() const noexcept override { return bytes_.data(); }

 private:
  mutable std::vector<std::byte> bytes_;
};

class SoloEngine final : public internal::NativeEngine {
 public:
  std::string_view name() const noexcept override { return "solo"; }
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  bool has_low_latency() const noexcept override { return true; }

  void run(const Call& call) override {
    switch (call.op) {
      case Op::barrier:
      case Op::all_reduce:  // every reduction of one value is that value
      case Op::reduce:
      case Op::broadcast:
      case Op::split:
      case Op::allocate: break;
      case Op::all_gather:
      case Op::gather:
      case Op::scatter:
      case Op::reduce_scatter:
      case Op::all_to_all:
        if (call.count > 0 && call.in != call.out) {
          std::memcpy(call.out, call.in, call.count * size_of(call.dtype));
        }
        break;
      case Op::send:  // a Group only sends to other ranks
      case Op::recv: break;
    }
  }

  std::vector<std::unique_ptr<Engine>> divide(const Call&, std::span<const int> counts) override {
    auto engines = shared::ranks_of_threads(counts.front());
    return {std::make_move_iterator(engines.begin()), std::make_move_iterator(engines.end())};
  }
  std::unique_ptr<Engine> split(const Call&, int, int) override { return make(); }
  std::unique_ptr<SharedMemory> allocate(const Call& call) override {
    return std::make_unique<Buffer>(call.count);
  }
  void abandon(std::string_view) noexcept override {}
  void leave(std::string_view) noexcept override {}
};

}  // namespace

std::unique_ptr<Engine> make() { return std::make_unique<SoloEngine>(); }

}  // namespace lockstep::solo

namespace lockstep {

// Defined here because group/ does not depend on engines.
Group::Group() : Group(solo::make(), "solo", std::chrono::minutes(5)) {}

}  // namespace lockstep
