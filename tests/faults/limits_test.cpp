// What the machine refuses: an error with errno and advice, on every rank, and never a signal.

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/membarrier.hpp"
#include "cli/command.hpp"
#include "engines/shared/bootstrap/bootstrap.hpp"
#include "engines/shared/bootstrap/job.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/shared/segment/segment.hpp"
#include "faults/memory_group.hpp"
#include "support/expect.hpp"
#include "support/seccomp.hpp"
#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

using shared::Segment;

/// Runs body in a process of its own, whose limits are its own too; it must end by itself.
void in_child(const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    try {
      body();
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    std::fflush(nullptr);
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0) << "a signal, or a failure above";
}

/// What the SystemError of `call` says; its number must be `error_number`.
std::string system_error(int error_number, const std::function<void()>& call) {
  try {
    call();
  } catch (const SystemError& error) {
    EXPECT_EQ(error.error_number(), error_number) << error.what();
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "no error";
}

void set_limit(int resource, rlim_t value) {
  const rlimit limit{.rlim_cur = value, .rlim_max = value};
  ASSERT_EQ(::setrlimit(static_cast<__rlimit_resource>(resource), &limit), 0);
}

TEST(MachineLimitsTest, a_forbidden_memfd_is_reported) {
  in_child([] {
    forbid(SYS_memfd_create);
    const std::string text = system_error(EPERM, [] { shared::Job job(2); });
    expect_contains(text, "cannot make a memfd");
    expect_contains(text, "seccomp");
  });
}

TEST(MachineLimitsTest, a_forbidden_reservation_is_no_sigbus) {
  in_child([] {
    forbid(SYS_fallocate);
    expect_contains(system_error(EPERM, [] { shared::Job job(2); }), "cannot reserve");
  });
}

/// Then each rank fences when it raises a flag, and calls still work.
TEST(MachineLimitsTest, a_forbidden_membarrier_is_done_without) {
  in_child([] {
    forbid(SYS_membarrier);
    EXPECT_FALSE(base::register_for_fences());
    std::array<std::atomic<pid_t>, 2> tids{};
    run_ranks(2, [&](int rank) {
      tids[static_cast<std::size_t>(rank)] = ::gettid();
      for (int i = 0; i < 20; ++i) {
        if (i % 2 == rank) {
          EXPECT_TRUE(wait_until_asleep(tids[static_cast<std::size_t>(1 - rank)]));
        }
        EXPECT_EQ(all_reduce_value(i), 2 * i);
      }
    });
  });
}

TEST(MachineLimitsTest, no_descriptor_is_left) {
  in_child([] {
    set_limit(RLIMIT_NOFILE, 3);  // 0, 1 and 2
    expect_contains(system_error(EMFILE, [] { shared::Job job(2); }), "cannot make a memfd");
  });
}

TEST(MachineLimitsTest, a_limit_on_the_size_of_files_is_no_signal) {
  in_child([] {
    set_limit(RLIMIT_FSIZE, 100U << 10U);
    expect_contains(system_error(EFBIG, [] { shared::Job job(2); }), "(ulimit -f)");
  });
  in_child([] {
    const auto segment = shared::make_world(Segment::for_processes(1));
    set_limit(RLIMIT_FSIZE, 16U << 20U);
    const auto make = [&](std::size_t n_bytes) {
      return shared::Range::make(*segment, n_bytes, 1, [](std::byte*) {});
    };
    expect_contains(system_error(EFBIG, [&] { make(32U << 20U); }), "(ulimit -f)");
    for (int i = 0; i < 20; ++i) shared::Range(segment, make(8U << 20U), 8U << 20U);
  });
}

TEST(MachineLimitsTest, a_containers_memory_is_an_error_and_no_kill) {
  const MemoryGroup group(/*limit=*/64U << 20U);
  if (!group) GTEST_SKIP() << "this process may make no control group with a limit of memory";
  in_child([&group] {
    ASSERT_TRUE(group.join());
    const auto segment = shared::make_world(Segment::for_processes(1));
    const auto make = [&](std::size_t n_bytes) {
      return shared::Range::make(*segment, n_bytes, 1, [](std::byte*) {});
    };
    expect_contains(system_error(ENOMEM, [&] { make(128U << 20U); }), "the container's memory");
    make(8U << 20U);
  });
}

TEST(MachineLimitsTest, no_address_space_is_left) {
  in_child([] {
    const auto segment = shared::make_world(Segment::for_processes(1));
    set_limit(RLIMIT_AS, std::size_t{200} << 20U);
    // Refused, or made but never half: what is reserved and cannot be mapped is given back.
    struct stat before {};
    ASSERT_EQ(::fstat(segment->fd(), &before), 0);
    const std::string text = system_error(ENOMEM, [&] {
      shared::Range::make(*segment, std::size_t{400} << 20U, 1, [](std::byte*) {});
    });
    expect_contains(text, "cannot map");
    expect_contains(text, "raise the limits");
    struct stat after {};
    ASSERT_EQ(::fstat(segment->fd(), &after), 0);
    EXPECT_EQ(after.st_blocks, before.st_blocks);
  });
}

/// Every page that is backed has its place in memory before anybody maps it or stores there.
/// Mapping would take the pages too, but where there are none it says nothing, and the first store
/// is a SIGBUS.
TEST(MachineLimitsTest, pages_are_reserved_before_they_are_used) {
  const auto segment = shared::make_world(Segment::for_processes(4));
  const auto n_bytes_held = [&] {
    struct stat status {};
    EXPECT_EQ(::fstat(segment->fd(), &status), 0);
    return static_cast<std::size_t>(status.st_blocks) * 512;
  };
  const std::size_t before = n_bytes_held();
  constexpr std::size_t kBytes = 8U << 20U;
  const std::uint64_t offset = segment->reserve(kBytes, kBytes);
  EXPECT_EQ(n_bytes_held(), before + kBytes);
  EXPECT_GE(offset, before);
}

TEST(MachineLimitsTest, a_buffer_whose_reservation_is_forbidden_is_no_sigbus) {
  in_child([] {
    const auto segment = shared::make_world(Segment::for_processes(1));
    forbid(SYS_fallocate);
    expect_contains(
        system_error(EPERM,
                     [&] { shared::Range::make(*segment, 8U << 20U, 1, [](std::byte*) {}); }),
        "cannot reserve");
  });
}

TEST(MachineLimitsTest, more_ranks_than_a_host_takes) {
  EXPECT_THROW(shared::Job(513), UsageError);
  EXPECT_THROW(run_ranks(513, [] {}), UsageError);
  EXPECT_NO_THROW(shared::Job(512));
}

TEST(MachineLimitsTest, fork_is_not_a_rank) {
  in_child([] {
    const shared::Job job(1);
    for (const char* name : {"RANK", "LOCAL_RANK"}) ::setenv(name, "0", 1);
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) ::setenv(name, "1", 1);
    ::setenv("LOCKSTEP_SEGMENT", job.environment().c_str(), 1);
    init_dist({.backend = "shared"});
    in_child([] {
      destroy_dist();  // of the copy: the rank has not left
    });
    barrier();
    EXPECT_EQ(all_reduce_value(3), 3);
    destroy_dist();
  });
}

