#include "world/arithmetic.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <lockstep/error.hpp>
#include <span>
#include <type_traits>
#include <vector>

#include "engines/hierarchical/hosts.hpp"
#include "group/check.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace lockstep::internal {
namespace {

constexpr std::uint64_t kFlushResults = 1, kFlushOperands = 2, kRounding = 3 << 2;

/// More than one SIMD vector, plus a remainder.
constexpr std::size_t kCount = 19;

/// Sums of these are exact in every type, in any order: small integers, and for floats that many
/// times the smallest subnormal.
template <class T>
std::vector<T> values_of(int rank) {
  std::vector<T> values;
  for (std::size_t i = 0; i < kCount; ++i) {
    const int whole = static_cast<int>((i * 7 + static_cast<std::size_t>(rank) * 3) % 5) - 2;
    if constexpr (std::is_integral_v<T>) {
      values.push_back(static_cast<T>(std::is_signed_v<T> ? whole : whole + 2));
    } else if (i % 3 == 0) {
      constexpr double kSmallest = std::is_same_v<T, double>     ? 0x1p-1074
                                   : std::is_same_v<T, float>    ? 0x1p-149
                                   : std::is_same_v<T, BFloat16> ? 0x1p-133
                                                                 : 0x1p-24;
      if constexpr (std::is_same_v<T, double>) {
        values.push_back(whole * kSmallest);
      } else {
        values.push_back(static_cast<T>(static_cast<float>(whole) * static_cast<float>(kSmallest)));
      }
    } else {
      values.push_back(static_cast<T>(static_cast<float>(whole)));
    }
  }
  return values;
}

template <class T>
using Sum = std::conditional_t<std::is_integral_v<T>, std::int64_t,
                               std::conditional_t<std::is_same_v<T, double>, double, float>>;

template <class T>
std::vector<T> reference(ReduceOp op, int n_ranks) {
  std::vector<Sum<T>> sums(kCount);
  for (int r = 0; r < n_ranks; ++r) {
    const auto values = values_of<T>(r);
    for (std::size_t i = 0; i < kCount; ++i) {
      const auto value = static_cast<Sum<T>>(values[i]);
      sums[i] = r == 0 ? value : op == ReduceOp::max ? std::max(sums[i], value) : sums[i] + value;
    }
  }
  std::vector<T> result;
  for (Sum<T> sum : sums) {
    if (op == ReduceOp::mean) sum /= static_cast<Sum<T>>(n_ranks);
    result.push_back(static_cast<T>(sum));
  }
  return result;
}

class Checker {
 public:
  Checker(Engine& engine, const Call& barrier) : engine_(engine), barrier_(barrier) {}

  template <class T>
  void run() {
    const int n = engine_.size();
    const auto mine = values_of<T>(engine_.rank());
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::mean}) {
      auto data = mine;
      call<T>(Op::all_reduce, op, data.data(), data.data());
      compare<T>(Op::all_reduce, op, data, reference<T>(op, n));
    }
    std::vector<T> all(kCount * static_cast<std::size_t>(n));
    call<T>(Op::all_gather, ReduceOp::sum, mine.data(), all.data());
    std::vector<T> parts(all.size());
    call<T>(Op::all_to_all, ReduceOp::sum, all.data(), parts.data());
    std::vector<T> sums(kCount);
    call<T>(Op::reduce_scatter, ReduceOp::sum, all.data(), sums.data());
    auto last = mine;
    call<T>(Op::broadcast, ReduceOp::sum, last.data(), last.data(), /*root=*/n - 1);
    compare<T>(Op::broadcast, ReduceOp::sum, last, values_of<T>(n - 1));
    for (int r = 0; r < n; ++r) {
      const auto begin = static_cast<std::ptrdiff_t>(kCount) * r;
      const auto end = begin + static_cast<std::ptrdiff_t>(kCount);
      compare<T>(Op::all_gather, ReduceOp::sum, {all.begin() + begin, all.begin() + end},
                 values_of<T>(r));
      // Every rank sent the same data: part `rank` of it came from each.
      compare<T>(Op::all_to_all, ReduceOp::sum, {parts.begin() + begin, parts.begin() + end},
                 values_of<T>(engine_.rank()));
    }
    auto expected = values_of<T>(engine_.rank());  // n times the same value
    for (T& value : expected) {
      Sum<T> sum{};
      for (int r = 0; r < n; ++r) sum += static_cast<Sum<T>>(value);
      value = static_cast<T>(sum);
    }
    compare<T>(Op::reduce_scatter, ReduceOp::sum, sums, expected);
  }

 private:
  template <class T>
  void call(Op op, ReduceOp reduce, const T* in, T* out, int root = -1) {
    Call call = barrier_;
    call.op = op;
    call.dtype = kDTypeOf<T>;
    call.reduce = reduce;
    call.root = root;
    call.count = kCount;
    call.in = in;
    call.out = out;
    engine_.run(call);
  }

  template <class T>
  void compare(Op op, ReduceOp reduce, const std::vector<T>& got, const std::vector<T>& expected) {
    for (std::size_t i = 0; i < kCount; ++i) {
      const bool are_nan = got[i] != got[i] && expected[i] != expected[i];
      if (are_nan || got[i] == expected[i]) continue;
      const bool reduces = op == Op::all_reduce || op == Op::reduce_scatter;
      throw EngineError(
          context_of(barrier_, engine_.rank()),
          fmt::format(
              "the self-check of LOCKSTEP_CHECK=full found that engine {} computes wrongly: {}{}{} "
              "of {}, element {} of {}, is {}, expected {}. Report it with the output of `lockstep "
              "doctor`; another backend, or LOCKSTEP_SIMD=scalar, may give correct results",
              engine_.name(), name_of(op), reduces ? " by " : "", reduces ? name_of(reduce) : "",
              name_of(kDTypeOf<T>), i, kCount, static_cast<double>(static_cast<Sum<T>>(got[i])),
              static_cast<double>(static_cast<Sum<T>>(expected[i]))));
    }
  }

  Engine& engine_;
  const Call& barrier_;
};

