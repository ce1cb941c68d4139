// What is particular to the shared engine: many ranks, long messages, no allocation, no leftovers.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <lockstep/lockstep.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "engines/shared/segment/segment.hpp"
#include "support/allocations.hpp"
#include "support/expect.hpp"
#include "support/ranks.hpp"
#include "support/seccomp.hpp"
#include "support/waiting.hpp"

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

TEST_P(ManyRanks, every_operation_once) {
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

/// The files of shared memory that this process has mapped, a line each.
std::string shared_files() {
  std::ifstream maps("/proc/self/maps");
  std::string names;
  for (std::string line; std::getline(maps, line);) {
    const std::size_t at = line.find("/dev/shm/");
    if (at != std::string::npos) names += line.substr(at) + '\n';
  }
  return names;
}

TEST(SharedEngineTest, a_killed_rank_leaves_nothing_behind) {
  const std::size_t n_descriptors = n_files("/proc/self/fd");
  int ends[2];  // the ranks tell what they have mapped
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  const auto statuses = run_processes(4, [&ends] {
    const Group group = default_group().duplicate();
    const SharedBuffer buffer = group.allocate(1 << 20);
    const std::string names = shared_files();
    EXPECT_EQ(::write(ends[1], names.data(), names.size()), static_cast<ssize_t>(names.size()));
    if (get_rank() == 2) ::raise(SIGKILL);
    EXPECT_THROW(group.barrier(), PeerLost);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, SIGKILL, 0}));
  std::string names(65536, '\0');
  const ssize_t n_bytes = ::read(ends[0], names.data(), names.size());
  names.resize(n_bytes < 0 ? 0 : static_cast<std::size_t>(n_bytes));
  std::istringstream lines(names);
  for (std::string name; std::getline(lines, name);) {
    EXPECT_FALSE(std::filesystem::exists(name)) << name;
  }
  ::close(ends[0]);
  ::close(ends[1]);
  EXPECT_EQ(n_files("/proc/self/fd"), n_descriptors);
}

/// The memory of this process's segment.
std::int64_t n_segment_bytes() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;  // of the iterator itself
    const auto name = std::filesystem::read_symlink(entry.path(), closed).string();
    struct stat status {};
    if (name.find("memfd:lockstep") == std::string::npos) continue;
    if (::stat(entry.path().c_str(), &status) == 0) return status.st_blocks * std::int64_t{512};
  }
  ADD_FAILURE() << "no segment";
  return 0;
}

TEST(SharedEngineTest, a_group_has_little_memory_before_its_first_large_message) {
  constexpr std::size_t kGroups = 20;
  constexpr std::int64_t kLittle = 32 << 10;
  run_as({Form::processes, 4}, [] {
    barrier();
    const std::int64_t before = n_segment_bytes();
    barrier();
    std::vector<Group> groups;
    for (std::size_t i = 0; i < kGroups; ++i) {
      groups.push_back(default_group().duplicate());
      EXPECT_EQ(all_reduce_value(1, ReduceOp::sum, groups.back()), 4);
      groups.back().barrier();
    }
    EXPECT_LE(n_segment_bytes() - before, std::int64_t{kGroups} * kLittle);
    barrier();
    EXPECT_THROW(groups[1].broadcast({nullptr, 4, DType::f32}, 0), UsageError);
    groups[1].barrier();
    std::vector<float> data(1 << 20, 1.0F);
    all_reduce(data, ReduceOp::sum, groups[0]);
    EXPECT_EQ(data.back(), 4.0F);
  });
}

TEST(SharedEngineTest, the_first_message_in_slots_takes_a_page_for_each) {
  for (const int n : {2, 4}) {
    run_as({Form::processes, n}, [n] {
      barrier();
      const std::int64_t before = n_segment_bytes();
      barrier();
      std::vector<float> data(250, 1.0F);  // behind the flags on every CPU
      all_reduce(data);
      barrier();
      EXPECT_EQ(n_segment_bytes() - before, 3 * n * std::int64_t{4096}) << n << " ranks";
      barrier();
    });
  }
}

