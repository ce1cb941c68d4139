// lockstep against itself in bench/compare: the shared engine called directly, without a Group's
// overhead (argument checks, timeout, recorder) and without the checks and records of the engine
// itself (channel.cpp is compiled separately for this program, with LOCKSTEP_UNCHECKED). Not for
// use by hand.
#include <cstdio>

#include "engines/catalog.hpp"
#include "limit.hpp"
#include "world/environment.hpp"

namespace {

lockstep::Call call_of(lockstep::Op op, std::size_t count, void* out) {
  return {.op = op,
          .dtype = lockstep::DType::f32,
          .count = count,
          .in = out,
          .out = out,
          .timeout = std::chrono::hours(24),
          .where = std::source_location::current()};
}

class Unchecked : public lockstep::bench::Limit {
 public:
  explicit Unchecked(lockstep::Engine& engine) : engine_(engine) {}

  void barrier() override { engine_.run(call_of(lockstep::Op::barrier, 0, nullptr)); }

 private:
  void all_reduce(float* data, std::size_t count) override {
    engine_.run(call_of(lockstep::Op::all_reduce, count, data));
  }

  lockstep::Engine& engine_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "a part of bench/compare\n"), 2;
  try {
    auto world = lockstep::internal::read_world(lockstep::Launcher::lockstep);
    lockstep::bench::Rank me(argv[1], world.rank, world.size);
    const auto engine =
        lockstep::engines::join("shared", world, call_of(lockstep::Op::barrier, 0, nullptr)).engine;
    Unchecked library(*engine);
    me.serve(library);
    engine->leave({});
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
  }
  return 0;
}