struct Arithmetic {
  std::uint64_t mode;
  std::uint64_t is_full;
  message::Costs costs;
};

}  // namespace

std::uint64_t floating_point_mode() noexcept {
  std::uint64_t mode = 0;
#if defined(__x86_64__)
  const unsigned control = _mm_getcsr();
  if ((control & 0x8000U) != 0) mode |= kFlushResults;
  if ((control & 0x0040U) != 0) mode |= kFlushOperands;
  mode |= (control >> 13U & 3U) << 2U;
#elif defined(__aarch64__)
  std::uint64_t control = 0;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  if ((control >> 24U & 1U) != 0) mode |= kFlushResults | kFlushOperands;
  mode |= (control >> 22U & 3U) << 2U;
#endif
  return mode;
}

std::string describe_mode(std::uint64_t mode) {
  std::string text;
  const auto add = [&text](const char* what) {
    text += (text.empty() ? "" : ", ") + std::string(what);
  };
  if ((mode & kFlushResults) != 0) add("flushes subnormal results to zero (FTZ)");
  if ((mode & kFlushOperands) != 0) add("treats subnormal operands as zero (DAZ)");
  if ((mode & kRounding) != 0) add("does not round to nearest");
  return text.empty() ? "uses the defaults of IEEE 754" : text;
}

void check_arithmetic(Engine& engine, const Call& barrier, const message::Costs& costs) {
  if (engine.size() == 1) return;
  const Arithmetic mine{.mode = floating_point_mode(),
                        .is_full = barrier.check == Check::full ? 1U : 0U,
                        .costs = costs};
  Call step = barrier;
  step.parent_call = &barrier;  // a later error shows init_dist's barrier as the rank's last call
  const auto all = hierarchical::gather_values(engine, step, mine);
  bool is_full = true;
  for (std::size_t r = 0; r < all.size(); ++r) {
    is_full = is_full && all[r].is_full != 0;
    if (all[r].costs != all[0].costs) {
      throw MismatchError(
          context_of(barrier, engine.rank()),
          fmt::format("LOCKSTEP_NETWORK is {} on rank 0, {} on rank {}; the ranks "
                      "would choose different algorithms. Set it alike everywhere",
                      message::describe(all[0].costs), message::describe(all[r].costs), r));
    }
    if (all[r].mode == all[0].mode) continue;
    throw MismatchError(
        context_of(barrier, engine.rank()),
        fmt::format("the ranks' floating-point environments differ: rank 0 {}, rank {} {}; results "
                    "would differ between ranks. Make them equal before init_dist: a program or "
                    "library built with -ffast-math or -Ofast changes its own at startup; so do "
                    "fesetround, _mm_setcsr and torch::set_flush_denormal",
                    describe_mode(all[0].mode), r, describe_mode(all[r].mode)));
  }
  if (is_full) check_operations(engine, barrier);
}

void check_operations(Engine& engine, const Call& barrier) {
  Checker checker(engine, barrier);
  checker.run<std::uint8_t>();
  checker.run<std::int8_t>();
  checker.run<std::uint16_t>();
  checker.run<std::int16_t>();
  checker.run<std::uint32_t>();
  checker.run<std::int32_t>();
  checker.run<std::uint64_t>();
  checker.run<std::int64_t>();
  checker.run<Float16>();
  checker.run<BFloat16>();
  checker.run<float>();
  checker.run<double>();
}

}  // namespace lockstep::internal