/// Slots and outboxes get memory as messages grow, of each rank for itself.
TEST(SharedEngineTest, messages_that_grow_and_shrink) {
  for (const int n : {1, 2, 3, 5}) {
    run_as({Form::processes, n}, [n] {
      const int next = (get_rank() + 1) % n;
      const int previous = (get_rank() + n - 1) % n;
      for (const std::size_t count :
           {std::size_t{10}, std::size_t{80}, std::size_t{2'000}, std::size_t{70'001},
            std::size_t{300}, std::size_t{400'003}, std::size_t{50}}) {
        std::vector<int> data(count, get_rank() + 1);
        all_reduce(data);
        EXPECT_EQ(data.front(), n * (n + 1) / 2);
        EXPECT_EQ(data.back(), data.front());
        const int root = static_cast<int>(count) % n;
        data.assign(count, get_rank());
        broadcast(data, root);
        EXPECT_EQ(data.back(), root);
        std::vector<int> all(count * static_cast<std::size_t>(n));
        all_gather(std::vector<int>(count, get_rank()), all);
        EXPECT_EQ(all.back(), n - 1);
        std::vector<int> received(all.size());
        all_to_all(all, received);
        EXPECT_EQ(received.back(), get_rank());
        if (n == 1) continue;
        data.assign(count, get_rank());
        const auto send_next = [&] { send(data, next); };
        std::vector<int> got(count);
        if (get_rank() == 0) send_next();
        recv(got, previous);
        if (get_rank() != 0) send_next();
        EXPECT_EQ(got.back(), previous);
      }
    });
  }
}

TEST(SharedEngineTest, no_memory_for_a_large_message_is_an_error_on_all_ranks) {
  const auto statuses = run_processes(3, [] {
    const Group group = default_group().duplicate();
    EXPECT_EQ(all_reduce_value(1, ReduceOp::sum, group), 3);
    if (get_rank() == 1) {  // the two ways to get it
      forbid(SYS_madvise);
      forbid(SYS_fallocate);
    }
    std::vector<float> data(100'000, 1.0F);
    expect_contains(thrown<SystemError>([&] { all_reduce(data, ReduceOp::sum, group); }),
                    "rank 1 could not reserve shared memory: cannot reserve");
    EXPECT_EQ(all_reduce_value(1), 3);  // the other groups stay usable
  });
  EXPECT_EQ(statuses, std::vector<int>(3, 0));
}

TEST(SharedEngineTest, two_ranks_need_memory_for_what_the_flags_do_not_hold) {
  for (const bool is_inline : {false, true}) {
    ::setenv("LOCKSTEP_TUNE", is_inline ? "inline=248" : "inline=56", /*overwrite=*/1);
    const auto statuses = run_processes(2, [is_inline] {
      const Group group = default_group().duplicate();
      if (get_rank() == 1) {
        forbid(SYS_madvise);
        forbid(SYS_fallocate);
      }
      EXPECT_EQ(all_reduce_value(1, ReduceOp::sum, group), 2);
      std::vector<float> data(16, 1.0F);
      if (is_inline) {
        all_reduce(data, ReduceOp::sum, group);
        EXPECT_EQ(data.back(), 2.0F);
      } else {
        expect_contains(thrown<SystemError>([&] { all_reduce(data, ReduceOp::sum, group); }),
                        "rank 1 could not reserve shared memory: cannot reserve");
      }
      EXPECT_EQ(default_group().duplicate().size(), 2);  // which the ranks tell each other
    });
    EXPECT_EQ(statuses, std::vector<int>(2, 0)) << is_inline;
  }
  ::unsetenv("LOCKSTEP_TUNE");
}

/// Another thread may destroy the handle while a call uses the buffer.
TEST(SharedEngineTest, a_buffer_whose_handle_is_destroyed_during_a_call) {
  const SharedCount in_call;
  const SharedCount destroyed;
  const auto statuses = run_processes(2, [&] {
    constexpr std::size_t kElements = 100'000;
    SharedBuffer buffer = default_group().allocate(kElements * sizeof(float));
    const auto data = buffer.as<float>();
    std::fill(data.begin(), data.end(), 1.0F);
    if (get_rank() == 0) {
      std::jthread destroys([&, tid = ::gettid()] {
        EXPECT_TRUE(in_call.wait_for(1));
        EXPECT_TRUE(wait_until_asleep(tid));  // in the call, which waits for rank 1
        buffer = SharedBuffer();
        destroyed.raise();
      });
      in_call.raise();
      all_reduce(data);
    } else {
      EXPECT_TRUE(destroyed.wait_for(1));
      all_reduce(data);
      EXPECT_EQ(data.front(), 2.0F);
      EXPECT_EQ(data.back(), 2.0F);
    }
    barrier();
  });
  EXPECT_EQ(statuses, std::vector<int>(2, 0));
}

/// A program may close what it has not opened, as daemons do, and open files of its own.
TEST(SharedEngineTest, a_file_that_got_the_number_of_the_segment_is_left_alone) {
  const auto statuses = run_processes(2, [] {
    const Group group = default_group().duplicate();
    SharedBuffer buffer = group.allocate(4U << 20U);
    ASSERT_EQ(::close_range(3, ~0U, 0), 0);
    const std::string filling(9U << 20U, 'x');
    char path[] = "/tmp/lockstep-closed-XXXXXX";
    std::vector<int> fds = {::mkostemp(path, O_CLOEXEC)};
    ASSERT_EQ(::write(fds[0], filling.data(), filling.size()),
              static_cast<ssize_t>(filling.size()));
    while (fds.size() < 32) fds.push_back(::dup(fds[0]));  // among them, the segment's number

    std::vector<int> value = {1};
    all_reduce(value);  // of what is mapped nothing has changed
    EXPECT_EQ(value[0], 2);
    buffer = SharedBuffer();
    try {
      static_cast<void>(group.allocate(1U << 20U));
      ADD_FAILURE() << "no error";
    } catch (const SystemError& error) {
      EXPECT_EQ(error.error_number(), EBADF);
      expect_contains(error.text(), "closed descriptor");
    }
    EXPECT_THROW(default_group().split(0), SystemError);
    destroy_dist();
    std::string found(filling.size() + 1, '\0');
    EXPECT_EQ(::pread(fds[0], found.data(), found.size(), 0), static_cast<ssize_t>(filling.size()));
    found.pop_back();
    EXPECT_TRUE(found == filling);
    for (const int fd : fds) EXPECT_GE(::fcntl(fd, F_GETFD), 0) << fd;
    ::unlink(path);
  });
  EXPECT_EQ(statuses, std::vector<int>(2, 0));
}

TEST(SharedEngineTest, places_in_the_segment_are_used_again) {
  const auto statuses = run_processes(2, [] {
    // Files of memory are limited too; 40 buffers and groups take 12 MiB each.
    const rlimit limit{.rlim_cur = 64U << 20U, .rlim_max = 64U << 20U};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    for (int i = 0; i < 40; ++i) {
      const Group group = default_group().duplicate();
      const SharedBuffer buffer = group.allocate(4U << 20U);
      const auto values = buffer.as<std::int64_t>();
      EXPECT_EQ(values.front(), 0);
      EXPECT_EQ(values.back(), 0);
      values.front() = values.back() = 7;
      group.barrier();
    }
  });
  EXPECT_EQ(statuses, std::vector<int>(2, 0));
}

TEST(SegmentTest, rejects_what_is_not_its_own) {
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
  EXPECT_NE(refusal(::dup(0), nonce).find("not a sealed memfd"), std::string::npos);
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
