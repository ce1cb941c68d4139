// What is particular to the shared engine: many ranks, long messages, no allocation, no leftovers.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <lockstep/lockstep.hpp>

#include "engines/shared/segment.hpp"
#include "support/allocations.hpp"
#include "support/ranks.hpp"

namespace lockstep::test {
namespace {

TEST(SharedEngineTest, a_warm_all_reduce_allocates_nothing) {
  std::atomic<std::size_t> n_counted = SIZE_MAX;
  run_ranks(3, [&](int rank) {
    std::vector<float> small(4);
    std::vector<float> large(1'000'000);
    const auto step = [&] {
      all_reduce(small);
      all_reduce(large, ReduceOp::mean);
      barrier();
    };
    for (int i = 0; i < 3; ++i) step();
    const std::size_t before = n_allocations();
    for (int i = 0; i < 10; ++i) step();
    if (rank == 0) n_counted = n_allocations() - before;
    step();  // the others wait here: at a new place of the program they would note its name
  });
  EXPECT_EQ(n_counted.load(), 0U);
}

class ManyRanks : public ::testing::TestWithParam<Setting> {};

INSTANTIATE_TEST_SUITE_P(Engines, ManyRanks,
                         ::testing::Values(Setting{Form::threads, 16}, Setting{Form::processes, 16},
                                           Setting{Form::threads, 33}, Setting{Form::threads, 64},
                                           Setting{Form::processes, 64}),
                         [](const auto& setting) { return name_of(setting.param); });

TEST_P(ManyRanks, every_verb_once) {
  run_as(GetParam(), [] {
    const int n = get_world_size();
    const auto size = static_cast<std::size_t>(n);
    EXPECT_EQ(all_reduce_value(1), n);
    std::vector<double> data(50'001, get_rank());
    all_reduce(data);
    EXPECT_EQ(data.back(), n * (n - 1) / 2);
    std::vector<int> each(size * 300, get_rank());
    std::vector<int> got(size * 300);
    all_to_all(each, got);
    EXPECT_EQ(got.back(), n - 1);
    std::vector<int> part(300);
    reduce_scatter(each, part);
    EXPECT_EQ(part[299], n * (n - 1) / 2);
    scatter(got, part, n - 1);
    EXPECT_EQ(part[0], get_rank());
    EXPECT_EQ(all_gather(std::vector<int>{get_rank()})[size - 1][0], n - 1);
    EXPECT_EQ(default_group().split(get_rank() / 4).size(), std::min(4, n - get_rank() / 4 * 4));
  });
}

TEST(SharedEngineTest, messages_past_two_to_the_31_bytes) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "4.3 GB of data would take 20 GB under ThreadSanitizer";
#endif
  const std::size_t count = (std::size_t{1} << 31U) + 12'345;
  run_ranks(2, [count](int rank) {
    std::vector<std::uint8_t> data(count, static_cast<std::uint8_t>(rank + 1));
    data.back() = static_cast<std::uint8_t>(10 * rank + 5);
    all_reduce(data);
    EXPECT_EQ(data[0], 3);
    EXPECT_EQ(data[count / 2], 3);
    EXPECT_EQ(data.back(), 20);
    if (rank == 1) data.back() = 77;
    broadcast(data, 1);
    EXPECT_EQ(data.back(), 77);
  });
}

TEST(SharedEngineTest, messages_past_two_to_the_31_bytes_between_processes) {
  const std::size_t count = (std::size_t{1} << 29U) + 321;
  run_as({Form::processes, 2}, [count] {
    std::vector<float> data(count, 1.0F);
    data.back() = 4.0F;
    all_reduce(data);
    EXPECT_EQ(data.front(), 2.0F);
    EXPECT_EQ(data.back(), 8.0F);
  });
}

std::size_t n_files(const char* directory) {
  std::size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory)) ++n;
  return n;
}

std::size_t n_mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t n = 0;
  for (std::string line; std::getline(maps, line);) ++n;
  return n;
}

TEST(SharedEngineTest, groups_and_buffers_give_back_what_they_took) {
  std::size_t n_before = 0;
  std::size_t n_after = 0;
  run_ranks(2, [&](int rank) {
    const auto step = [] {
      const Group group = default_group().duplicate();
      const SharedBuffer buffer = group.allocate(1 << 20);
      EXPECT_EQ(all_reduce_value(1, ReduceOp::sum, group), 2);
    };
    step();
    barrier();
    if (rank == 0) n_before = n_mappings();
    for (int i = 0; i < 50; ++i) step();
    barrier();
    if (rank == 0) n_after = n_mappings();
    barrier();
  });
  EXPECT_LE(n_after, n_before + 8);  // the allocator's own arenas may grow a little
}

TEST(SharedEngineTest, a_killed_rank_leaves_nothing_behind) {
  const std::size_t n_shm = n_files("/dev/shm");
  const std::size_t n_descriptors = n_files("/proc/self/fd");
  const auto statuses = run_processes(4, [] {
    const Group group = default_group().duplicate();
    const SharedBuffer buffer = group.allocate(1 << 20);
    if (get_rank() == 2) ::raise(SIGKILL);
    EXPECT_THROW(group.barrier(), PeerLost);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, SIGKILL, 0}));
  EXPECT_EQ(n_files("/dev/shm"), n_shm);
  EXPECT_EQ(n_files("/proc/self/fd"), n_descriptors);
}

TEST(SegmentTest, refuses_what_is_not_its_own) {
  const auto refusal = [](int fd, std::uint64_t nonce) -> std::string {
    try {
      shared::Segment::attach(base::UniqueFd(fd), nonce);
    } catch (const UsageError& error) {
      return error.text();
    }
    return "attached";
  };
  const auto segment = shared::Segment::for_processes(2);
  const std::uint64_t nonce = segment->header().nonce;
  EXPECT_EQ(refusal(::dup(segment->fd()), nonce), "attached");
  EXPECT_NE(refusal(::dup(segment->fd()), nonce + 1).find("another job"), std::string::npos);
  EXPECT_NE(refusal(::dup(0), nonce).find("no sealed memfd"), std::string::npos);
  EXPECT_NE(refusal(-1, nonce).find("closed"), std::string::npos);
  segment->header().version += 1;
  EXPECT_NE(refusal(::dup(segment->fd()), nonce).find("layout"), std::string::npos);
  segment->header().version -= 1;
  segment->header().n_ranks = 100'000;
  EXPECT_NE(refusal(::dup(segment->fd()), nonce).find("damaged"), std::string::npos);
}

TEST(SegmentTest, takes_1_to_512_ranks) {
  EXPECT_THROW(shared::Segment::for_threads(0), UsageError);
  EXPECT_THROW(shared::Segment::for_threads(513), UsageError);
  EXPECT_EQ(shared::Segment::for_threads(512)->n_ranks(), 512);
}

}  // namespace
}  // namespace lockstep::test