/// Whether a process may have mounts of its own: root may, outside of most containers.
bool can_mount() {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(::unshare(CLONE_NEWNS) == 0 ? 0 : 1);
  int status = -1;
  return ::waitpid(pid, &status, 0) == pid && status == 0;
}

/// For this process only.
void mount_tmpfs(const std::string& path, const char* size) {
  ASSERT_EQ(::unshare(CLONE_NEWNS), 0);
  ASSERT_EQ(::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
  ASSERT_EQ(::mount("none", path.c_str(), "tmpfs", 0, size), 0);
}

void fill(const std::string& folder) {
  const base::UniqueFd file(
      ::open((folder + "/all").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_TRUE(file);
  const std::string zeros(4096, '\0');
  while (::write(file.get(), zeros.data(), zeros.size()) > 0) {
  }
  EXPECT_EQ(errno, ENOSPC);
}

#define SKIP_UNLESS_CAN_MOUNT() \
  if (!can_mount()) GTEST_SKIP() << "this process may not mount a small tmpfs (only root may)"

TEST(MachineLimitsTest, a_full_dev_shm_is_not_needed) {
  SKIP_UNLESS_CAN_MOUNT();
  in_child([] {
    mount_tmpfs("/dev/shm", "size=64k");
    fill("/dev/shm");
    run_ranks(2, [] { EXPECT_EQ(all_reduce_value(1), 2); });
    const auto segment = shared::make_world(Segment::for_processes(2));
    shared::Range::make(*segment, std::size_t{1} << 20U, 1,
                        [](std::byte* data) { data[0] = std::byte{1}; });
  });
}

TEST(MachineLimitsTest, a_full_tmpfs_under_the_results_is_reported_on_every_rank) {
  SKIP_UNLESS_CAN_MOUNT();
  const TemporaryFolder folder;
  in_child([&folder] {
    mount_tmpfs(folder.path(), "size=64k");
    run_ranks(2, [&folder] {
      const std::vector<std::string> part(64, std::string(4096, 'x'));
      std::string text = "no error";
      try {
        static_cast<void>(
            collect_results(part, 128, std::filesystem::path(folder.path()), default_group()));
      } catch (const Error& error) {
        text = error.what();
      }
      expect_contains(text, "No space left on device (errno 28)");
      expect_contains(text, "free space there");
    });
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  });
}

// --- other users ----------------------------------------------------------------------------

constexpr uid_t kNobody = 65534;

#define SKIP_UNLESS_ROOT() \
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user"

void become_another_user() {
  ASSERT_EQ(::setresgid(kNobody, kNobody, kNobody), 0);
  ASSERT_EQ(::setresuid(kNobody, kNobody, kNobody), 0);
}

Call barrier_call(std::chrono::milliseconds timeout) {
  return {.op = Op::barrier,
          .group = "world",
          .sequence = 1,
          .timeout = timeout,
          .where = std::source_location::current()};
}

TEST(OtherUsersTest, cannot_open_the_segment) {
  SKIP_UNLESS_ROOT();
  const shared::Job job(2);
  const std::string through_proc = fmt::format("/proc/{}/fd/{}", ::getpid(), job.fd());
  const std::string memory = fmt::format("/proc/{}/mem", ::getpid());
  in_child([&] {
    become_another_user();
    ::close(job.fd());
    for (const std::string& path : {through_proc, memory}) {
      EXPECT_LT(::open(path.c_str(), O_RDWR), 0) << path;
      EXPECT_EQ(errno, EACCES);
    }
    EXPECT_LT(::syscall(SYS_pidfd_getfd, ::syscall(SYS_pidfd_open, ::getppid(), 0), job.fd(), 0),
              0);
  });
}

TEST(OtherUsersTest, cannot_take_part_in_a_bootstrap) {
  SKIP_UNLESS_ROOT();
  // Rank 1 is another user, who knows everything else: the names differ, and neither meets.
  in_child([] {
    const pid_t pid = ::fork();
    if (pid == 0) {
      become_another_user();
      try {
        shared::bootstrap("job", 1, 2, barrier_call(std::chrono::milliseconds(500)));
      } catch (const TimeoutError&) {
        ::_exit(0);
      } catch (...) {
      }
      ::_exit(1);
    }
    EXPECT_THROW(shared::bootstrap("job", 0, 2, barrier_call(std::chrono::milliseconds(500))),
                 TimeoutError);
    int status = -1;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
  });
}

TEST(SegmentTest, of_another_job_or_version_or_with_a_damaged_header_is_rejected) {
  const auto refusal = [](const std::function<void(shared::SegmentHeader&)>& damage) {
    const auto segment = shared::make_world(Segment::for_processes(2));
    const std::uint64_t nonce = segment->header().nonce;
    damage(segment->header());
    try {
      Segment::attach(base::UniqueFd(::dup(segment->fd())), nonce);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string("taken");
  };
  expect_contains(refusal([](auto& header) { header.nonce ^= 1U; }), "it belongs to another job");
  expect_contains(refusal([](auto& header) { ++header.version; }), "it is of lockstep ");
  expect_contains(refusal([](auto& header) { header.magic = 0; }), "it contains something else");
  expect_contains(refusal([](auto& header) { header.n_ranks = 0; }), "its header is damaged");
  expect_contains(refusal([](auto& header) { header.n_ranks = 513; }), "its header is damaged");
  expect_contains(refusal([](auto& header) { header.n_ranks = 512; }), "its header is damaged");
  EXPECT_EQ(refusal([](auto&) {}), "taken");
}

TEST(SegmentTest, a_place_that_a_peer_names_is_looked_at) {
  const auto segment = shared::make_world(Segment::for_processes(2));
  struct stat status {};
  ASSERT_EQ(::fstat(segment->fd(), &status), 0);
  const auto end = static_cast<std::uint64_t>(status.st_size);
  const std::size_t length = 4096 - 128;  // a page, with its header
  for (const std::uint64_t offset :
       {std::uint64_t{0}, end - 4095, end, end + 4096, ~std::uint64_t{4095}}) {
    EXPECT_THROW(shared::Range(segment, offset, length), EngineError) << offset;
  }
  EXPECT_THROW(shared::Range(segment, end - 4096, std::size_t{8192}), EngineError);
}

TEST(SegmentTest, its_nonce_is_never_the_same) {
  const auto a = Segment::for_processes(1);
  const auto b = Segment::for_processes(1);
  EXPECT_NE(a->header().nonce, b->header().nonce);
}

TEST(SegmentTest, is_no_file_that_others_may_write) {
  const auto segment = Segment::for_processes(1);
  struct stat status {};
  ASSERT_EQ(::fstat(segment->fd(), &status), 0);
  EXPECT_EQ(status.st_nlink, 0U);
  EXPECT_EQ(status.st_uid, ::geteuid());
  EXPECT_EQ(status.st_mode & 07777U, 0600U);
}

}  // namespace
}  // namespace lockstep::test
