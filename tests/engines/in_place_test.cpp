// Ranks that are threads access each other's memory: also when a call fails on one of them.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <memory>
#include <new>
#include <ostream>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "support/allocations.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

TEST(MemoryOfThreads, is_reduced_in_rank_order) {
  run_ranks(3, [](int rank) {
    constexpr std::size_t kCount = 300'001;
    std::vector<float> in(kCount);
    const auto value = [](int r, std::size_t i) {
      return static_cast<float>(i % 977) * (r == 1 ? 1e-4F : 1.1F) + static_cast<float>(r);
    };
    for (std::size_t i = 0; i < kCount; ++i) in[i] = value(rank, i);
    std::vector<float> in_place = in;
    all_reduce(in_place);
    default_group().reduce({in.data(), in.size(), DType::f32}, 2);
    for (std::size_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(in_place[i], value(0, i) + value(1, i) + value(2, i)) << i;
      ASSERT_EQ(in[i], rank == 2 ? in_place[i] : value(rank, i)) << i;
    }
  });
}

// As threads may do: the ranks' parts lie where the root gathers them, or are the same memory.
TEST(MemoryOfThreads, may_be_shared_by_the_ranks) {
  constexpr std::size_t kCount = 50'000;
  std::vector<int> gathered(3 * kCount);
  const std::vector<int> common(kCount, 7);
  run_ranks(3, [&](int rank) {
    const std::vector<int> of_root(kCount, 5);
    const std::span<int> part(gathered.data() + static_cast<std::size_t>(rank) * kCount, kCount);
    if (rank != 0) std::fill(part.begin(), part.end(), 5 + rank);
    const Group group = default_group();
    group.gather(
        {rank == 0 ? of_root.data() : part.data(), kCount, DType::i32},
        {rank == 0 ? gathered.data() : nullptr, rank == 0 ? gathered.size() : 0, DType::i32});
    std::vector<int> all(3 * kCount);
    group.all_gather({common.data(), kCount, DType::i32}, {all.data(), all.size(), DType::i32});
    EXPECT_EQ(all, std::vector<int>(3 * kCount, 7));
  });
  for (std::size_t i = 0; i < gathered.size(); ++i) {
    ASSERT_EQ(gathered[i], 5 + static_cast<int>(i / kCount)) << i;
  }
}

