#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <lockstep/types.hpp>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

/// What one rank does to measure a library: the calls, their buffers, checks and times. For the
/// ranks of `lockstep bench`, and of the libraries that bench/compare measures beside lockstep;
/// their programs include little else of lockstep.
namespace lockstep::bench {

enum class Operation : std::uint32_t {
  barrier,
  all_reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all
};
/// warm: the same buffer again; touch: every rank rewrites it before each call, and only the call
/// is timed; fresh: each call uses memory not used before.
enum class Mode : std::uint32_t { warm, touch, fresh };

/// What to measure, the same on every rank.
struct Request {
  Operation operation;
  DType type;
  Mode mode;
  std::uint32_t in_shared_memory;  ///< buffers from the library's own allocator
  std::uint64_t n_bytes;           ///< of the buffer, counted as in nccl-tests
  double block_ns = 0;             ///< length of a block; 0: a few calls, to measure ns_per_call
  double ns_per_call = 0;

  bool operator==(const Request&) const = default;
};

/// A block of calls.
struct Block {
  Operation operation;
  DType type;
  Mode mode;
  bool in_shared_memory;
  std::uint64_t count;  ///< elements that one rank contributes (all_gather) or receives
  std::uint32_t n_samples;
  std::uint32_t calls_per_sample;  ///< timed together if the clock would cost as much as a call
};

inline Block block_of(const Request& request, int n_ranks) {
  constexpr double kClockWorth = 2'000;
  constexpr std::uint64_t kMostFreshBytes = std::uint64_t{1} << 30;
  const std::uint64_t n = request.n_bytes / size_of(request.type);
  const bool is_barrier = request.operation == Operation::barrier;
  const bool is_in_place =
      request.operation == Operation::all_reduce || request.operation == Operation::broadcast;
  Block block{.operation = request.operation,
              .type = request.type,
              .mode = is_barrier ? Mode::warm : request.mode,
              .in_shared_memory = request.in_shared_memory != 0,
              .count = is_barrier ? 0
                       : is_in_place
                           ? n
                           : std::max<std::uint64_t>(n / static_cast<unsigned>(n_ranks), 1),
              .n_samples = 3,
              .calls_per_sample = 1};
  if (request.block_ns == 0) return block;
  if (block.mode == Mode::warm) {
    const double n_calls = std::ceil(kClockWorth / request.ns_per_call);
    block.calls_per_sample = static_cast<std::uint32_t>(std::clamp(n_calls, 1.0, 100.0));
  }
  double most = 20'000;
  if (block.mode == Mode::fresh) {
    const auto pair = static_cast<double>(std::max<std::uint64_t>(request.n_bytes, 64)) * 2;
    most = std::max(3.0, static_cast<double>(kMostFreshBytes) / pair);
  }
  block.n_samples = static_cast<std::uint32_t>(
      std::clamp(request.block_ns / (request.ns_per_call * block.calls_per_sample), 3.0, most));
  return block;
}

/// The collectives of one library, on one rank.
class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual void barrier() = 0;
  /// One call: sums if it reduces, root 0. all_reduce and broadcast work in place in `out`; in and
  /// out hold n_ranks * count elements if the operation gathers or scatters.
  virtual void call(const Block& block, void* in, void* out) = 0;
  /// Memory that the library transfers fastest; null if it has no allocator.
  virtual std::byte* allocate(std::size_t /*n_bytes*/) { return nullptr; }
};

/// The elements that a rank contributes, small enough that every sum is exact in each type.
inline double value_of(int rank, std::size_t i) {
  return static_cast<double>((static_cast<std::size_t>(rank) + i) % 4);
}

/// A number as an element of that type, in the first size_of(type) bytes.
inline std::array<std::byte, 8> encode(DType type, double value) {
  std::array<std::byte, 8> element{};
  const auto put = [&](auto number) { std::memcpy(element.data(), &number, sizeof number); };
  const auto narrow = static_cast<float>(value);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &narrow, sizeof bits);
  switch (type) {
    case DType::u8: put(static_cast<std::uint8_t>(value)); break;
    case DType::i32: put(static_cast<std::int32_t>(value)); break;
    case DType::i64: put(static_cast<std::int64_t>(value)); break;
    case DType::f32: put(narrow); break;
    case DType::f64: put(value); break;
    case DType::bf16: put(static_cast<std::uint16_t>(bits >> 16)); break;
    case DType::f16:  // a whole number is zero or normal
      put(static_cast<std::uint16_t>(value == 0 ? 0 : (bits - 0x38000000U) >> 13));
      break;
    case DType::i8:
    case DType::i16:
    case DType::u16:
    case DType::u32:
    case DType::u64:
    case DType::boolean: throw std::invalid_argument("a type that is not measured");
  }
  return element;
}

/// Buffers for one kind of call, with initialisation and checks.
class Buffers {
 public:
  Buffers(Collectives& library, const Block& block, int rank, int n_ranks)
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
    if (block.in_shared_memory) memory_ = library.allocate(n_bytes);
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

/// Measures blocks on one rank. Its buffers serve the next block too, if that is of the same kind.
class Meter {
 public:
  Meter(Collectives& library, int rank, int n_ranks)
      : library_(library), rank_(rank), n_ranks_(n_ranks) {}

  /// Times per call of this rank in ns, one per sample. Checks a result before the first timing:
  /// throws if it is wrong.
  std::vector<double> measure(const Request& request) {
    using Clock = std::chrono::steady_clock;
    const Block block = block_of(request, n_ranks_);
    if (!buffers_ || block.mode == Mode::fresh || request != last_) {
      buffers_.reset();
      buffers_ = std::make_unique<Buffers>(library_, block, rank_, n_ranks_);
      last_ = request;
    }
    const Buffers& buffers = *buffers_;
    buffers_->fill(0);
    library_.call(block, buffers.in(0), buffers.out(0));
    buffers.check(0);
    library_.barrier();
    std::vector<double> times(block.n_samples);
    for (std::size_t sample = 0; sample < times.size(); ++sample) {
      const std::size_t pair = block.mode == Mode::fresh ? sample + 1 : 0;
      if (block.mode == Mode::touch) {
        buffers_->fill(0);
        library_.barrier();  // no rank's writes are included in another's time
      }
      const auto begin = Clock::now();
      for (std::uint32_t i = 0; i < block.calls_per_sample; ++i) {
        library_.call(block, buffers.in(pair), buffers.out(pair));
      }
      const std::chrono::duration<double, std::nano> taken = Clock::now() - begin;
      times[sample] = taken.count() / block.calls_per_sample;
    }
    return times;
  }

 private:
  Collectives& library_;
  int rank_;
  int n_ranks_;
  Request last_{};
  std::unique_ptr<Buffers> buffers_;
};

/// Of quantile q, from 0 to 1.
inline double quantile(std::vector<double> values, double q) {
  const auto at = static_cast<std::ptrdiff_t>(q * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<std::size_t>(at)];
}

/// -1: any core.
inline void bind_to(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<std::size_t>(core), &cores);
  if (core >= 0 && ::sched_setaffinity(0, sizeof cores, &cores) != 0) {
    throw std::system_error(errno, std::generic_category(), "sched_setaffinity");
  }
}

}  // namespace lockstep::bench
