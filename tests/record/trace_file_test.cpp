#include "record/trace_file.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <latch>
#include <lockstep/lockstep.hpp>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.hpp"
#include "record/recorder.hpp"
#include "support/allocations.hpp"
#include "support/expect.hpp"
#include "support/ranks.hpp"
#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using Kind = TraceEvent::Kind;

/// A folder that LOCKSTEP_TRACE names.
class TraceTest : public testing::Test {
 protected:
  TraceTest() { ::setenv("LOCKSTEP_TRACE", path_.c_str(), 1); }
  ~TraceTest() override { ::unsetenv("LOCKSTEP_TRACE"); }

  /// What one rank left.
  std::shared_ptr<const TraceFile> file_of(int rank) const {
    for (const auto& entry : fs::directory_iterator(path_)) {
      if (!entry.path().filename().string().starts_with("rank-" + std::to_string(rank))) continue;
      const base::UniqueFd fd(::open(entry.path().c_str(), O_RDONLY));
      void* const memory = ::mmap(nullptr, sizeof(TraceFile), PROT_READ, MAP_SHARED, fd.get(), 0);
      if (memory == MAP_FAILED) break;
      return {static_cast<const TraceFile*>(memory), [](const TraceFile* mapped) {
                ::munmap(const_cast<TraceFile*>(mapped), sizeof(TraceFile));
              }};
    }
    ADD_FAILURE() << "rank " << rank << " left nothing";
    return nullptr;
  }
  static std::vector<const TraceEvent*> events_of(const TraceFile& file, Kind kind) {
    std::vector<const TraceEvent*> events;
    for (std::size_t i = 0; i < file.n_events; ++i) {
      if (file.events[i].kind == kind) events.push_back(&file.events[i]);
    }
    return events;
  }
  static std::string text_of(const TraceEvent& event) {
    return {event.text.data(), ::strnlen(event.text.data(), event.text.size())};
  }

  const test::TemporaryFolder folder_;
  const fs::path path_ = folder_.path();
};

void add() {
  std::int32_t value = 1;
  all_reduce(std::span(&value, 1));
}

TEST_F(TraceTest, scopes_nest_around_calls) {
  run_ranks(2, [](int) {
    const TraceScope outer("outer");
    const TraceScope inner(std::string("inner"));  // gone before the scope is
    add();
  });
  for (const int rank : {0, 1}) {
    const auto file = file_of(rank);
    ASSERT_TRUE(file);
    EXPECT_EQ(file->rank, rank);
    EXPECT_EQ(file->world_size, 2);
    EXPECT_STREQ(file->clock.data(), name_of_clock().c_str());
    const auto regions = events_of(*file, Kind::region);
    const auto calls = events_of(*file, Kind::call);
    ASSERT_EQ(regions.size(), 2U);
    ASSERT_EQ(calls.size(), 1U);
    EXPECT_EQ(text_of(*regions[0]), "outer");
    EXPECT_EQ(text_of(*regions[1]), "inner");
    EXPECT_LE(regions[0]->start, regions[1]->start);
    EXPECT_LE(regions[1]->start, calls[0]->start);
    EXPECT_LT(calls[0]->start, calls[0]->end);
    EXPECT_LE(calls[0]->end, regions[1]->end);
    EXPECT_LE(regions[1]->end, regions[0]->end);
    EXPECT_EQ(op_of(calls[0]->call.signature), Op::all_reduce);
    EXPECT_EQ(calls[0]->call.count, 1U);
    EXPECT_EQ(calls[0]->call.collective, 1U);
    EXPECT_STREQ(file->groups[calls[0]->call.group].data(), "world");
    EXPECT_EQ(std::string(file->sites[calls[0]->call.site].data()).find("trace_file_test.cpp:"),
              0U);
    const auto threads = events_of(*file, Kind::thread);
    ASSERT_EQ(threads.size(), 1U);
    EXPECT_EQ(text_of(*threads[0]), "lockstep-" + std::to_string(rank));
    EXPECT_EQ(threads[0]->thread, calls[0]->thread);
  }
}

TEST_F(TraceTest, allocates_nothing_on_or_off) {
  const auto count = [](int) {
    const auto work = [] {
      for (int i = 0; i < 3000; ++i) {  // more than room is made for at once
        const TraceScope scope("step");
        add();
      }
    };
    work();
    const std::size_t n_before = test::n_allocations();
    work();
    EXPECT_EQ(test::n_allocations(), n_before);
  };
  run_ranks(1, count);
  const auto file = file_of(0);
  ASSERT_TRUE(file);
  EXPECT_EQ(events_of(*file, Kind::region).size(), 6000U);
  EXPECT_EQ(events_of(*file, Kind::call).size(), 6000U);
  ::unsetenv("LOCKSTEP_TRACE");
  run_ranks(1, count);
}

