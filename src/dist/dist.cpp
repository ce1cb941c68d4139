#include <lockstep/detail/collective.hpp>
#include <lockstep/dist.hpp>
#include <random>

namespace lockstep {

std::uint64_t sync_random_seed(const Group& group, Timeout timeout, Where where) {
  std::uint64_t seed = 0;
  detail::Collective("sync_random_seed", group, where).run([&] {
    if (group.rank() == 0) {
      std::random_device source;
      seed = std::uint64_t{source()} << 32U | source();
    }
    group.broadcast({.data = &seed, .count = 1, .dtype = DType::u64}, /*src=*/0, timeout, where);
  });
  return seed;
}

}  // namespace lockstep
