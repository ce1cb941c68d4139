// A lower bound for bench/compare: two processes, each bound to a core, that do only what the
// result of a call requires, as fast as possible. No checks, records, sleeps or timeouts. Not for
// use by hand.
//
// A barrier is an exchange of two flags. all_reduce up to 112 B is the same, with the data in the
// flags' own lines. Two lines alternate: a rank that writes a line in call t has seen the peer's
// flag of t - 1, which the peer raised after it had read that line in call t - 2.
//
// Larger all_reduces go in chunks that stay in the core's cache: copy one in, publish it, then add
// the peer's previous chunk. Four slots suffice: a rank that copies in chunk c has seen that the
// peer copied in c - 2, which the peer did after it had read c - 4. The two swap their slots after
// every four chunks and read lines with write prefetch: so each moves from core to core once.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <new>

#include "base/memory.hpp"
#include "kernels/reduce.hpp"
#include "limit.hpp"

namespace {

constexpr std::size_t kChunkBytes = std::size_t{64} << 10;
constexpr std::size_t kSlots = 4;

struct alignas(64) Line {
  std::array<float, 14> data;
  std::atomic<std::uint64_t> turn;
};

/// Written by one rank, read by the other; the slots by both in alternation.
struct Side {
  alignas(128) std::array<std::array<Line, 2>, 2> lines;
  alignas(128) std::atomic<std::uint64_t> n_chunks;  ///< copied in
  alignas(4096) std::array<std::array<std::byte, kChunkBytes>, kSlots> slots;
};

template <class Ready>
void poll(Ready ready) {
  constexpr int kAlone = 20'000;
  for (int i = 0; !ready(); ++i) {
    if (i > kAlone) ::sched_yield();
  }
}

class Minimum : public lockstep::bench::Limit {
 public:
  Minimum(std::array<Side, 2>& sides, std::size_t rank)
      : sides_(sides), rank_(rank), mine_(sides[rank]), theirs_(sides[1 - rank]) {}

  void barrier() override { exchange(nullptr, 0); }

 private:
  void all_reduce(float* data, std::size_t count) override {
    constexpr std::size_t kInLines = 2 * std::tuple_size_v<decltype(Line::data)>;
    if (count <= kInLines) {
      exchange(data, count);
    } else {
      exchange_chunks(reinterpret_cast<std::byte*>(data), count * sizeof(float));
    }
  }

  void exchange(float* data, std::size_t n) {
    constexpr std::size_t kEach = std::tuple_size_v<decltype(Line::data)>;
    const std::uint64_t turn = ++turn_;
    auto& mine = mine_.lines[turn % 2];
    const auto& theirs = theirs_.lines[turn % 2];
    const std::size_t n_lines = std::max<std::size_t>(1, (n + kEach - 1) / kEach);
    for (std::size_t l = 0; l < n_lines; ++l) {
      const std::size_t begin = l * kEach;
      std::copy(data + begin, data + std::min(n, begin + kEach), mine[l].data.begin());
      mine[l].turn.store(turn, std::memory_order_release);
    }
    for (std::size_t l = 0; l < n_lines; ++l) {
      poll([&] { return theirs[l].turn.load(std::memory_order_acquire) == turn; });
      for (std::size_t i = l * kEach; i < std::min(n, (l + 1) * kEach); ++i) {
        data[i] += theirs[l].data[i - l * kEach];
      }
    }
  }

  void exchange_chunks(std::byte* data, std::size_t n_bytes) {
    const std::uint64_t before = n_chunks_;
    const std::size_t n = (n_bytes + kChunkBytes - 1) / kChunkBytes;
    const auto length = [&](std::size_t i) {
      return std::min(kChunkBytes, n_bytes - i * kChunkBytes);
    };
    for (std::size_t i = 0; i <= n; ++i) {
      if (i < n) {
        std::memcpy(slot_of(rank_, n_chunks_), data + i * kChunkBytes, length(i));
        mine_.n_chunks.store(++n_chunks_, std::memory_order_release);
      }
      if (i == 0) continue;
      const std::uint64_t chunk = before + i - 1;
      poll([&] { return theirs_.n_chunks.load(std::memory_order_acquire) > chunk; });
      add(data + (i - 1) * kChunkBytes, slot_of(1 - rank_, chunk), length(i - 1));
    }
  }

  std::byte* slot_of(std::size_t rank, std::uint64_t chunk) const {
    return sides_[(rank + chunk / kSlots) % 2].slots[chunk % kSlots].data();
  }

  static void add(std::byte* out, const std::byte* in, std::size_t n_bytes) {
    constexpr std::size_t kPiece = 1024, kLineBytes = 64;
    const auto fetch = [&](std::size_t begin) {
      for (std::size_t at = begin; at < std::min(begin + kPiece, n_bytes); at += kLineBytes) {
        lockstep::base::prefetch_to_write(in + at);
      }
    };
    fetch(0);
    for (std::size_t at = 0; at < n_bytes; at += kPiece) {
      fetch(at + kPiece);
      const std::array<const void*, 2> both{out + at, in + at};
      lockstep::kernels::reduce(lockstep::DType::f32, lockstep::ReduceOp::sum, both.data(), 2,
                                out + at, std::min(kPiece, n_bytes - at) / sizeof(float));
    }
  }

  std::array<Side, 2>& sides_;
  std::size_t rank_;
  Side& mine_;
  const Side& theirs_;
  std::uint64_t turn_ = 0;
  std::uint64_t n_chunks_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "a part of bench/compare\n"), 2;
  void* memory =
      ::mmap(nullptr, 2 * sizeof(Side), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return std::perror("mmap"), 1;
  auto* sides = new (memory) std::array<Side, 2>();
  const pid_t child = ::fork();
  if (child < 0) return std::perror("fork"), 1;
  const int rank = child == 0 ? 1 : 0;
  if (rank == 1) ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  int code = 0;
  try {
    Minimum library(*sides, static_cast<std::size_t>(rank));
    lockstep::bench::Rank(argv[1], rank, /*n_ranks=*/2).serve(library);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    code = 1;
  }
  if (rank == 0) ::waitpid(child, nullptr, 0);
  return code;
}
