// A rank of the soak test: mixed load for so many seconds, after which this process holds no more
// memory, descriptors or threads than when it was warm.
//
//   soak SECONDS [N_THREADS]
#include <malloc.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <lockstep/lockstep.hpp>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

using std::chrono::duration;
using std::chrono::steady_clock;

long long count_of(const char* folder) {
  long long n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++n;
  return n;
}

/// What a process may leak, in the middle of nothing.
struct Holdings {
  long long heap_bytes = 0;      ///< handed out by malloc
  long long resident_bytes = 0;  ///< of this process alone and of memory it shares
  long long n_descriptors = 0;
  long long n_threads = 0;
  long long n_maps = 0;

  static Holdings now() {
    Holdings it;
    const struct mallinfo2 heap = ::mallinfo2();
    it.heap_bytes = static_cast<long long>(heap.uordblks + heap.hblkhd);
    long long n_pages = 0;
    std::ifstream statm("/proc/self/statm");
    statm >> n_pages >> n_pages;
    it.resident_bytes = n_pages * 4096;
    it.n_descriptors = count_of("/proc/self/fd");
    it.n_threads = count_of("/proc/self/task");
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) ++it.n_maps;
    return it;
  }
};

/// One round of everything. The same on all ranks: `random` is seeded alike.
void do_round(std::mt19937& random) {
  using namespace lockstep;
  const Group world = default_group();
  const int n = world.size();
  const auto size = std::uniform_int_distribution<std::size_t>(1, 60000)(random);
  const int root = std::uniform_int_distribution(0, n - 1)(random);
  std::vector<float> data(size, 1.0F);
  all_reduce(data);
  if (data.back() != static_cast<float>(n)) std::abort();
  broadcast(data, root);
  for (int i = 0; i < 20; ++i) static_cast<void>(all_reduce_value(i));
  static_cast<void>(all_gather(std::span<const float>(data).first(size / 4 + 1)));
  static_cast<void>(gather(std::span<const float>(data).first(3), root));
  if (n > 1 && world.rank() == root) send(std::span<const float>(data), (root + 1) % n);
  if (n > 1 && world.rank() == (root + 1) % n) recv(std::span(data), root);

  const std::map<std::string, std::vector<int>> object = {{"rank", {world.rank(), root}}};
  static_cast<void>(all_gather_object(object));
  std::vector<int> part(5, world.rank());
  static_cast<void>(collect_results(part, part.size() * static_cast<std::size_t>(n)));

  const Group half = world.split(world.rank() % 2);
  half.barrier();
  const Group other = world.duplicate();
  Work work = other.all_reduce_async({data.data(), data.size(), DType::f32});
  const SharedBuffer buffer = world.allocate(size);
  world.all_reduce({buffer.data(), size, DType::u8}, ReduceOp::max);
  work.wait();
  try {
    static_cast<void>(world.split(-1));
    std::abort();
  } catch (const UsageError&) {
  }
  barrier();
}

/// n_threads: ranks of this process, one of which measures while the others wait.
int soak(double n_seconds, int n_threads) {
  std::mt19937 random(7);
  const auto start = steady_clock::now();
  const auto elapsed = [&] { return duration<double>(steady_clock::now() - start).count(); };
  // Rank 0's clock decides.
  const auto goes_on = [&](double until) {
    return lockstep::all_reduce_value(lockstep::get_rank() == 0 && elapsed() < until ? 1 : 0) != 0;
  };
  const auto measure = [&] {
    lockstep::barrier();
    const bool is_mine = n_threads == 1 || lockstep::get_rank() == 0;
    const Holdings holdings = is_mine ? Holdings::now() : Holdings();
    lockstep::barrier();
    return holdings;
  };
  long long n_rounds = 0;
  for (; goes_on(n_seconds / 4); ++n_rounds) do_round(random);
  const Holdings warm = measure();
  const long long n_warm = n_rounds;
  for (; goes_on(n_seconds); ++n_rounds) do_round(random);
  const Holdings end = measure();

  if (lockstep::get_local_rank() == 0) {
    std::printf(
        "rank 0: %lld rounds, then %lld more: heap %+lld bytes, resident %+lld bytes, "
        "%+lld descriptors, %+lld threads, %+lld maps\n",
        n_warm, n_rounds - n_warm, end.heap_bytes - warm.heap_bytes,
        end.resident_bytes - warm.resident_bytes, end.n_descriptors - warm.n_descriptors,
        end.n_threads - warm.n_threads, end.n_maps - warm.n_maps);
  }
  const bool grew = end.heap_bytes - warm.heap_bytes > (4LL << 20U) ||
                    end.resident_bytes - warm.resident_bytes > (16LL << 20U) ||
                    end.n_descriptors > warm.n_descriptors || end.n_threads > warm.n_threads ||
                    end.n_maps - warm.n_maps > 16;
  if (grew) std::fprintf(stderr, "rank %d holds more than before\n", lockstep::get_rank());
  return grew ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  const double n_seconds = argc > 1 ? std::atof(argv[1]) : 10;
  if (argc > 2) {
    int result = 0;
    const int n_threads = std::atoi(argv[2]);
    lockstep::run_ranks(n_threads, [&](int rank) {
      const int mine = soak(n_seconds, n_threads);
      if (rank == 0) result = mine;
    });
    return result;
  }
  lockstep::init_dist();
  return soak(n_seconds, /*n_threads=*/1);
}