TEST_F(TraceTest, a_file_that_got_the_number_of_the_trace_is_left_alone) {
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    bool is_left_alone = false;
    run_ranks(1, [&](int) {
      add();
      ::close_range(3, ~0U, 0);
      char path[] = "/tmp/lockstep-trace-XXXXXX";
      const int fd = ::mkostemp(path, O_CLOEXEC);
      for (int i = 0; i < 32; ++i) ::dup(fd);
      for (int i = 0; i < 3000; ++i) add();  // more than room is made for at once
      struct stat status {};
      is_left_alone = ::fstat(fd, &status) == 0 && status.st_size == 0 && status.st_blocks == 0;
      ::unlink(path);
    });
    for (int fd = 3; fd < 35; ++fd) is_left_alone &= ::fcntl(fd, F_GETFD) >= 0;
    ::_exit(is_left_alone ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  const auto file = file_of(0);
  ASSERT_TRUE(file);
  EXPECT_EQ(file->error_number, EBADF);
}

TEST_F(TraceTest, a_scope_may_outlive_its_rank) {
  // In a fork: this process would be one that has called init_dist, for the tests behind it too.
  const int status = test::in_a_fork([] {
    init_dist({.launcher = Launcher::none});
    {
      const TraceScope scope("the program");
      destroy_dist();
    }
    const TraceScope nobody_traces("after");
  });
  EXPECT_EQ(status, 0);
  const auto file = file_of(0);
  ASSERT_TRUE(file);
  const auto regions = events_of(*file, Kind::region);
  ASSERT_EQ(regions.size(), 1U);
  EXPECT_NE(regions[0]->end, 0U);
}

// ThreadSanitizer sees what one thread reads of the session that another destroys.
TEST_F(TraceTest, a_thread_may_wait_while_another_leaves_the_world) {
  const int status = test::in_a_fork([] {
    std::atomic<bool> has_waited{false}, is_over{false};
    std::thread waiting;
    for (int i = 0; i < 20; ++i) {
      init_dist({.launcher = Launcher::none});
      if (i == 0) {
        waiting = std::thread([&] {
          Work work = Group().barrier_async();
          while (!is_over) {
            work.wait();
            has_waited = true;
          }
        });
      }
      has_waited = false;
      EXPECT_TRUE(test::wait_until([&] { return has_waited.load(); }));
      destroy_dist();
    }
    is_over = true;
    waiting.join();
  });
  EXPECT_EQ(status, 0);
}

TEST_F(TraceTest, says_which_call_failed) {
  EXPECT_THROW(run_ranks(2, [](int rank) { rank == 0 ? add() : barrier(); }), MismatchError);
  const auto file = file_of(0);
  ASSERT_TRUE(file);
  const auto calls = events_of(*file, Kind::call);
  ASSERT_EQ(calls.size(), 1U);
  EXPECT_TRUE(calls[0]->has_failed);
  EXPECT_NE(calls[0]->end, 0U);
}

TEST_F(TraceTest, threads_of_a_rank_share_its_file) {
  const auto recorder = Recorder::in_process(/*rank=*/7, /*world_size=*/8);
  recorder->trace_to(path_, /*n_restarts=*/0);
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kEach = 200'000;  // so many that they run at once
  std::latch all_there(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      all_there.arrive_and_wait();
      for (std::size_t n = 0; n < kEach; ++n) {
        Trace::end(*recorder->trace()->begin("busy", 1), 2, /*has_failed=*/false);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto file = file_of(7);
  ASSERT_TRUE(file);
  EXPECT_EQ(events_of(*file, Kind::thread).size(), kThreads);
  EXPECT_EQ(events_of(*file, Kind::region).size(), kThreads * kEach);
}

TEST_F(TraceTest, truncates_long_names_and_counts_dropped_events) {
  const auto recorder = Recorder::in_process(0, 1);
  Trace trace(path_, recorder->record(), /*n_restarts=*/0);
  trace.begin(std::string(60, 'x'), /*start=*/1);
  std::size_t n_kept = 2;  // the thread's, and that
  while (trace.begin("y", 1) != nullptr) ++n_kept;
  EXPECT_EQ(n_kept, TraceFile::kMaxEvents);
  EXPECT_EQ(trace.begin("z", 1), nullptr);
  const auto file = file_of(0);
  ASSERT_TRUE(file);
  EXPECT_EQ(text_of(file->events[1]), std::string(TraceEvent::kTextLength, 'x'));
  EXPECT_EQ(file->n_events, TraceFile::kMaxEvents + 2);
}

/// Whether an access to this address needs no page fault.
bool is_mapped(const void* address) {
  const base::UniqueFd pages(::open("/proc/self/pagemap", O_RDONLY));
  std::uint64_t entry = 0;
  const auto at = static_cast<off_t>(reinterpret_cast<std::uintptr_t>(address) / 4096 * 8);
  EXPECT_EQ(::pread(pages.get(), &entry, sizeof entry, at), static_cast<ssize_t>(sizeof entry));
  return entry >> 63U != 0;
}

TEST_F(TraceTest, every_chunk_is_mapped_when_it_gets_room) {
  alignas(4096) static std::array<char, 4096> page;
#ifdef MADV_POPULATE_WRITE
  const bool can_populate = ::madvise(page.data(), page.size(), MADV_POPULATE_WRITE) == 0;
#else
  const bool can_populate = page.empty();
#endif
  if (!can_populate) GTEST_SKIP() << "this kernel has no MADV_POPULATE_WRITE";
  const auto recorder = Recorder::in_process(0, 1);
  Trace trace(path_, recorder->record(), /*n_restarts=*/0);
  for (int chunk = 0; chunk < 3; ++chunk) {
    const TraceEvent* const first = trace.begin("x", /*start=*/1);
    ASSERT_NE(first, nullptr);
    const auto file = file_of(0);
    const std::uint64_t n_left = file->n_room - file->n_events;
    EXPECT_TRUE(is_mapped(first + n_left)) << "chunk " << chunk;
    for (std::uint64_t i = 0; i < n_left; ++i) trace.begin("x", 1);
  }
}

TEST_F(TraceTest, a_folder_that_is_not_there_and_a_limit_are_errors) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{.rlim_cur = 1 << 20U, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  test::expect_contains(test::thrown<SystemError>(
                            [] { run_ranks(1, [](int) { ADD_FAILURE() << "the rank began"; }); }),
                        "ulimit -f");
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(fs::is_empty(path_));
  ::setenv("LOCKSTEP_TRACE", "/nonexistent", 1);
  EXPECT_THROW(run_ranks(1, [](int) {}), UsageError);
}

}  // namespace
}  // namespace lockstep::internal
