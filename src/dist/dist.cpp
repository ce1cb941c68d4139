#include <lockstep/dist.hpp>
#include <random>

namespace lockstep {

std::vector<std::size_t> detail::exchange_counts(std::size_t count, const Group& group,
                                                 Timeout timeout, Where where) {
  static_assert(sizeof(std::size_t) == sizeof(std::uint64_t));
  std::vector<std::size_t> counts(static_cast<std::size_t>(group.size()));
  group.all_gather({.data = &count, .count = 1, .dtype = DType::u64},
                   {.data = counts.data(), .count = counts.size(), .dtype = DType::u64}, timeout,
                   where);
  return counts;
}

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
