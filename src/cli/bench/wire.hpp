#pragma once

#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "base/abstract_socket.hpp"

/// The protocol between `lockstep bench` and the ranks of a contestant, and the measurement itself.
/// The peers (bench/peers) are separate programs and include little else of lockstep.
///
/// Each rank connects to the driver's Unix socket and sleeps in read() between its blocks, so an
/// inactive contestant uses no core.
namespace lockstep::bench {

enum class Operation : std::uint32_t {
  barrier,
  all_reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all
};
enum class Type : std::uint32_t { u8, i32, i64, f16, bf16, f32, f64 };
/// warm: the same buffer again; touch: every rank rewrites it before each call, and only the call
/// is timed; fresh: each call uses memory not used before.
enum class Mode : std::uint32_t { warm, touch, fresh };

constexpr std::size_t size_of(Type type) {
  switch (type) {
    case Type::u8: return 1;
    case Type::f16:
    case Type::bf16: return 2;
    case Type::i32:
    case Type::f32: return 4;
    case Type::i64:
    case Type::f64: return 8;
  }
  return 0;
}

/// From a rank, once.
struct Hello {
  std::int32_t rank;
  std::int32_t n_ranks;
};

/// From the driver, once: the core to bind to, -1 for any.
struct Welcome {
  std::int32_t core;
};

/// From the driver: one block of calls, the same on every rank.
struct Block {
  Operation operation;
  Type type;
  Mode mode;
  std::uint32_t in_shared_memory;  ///< buffers from the contestant's own allocator
  std::uint64_t count;             ///< elements that one rank contributes (all_gather) or receives
  std::uint32_t n_samples;
  std::uint32_t calls_per_sample;  ///< timed together if the clock would cost as much as a call
};

/// From a rank, after each block; if ok, n_samples times in ns per call (double) follow.
struct Answer {
  std::uint32_t is_ok;
  std::array<char, 508> text;  ///< the error, if not ok
};

inline void read_all(int fd, void* data, std::size_t n_bytes) {
  auto* at = static_cast<char*>(data);
  while (n_bytes > 0) {
    const ssize_t n = ::read(fd, at, n_bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw std::system_error(errno, std::generic_category(), "read");
    if (n == 0) throw std::runtime_error("the peer has closed the connection");
    at += n;
    n_bytes -= static_cast<std::size_t>(n);
  }
}

inline void write_all(int fd, const void* data, std::size_t n_bytes) {
  const auto* at = static_cast<const char*>(data);
  while (n_bytes > 0) {
    const ssize_t n = ::send(fd, at, n_bytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw std::system_error(errno, std::generic_category(), "send");
    at += n;
    n_bytes -= static_cast<std::size_t>(n);
  }
}

/// What a contestant supports, on one rank.
class Contestant {
 public:
  virtual ~Contestant() = default;
  virtual void barrier() = 0;
  /// One call: sums if it reduces, root 0. all_reduce and broadcast work in place in `out`; in and
  /// out hold n_ranks * count elements if the operation gathers or scatters.
  virtual void call(const Block& block, void* in, void* out) = 0;
  /// Memory that the contestant transfers fastest; null if it has no allocator.
  virtual std::byte* allocate(std::size_t /*n_bytes*/) { return nullptr; }
};

/// The elements that a rank contributes, small enough that every sum is exact in each type.
inline double value_of(int rank, std::size_t i) {
  return static_cast<double>((static_cast<std::size_t>(rank) + i) % 4);
}

/// A number as an element of that type, in the first size_of(type) bytes.
inline std::array<std::byte, 8> encode(Type type, double value) {
  std::array<std::byte, 8> element{};
  const auto put = [&](auto number) { std::memcpy(element.data(), &number, sizeof number); };
  const auto narrow = static_cast<float>(value);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &narrow, sizeof bits);
  switch (type) {
    case Type::u8: put(static_cast<std::uint8_t>(value)); break;
    case Type::i32: put(static_cast<std::int32_t>(value)); break;
    case Type::i64: put(static_cast<std::int64_t>(value)); break;
    case Type::f32: put(narrow); break;
    case Type::f64: put(value); break;
    case Type::bf16: put(static_cast<std::uint16_t>(bits >> 16)); break;
    case Type::f16:  // a whole number is zero or normal
      put(static_cast<std::uint16_t>(value == 0 ? 0 : (bits - 0x38000000U) >> 13));
      break;
  }
  return element;
}

/// Buffers for one kind of call, with initialisation and checks.
class Buffers {
 public:
  Buffers(Contestant& contestant, const Block& block, int rank, int n_ranks)
      : block_(block), rank_(rank), n_ranks_(n_ranks), element_(size_of(block.type)) {
    const auto n = static_cast<std::size_t>(n_ranks);
    const bool is_in_place =
        block.operation == Operation::all_reduce || block.operation == Operation::broadcast;
    const std::size_t one = block.count;
    n_in_ = is_in_place ? 0 : (block.operation == Operation::all_gather ? one : one * n);
    n_out_ = block.operation == Operation::all_gather || block.operation == Operation::all_to_all
                 ? one * n
                 : one;
    if (block.operation == Operation::barrier) n_in_ = n_out_ = 0;
    // All pairs of buffers used by `fresh` are one allocation.
    n_pairs_ = block.mode == Mode::fresh ? std::max<std::size_t>(block.n_samples, 1) + 1 : 1;
    pair_bytes_ = (n_in_ * element_ + 63) / 64 * 64 + (n_out_ * element_ + 63) / 64 * 64;
    const std::size_t n_bytes = std::max<std::size_t>(pair_bytes_ * n_pairs_, 64);
    if (block.in_shared_memory != 0) memory_ = contestant.allocate(n_bytes);
    if (memory_ == nullptr) {
      own_.reset(static_cast<std::byte*>(::operator new[](n_bytes, std::align_val_t{4096})));
      memory_ = own_.get();
    }
    for (std::size_t p = 0; p < n_pairs_; ++p) fill(p);
  }

  std::byte* in(std::size_t pair) const { return memory_ + (pair % n_pairs_) * pair_bytes_; }
  std::byte* out(std::size_t pair) const { return in(pair) + (n_in_ * element_ + 63) / 64 * 64; }

  void fill(std::size_t pair) {
    std::byte* to = n_in_ > 0 ? in(pair) : out(pair);
    const std::size_t n = n_in_ > 0 ? n_in_ : n_out_;
    if (pattern_.empty()) {
      pattern_.resize(n * element_);
      for (std::size_t i = 0; i < n; ++i) {
        std::memcpy(&pattern_[i * element_], encode(block_.type, value_of(rank_, i)).data(),
                    element_);
      }
    }
    if (n > 0) std::memcpy(to, pattern_.data(), pattern_.size());
  }

  /// Throws if `out` is not the correct result of the call.
  void check(std::size_t pair) const {
    // Each rank's part repeats itself: then the first elements decide.
    const std::size_t one = block_.count;
    const std::size_t period = std::min<std::size_t>(one, 4);
    for (std::size_t begin = 0; begin < n_out_; begin += one) {
      const std::byte* const part = out(pair) + begin * element_;
      const bool repeats =
          std::memcmp(part, part + period * element_, (one - period) * element_) == 0;
      for (std::size_t i = begin; i < begin + (repeats ? period : one); ++i) {
        const std::array<std::byte, 8> expected = encode(block_.type, expected_at(i));
        if (std::memcmp(out(pair) + i * element_, expected.data(), element_) == 0) continue;
        throw std::runtime_error("wrong result at element " + std::to_string(i) + " on rank " +
                                 std::to_string(rank_));
      }
    }
  }

 private:
  struct Free {
    void operator()(std::byte* at) const { ::operator delete[](at, std::align_val_t{4096}); }
  };

  double expected_at(std::size_t i) const {
    const auto sum = [&](std::size_t at) {
      double total = 0;
      for (int r = 0; r < n_ranks_; ++r) total += value_of(r, at);
      return total;
    };
    const std::size_t one = std::max<std::size_t>(block_.count, 1);
    const auto mine = static_cast<std::size_t>(rank_) * one;
    switch (block_.operation) {
      case Operation::barrier: return 0;
      case Operation::all_reduce: return sum(i);
      case Operation::broadcast: return value_of(0, i);
      case Operation::all_gather: return value_of(static_cast<int>(i / one), i % one);
      case Operation::reduce_scatter: return sum(mine + i);
      case Operation::all_to_all: return value_of(static_cast<int>(i / one), mine + i % one);
    }
    return 0;
  }

  Block block_;
  int rank_;
  int n_ranks_;
  std::size_t element_;
  std::size_t n_in_ = 0;
  std::size_t n_out_ = 0;
  std::size_t n_pairs_ = 1;
  std::size_t pair_bytes_ = 0;
  std::byte* memory_ = nullptr;
  std::unique_ptr<std::byte[], Free> own_;
  std::vector<std::byte> pattern_;
};

/// Times per call in ns, one per sample. Checks a result before the first timing.
inline std::vector<double> measure(Contestant& contestant, const Block& block, Buffers& buffers) {
  using Clock = std::chrono::steady_clock;
  buffers.fill(0);
  contestant.call(block, buffers.in(0), buffers.out(0));
  buffers.check(0);
  contestant.barrier();
  std::vector<double> times(block.n_samples);
  for (std::size_t sample = 0; sample < times.size(); ++sample) {
    const std::size_t pair = block.mode == Mode::fresh ? sample + 1 : 0;
    if (block.mode == Mode::touch) {
      buffers.fill(0);
      contestant.barrier();  // no rank's writes are included in another's time
    }
    const auto begin = Clock::now();
    for (std::uint32_t i = 0; i < block.calls_per_sample; ++i) {
      contestant.call(block, buffers.in(pair), buffers.out(pair));
    }
    const std::chrono::duration<double, std::nano> taken = Clock::now() - begin;
    times[sample] = taken.count() / block.calls_per_sample;
  }
  return times;
}

inline void bind_to(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<std::size_t>(core), &cores);
  if (core >= 0 && ::sched_setaffinity(0, sizeof cores, &cores) != 0) {
    throw std::system_error(errno, std::generic_category(), "sched_setaffinity");
  }
}

/// A rank's connection to the driver.
class Rank {
 public:
  Rank(const std::string& driver, int rank, int n_ranks) : rank_(rank), n_ranks_(n_ranks) {
    fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const base::AbstractAddress address(driver);
    if (fd_ < 0 || ::connect(fd_, address.get(), address.n_bytes()) != 0) {
      throw std::system_error(errno, std::generic_category(), "connect to the socket " + driver);
    }
    const Hello hello{rank, n_ranks};
    write_all(fd_, &hello, sizeof hello);
    Welcome welcome{};
    read_all(fd_, &welcome, sizeof welcome);
    if (welcome.core >= 0) bind_to(welcome.core);
  }
  ~Rank() { ::close(fd_); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  /// Runs the driver's blocks until it closes the connection.
  void serve(Contestant& contestant) {
    Block block{};
    Block last{};
    std::unique_ptr<Buffers> buffers;
    while (next(block)) {
      Answer answer{};
      std::vector<double> times;
      try {
        if (!buffers || std::memcmp(&block, &last, sizeof block) != 0) {
          buffers.reset();
          buffers = std::make_unique<Buffers>(contestant, block, rank_, n_ranks_);
          last = block;
        }
        times = measure(contestant, block, *buffers);
        answer.is_ok = 1;
      } catch (const std::exception& error) {
        std::strncpy(answer.text.data(), error.what(), answer.text.size() - 1);
      }
      write_all(fd_, &answer, sizeof answer);
      write_all(fd_, times.data(), times.size() * sizeof(double));
      if (answer.is_ok == 0) return;
    }
  }

 private:
  bool next(Block& block) {
    char first = 0;
    ssize_t n = 0;
    do {
      n = ::recv(fd_, &first, 1, MSG_PEEK);
    } while (n < 0 && errno == EINTR);
    if (n <= 0) return false;
    read_all(fd_, &block, sizeof block);
    return true;
  }

  int fd_ = -1;
  int rank_;
  int n_ranks_;
};

}  // namespace lockstep::bench
