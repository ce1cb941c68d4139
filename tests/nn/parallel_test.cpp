#include "nn/batch_norm/cpu_batch_norm.hpp"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace lockstep::nn {
namespace {

struct Parts {
  std::vector<int> visits;
  std::set<std::thread::id> threads;
};

Parts visit(std::size_t n, std::size_t n_values) {
  Parts parts{std::vector<int>(n), {}};
  std::mutex mutex;
  cpu::in_parallel(n, n_values, [&](std::size_t first, std::size_t n_mine) {
    const std::lock_guard lock(mutex);
    for (std::size_t i = first; i < first + n_mine; ++i) ++parts.visits.at(i);
    parts.threads.insert(std::this_thread::get_id());
  });
  return parts;
}

TEST(ParallelTest, libtorchs_threads_share_what_is_large) {
  const int before = at::get_num_threads();
  for (const int n_threads : {1, 2, 3}) {
    at::set_num_threads(n_threads);
    for (const std::size_t n : {2, 3, 64, 1000}) {
      const Parts parts = visit(n, /*n_values=*/1 << 20);
      EXPECT_EQ(parts.visits, std::vector<int>(n, 1));
      const std::size_t most = std::min<std::size_t>(n, static_cast<std::size_t>(n_threads));
      EXPECT_LE(parts.threads.size(), most);
      EXPECT_EQ(parts.threads.size() > 1, n_threads > 1) << n << " on " << n_threads;
    }
  }
  at::set_num_threads(before);
}

TEST(ParallelTest, what_is_small_stays_on_this_thread) {
  const Parts parts = visit(1000, /*n_values=*/1);
  EXPECT_EQ(parts.visits, std::vector<int>(1000, 1));
  EXPECT_EQ(parts.threads, std::set{std::this_thread::get_id()});
  EXPECT_TRUE(visit(0, 1).visits.empty());
}

}  // namespace
}  // namespace lockstep::nn