// An allocation that failed there would leave the rank marked as using its peers' memory.
TEST(MemoryOfThreads, is_accessed_without_allocations) {
  std::atomic<std::size_t> n_counted = SIZE_MAX;
  run_ranks(2, [&](int rank) {
    std::vector<float> data(100'000);
    const auto reduce_first = [&](std::size_t n) { all_reduce(std::span(data.data(), n)); };
    for (int i = 0; i < 3; ++i) reduce_first(1);  // notes the line
    const std::size_t before = n_allocations();
    reduce_first(data.size());
    if (rank == 0) n_counted = n_allocations() - before;
    reduce_first(1);  // rank 1 waits here
  });
  EXPECT_EQ(n_counted.load(), 0U);
}

/// Zeroed memory on pages of its own, so an access after its end is a segmentation fault.
class Pages {
 public:
  explicit Pages(std::size_t n_bytes)
      : data_(::mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                     /*fd=*/-1, /*offset=*/0)),
        n_bytes_(n_bytes) {
    if (data_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Pages() { ::munmap(data_, n_bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  float* data() const { return static_cast<float*>(data_); }

 private:
  void* data_;
  std::size_t n_bytes_;
};

/// A page at which a thread that accesses it stops, as if the kernel took long to provide it.
struct Gate {
  static constexpr std::size_t kBytes = 4096;

  std::atomic<std::byte*> page{nullptr};
  std::atomic<bool> is_reached{false};
  std::atomic<bool> has_call_failed{false};    ///< of the other rank, by abandon
  std::atomic<bool> has_call_returned{false};  ///< the same rank's
  std::atomic<bool> returned_early{false};     ///< while this thread was at the gate
};
Gate gate;

/// SIGSEGV's handler.
void stop_at_gate(int signal_number, siginfo_t* info, void*) {
  std::byte* const page = gate.page;
  const auto* const at = static_cast<const std::byte*>(info->si_addr);
  if (page == nullptr || at < page || at >= page + Gate::kBytes) {
    ::signal(signal_number, SIG_DFL);  // for the same access again
    return;
  }
  gate.is_reached = true;
  const timespec pause{.tv_sec = 0, .tv_nsec = 1'000'000};
  while (!gate.has_call_failed) ::nanosleep(&pause, nullptr);
  // Time in which an engine that does not wait for this thread would return.
  for (int i = 0; i < 50 && !gate.has_call_returned; ++i) ::nanosleep(&pause, nullptr);
  gate.returned_early = gate.has_call_returned.load();
  ::mprotect(page, Gate::kBytes, PROT_READ | PROT_WRITE);
}

constexpr std::size_t kCount = 64 << 10U;  // of f32: 256 KiB
float element(int rank, std::size_t i) {
  return static_cast<float>(rank + 1) * static_cast<float>(i % 1021);
}

/// An operation of two ranks, of which rank 1 accesses the end of its own `to`.
struct CaseOfTwo {
  const char* name;
  std::size_t n_to;  ///< elements of `to` on rank 1
  std::function<void(const Group&, float* from, float* to)> call;
  std::function<float()> last;  ///< what rank 1 finds at the end of `to`

  friend void PrintTo(const CaseOfTwo& item, std::ostream* out) { *out << item.name; }
};

ConstElements read_of(const float* data, std::size_t n) { return {data, n, DType::f32}; }
Elements written_of(float* data, std::size_t n) { return {data, n, DType::f32}; }

std::vector<CaseOfTwo> cases_of_two() {
  constexpr std::size_t kBoth = 2 * kCount, kLast = kCount - 1;
  const auto sum_at = [](std::size_t i) { return element(0, i) + element(1, i); };
  return {
      {"all_reduce", kCount,
       [](const Group& group, float*, float* to) { group.all_reduce(written_of(to, kCount)); },
       [=] { return sum_at(kLast); }},
      {"reduce", kCount,
       [](const Group& group, float*, float* to) { group.reduce(written_of(to, kCount), 0); },
       [] { return element(1, kLast); }},
      {"broadcast", kCount,
       [](const Group& group, float*, float* to) { group.broadcast(written_of(to, kCount), 0); },
       [] { return element(0, kLast); }},
      {"all_gather", kBoth,
       [](const Group& group, float* from, float* to) {
         group.all_gather(read_of(from, kCount), written_of(to, kBoth));
       },
       [] { return element(1, kLast); }},
      {"gather", kBoth,
       [](const Group& group, float* from, float* to) {
         group.gather(read_of(from, kCount), written_of(to, kBoth), 1);
       },
       [] { return element(1, kLast); }},
      {"scatter", kCount,
       [](const Group& group, float* from, float* to) {
         group.scatter(read_of(from, kBoth), written_of(to, kCount), 0);
       },
       [] { return element(0, 2 * kCount - 1); }},
      {"reduce_scatter", kCount,
       [](const Group& group, float* from, float* to) {
         group.reduce_scatter(read_of(from, kBoth), written_of(to, kCount));
       },
       [=] { return sum_at(2 * kCount - 1); }},
      {"all_to_all", kBoth,
       [](const Group& group, float* from, float* to) {
         group.all_to_all(read_of(from, kBoth), written_of(to, kBoth));
       },
       [] { return element(1, 2 * kCount - 1); }},
  };
}

class FailureAmongThreads : public ::testing::TestWithParam<CaseOfTwo> {
 protected:
  static constexpr std::size_t kBytes = 2 * kCount * sizeof(float);

  static void fill(int rank, const Pages& from, const Pages& to) {
    for (std::size_t i = 0; i < 2 * kCount; ++i) {
      from.data()[i] = to.data()[i] = element(rank, i);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Operations, FailureAmongThreads, ::testing::ValuesIn(cases_of_two()),
                         [](const auto& item) { return std::string(item.param.name); });

TEST_P(FailureAmongThreads, a_call_that_fails_waits_for_its_peer) {
  struct sigaction handler {
  }, before{};
  handler.sa_sigaction = stop_at_gate;
  handler.sa_flags = SA_SIGINFO;
  ASSERT_EQ(::sigaction(SIGSEGV, &handler, &before), 0);
  std::atomic<bool> has_thrown = false;
  const auto attempt = [&](int rank) {
    const Group group = default_group();
    auto from = std::make_unique<Pages>(kBytes), to = std::make_unique<Pages>(kBytes);
    fill(rank, *from, *to);
    if (rank == 0) {
      // Rank 1 is in the middle of its part when the call fails here, and the memory is freed.
      std::thread ends_the_call([group] {
        EXPECT_TRUE(wait_until([] { return gate.is_reached.load(); }));
        group.abandon("the test ends the call");
        gate.has_call_failed = true;
      });
      try {
        GetParam().call(group, from->data(), to->data());
      } catch (const PeerFailed&) {
        has_thrown = true;
      }
      gate.has_call_returned = true;
      from.reset();
      to.reset();
      ends_the_call.join();
    } else {
      float* const end = to->data() + GetParam().n_to;
      gate.page = reinterpret_cast<std::byte*>(end) - Gate::kBytes;
      ASSERT_EQ(::mprotect(gate.page, Gate::kBytes, PROT_NONE), 0);
      try {
        GetParam().call(group, from->data(), to->data());
      } catch (const PeerFailed&) {  // if rank 0 had not completed its part
      }
      gate.page = nullptr;
      EXPECT_EQ(end[-1], GetParam().last());
    }
  };
  // On a loaded machine rank 0 may look only after rank 1 has completed its part: then its call is
  // right, and says nothing.
  constexpr int kAttempts = 100;
  for (int i = 0; i < kAttempts && !has_thrown; ++i) {
    gate.is_reached = gate.has_call_failed = gate.has_call_returned = gate.returned_early = false;
    run_ranks(2, attempt);
    EXPECT_FALSE(gate.returned_early.load());
  }
  EXPECT_TRUE(has_thrown.load());
  EXPECT_EQ(::sigaction(SIGSEGV, &before, nullptr), 0);
}

TEST_P(FailureAmongThreads, a_late_rank_leaves_freed_memory_alone) {
  std::atomic<bool> is_freed = false;
  run_ranks(2, [&](int rank) {
    const Group group = default_group();
    auto from = std::make_unique<Pages>(kBytes), to = std::make_unique<Pages>(kBytes);
    fill(rank, *from, *to);
    if (rank == 0) {
      // The call ends after it has published where its memory is.
      std::thread ends_the_call([group, tid = ::gettid()] {
        EXPECT_TRUE(wait_until_asleep(tid));
        group.abandon("the test ends the call");
      });
      EXPECT_THROW(GetParam().call(group, from->data(), to->data()), PeerFailed);
      from.reset();
      to.reset();
      is_freed = true;
      ends_the_call.join();
    } else {
      EXPECT_TRUE(wait_until([&] { return is_freed.load(); }));
      EXPECT_THROW(GetParam().call(group, from->data(), to->data()), PeerFailed);
      EXPECT_EQ(to->data()[kCount - 1], element(1, kCount - 1));
    }
  });
}

TEST(MemoryOfThreads, is_left_alone_in_calls_that_differ) {
  run_ranks(2, [](int rank) {
    std::vector<float> data(kCount, static_cast<float>(rank));
    EXPECT_THROW(
        {
          if (rank == 0) {
            all_reduce(data);
          } else {
            broadcast(data);
          }
        },
        MismatchError);
    EXPECT_EQ(data, std::vector<float>(kCount, static_cast<float>(rank)));
  });
}

}  // namespace
}  // namespace lockstep::test
