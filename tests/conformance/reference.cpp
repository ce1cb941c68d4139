#include "conformance/reference.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>

#include "support/tree.hpp"

namespace lockstep::test {
namespace {

std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31U);
}

template <class Visit>
auto visit(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::boolean: return visit(bool{});
    case DType::u16: return visit(std::uint16_t{});
    case DType::i16: return visit(std::int16_t{});
    case DType::u32: return visit(std::uint32_t{});
    case DType::u64: return visit(std::uint64_t{});
    case DType::u8: return visit(std::uint8_t{});
    case DType::i8: return visit(std::int8_t{});
    case DType::i32: return visit(std::int32_t{});
    case DType::i64: return visit(std::int64_t{});
    case DType::f16: return visit(Float16{});
    case DType::bf16: return visit(BFloat16{});
    case DType::f32: return visit(float{});
    case DType::f64: break;
  }
  return visit(double{});
}

__extension__ typedef __int128 Int128;
__extension__ typedef unsigned __int128 UInt128;

/// The accumulator type for a sum of T.
template <class T>
using Wide = std::conditional_t<std::is_integral_v<T>, Int128,
                                std::conditional_t<std::is_same_v<T, double>, double, float>>;

template <class W>
W combine(ReduceOp op, W a, W b) {
  if constexpr (!std::is_floating_point_v<W>) {  // integers wrap
    using U = UInt128;
    if (op == ReduceOp::sum || op == ReduceOp::mean) return static_cast<W>(U(a) + U(b));
    if (op == ReduceOp::product) return static_cast<W>(U(a) * U(b));
  }
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::mean: return a + b;
    case ReduceOp::product: return a * b;
    case ReduceOp::min: return std::min(a, b);
    case ReduceOp::max: return std::max(a, b);
    case ReduceOp::band:
    case ReduceOp::bor:
    case ReduceOp::bxor: break;
  }
  if constexpr (!std::is_floating_point_v<W>) {
    if (op == ReduceOp::band) return a & b;
    return op == ReduceOp::bor ? a | b : a ^ b;
  }
  return a;
}

/// The i-th of values().
template <class T>
T value_at(std::size_t i, std::uint64_t seed, int rank) {
  const std::uint64_t bits = mix(mix(seed * 1000 + static_cast<std::uint64_t>(rank)) + i);
  if constexpr (std::is_same_v<T, bool>) {
    return (bits & 1U) != 0;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(bits);
  } else {
    // Fractions, so that the order of a sum affects its bits.
    return static_cast<T>(static_cast<float>(bits >> 40U) / static_cast<float>(1U << 23U) - 1.0F);
  }
}

/// Elements from `first` on. `hosts` in order of their lowest ranks: the ranks of each one.
template <class T>
void reduce_as(ReduceOp op, std::size_t first, std::span<T> elements, std::uint64_t seed,
               const std::vector<std::vector<int>>& hosts) {
  // Products and sums of narrow integers wrap at every step; a mean does not.
  const auto step = [op](Wide<T> a, Wide<T> b) {
    const Wide<T> result = combine(op, a, b);
    if constexpr (std::is_integral_v<T>) {
      if (op != ReduceOp::mean) return static_cast<Wide<T>>(static_cast<T>(result));
    }
    return result;
  };
  using Values = std::vector<Wide<T>>;
  const auto steps = [&step](const Values& a, const Values& b) {
    Values combined = a;
    for (std::size_t i = 0; i < a.size(); ++i) combined[i] = step(a[i], b[i]);
    return combined;
  };
  std::size_t n_ranks = 0;
  std::vector<Values> of_hosts;
  for (const std::vector<int>& ranks : hosts) {
    std::vector<Values> of_ranks;
    for (const int rank : ranks) {
      Values& wide = of_ranks.emplace_back(elements.size());
      for (std::size_t i = 0; i < wide.size(); ++i) {
        wide[i] = static_cast<Wide<T>>(value_at<T>(first + i, seed, rank));
      }
    }
    n_ranks += ranks.size();
    of_hosts.push_back(combined_in_tree(std::move(of_ranks), steps));
  }
  Values sums = combined_in_tree(std::move(of_hosts), steps);
  for (std::size_t i = 0; i < elements.size(); ++i) {
    if (op == ReduceOp::mean) sums[i] = sums[i] / static_cast<Wide<T>>(n_ranks);
    elements[i] = static_cast<T>(sums[i]);
  }
}

}  // namespace

Bytes values(DType dtype, std::size_t count, std::uint64_t seed, int rank) {
  return visit(dtype, [&]<class T>(T) {
    Bytes bytes(count * sizeof(T));
    for (std::size_t i = 0; i < count; ++i) {
      const T value = value_at<T>(i, seed, rank);
      std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
    return bytes;
  });
}

Bytes reduced(DType dtype, ReduceOp op, std::size_t count, std::uint64_t seed, int n_ranks) {
  return reduced_by_host(dtype, op, count, seed,
                         std::vector<int>(static_cast<std::size_t>(n_ranks), 0));
}

Bytes reduced_by_host(DType dtype, ReduceOp op, std::size_t count, std::uint64_t seed,
                      const std::vector<int>& hosts) {
  std::vector<std::vector<int>> ranks(hosts.size());
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    ranks[static_cast<std::size_t>(hosts[rank])].push_back(static_cast<int>(rank));
  }
  std::erase_if(ranks, [](const std::vector<int>& some) { return some.empty(); });
  return visit(dtype, [&]<class T>(T) {
    constexpr std::size_t kAtATime = 4096;  // all at once would be a copy for each rank
    std::array<T, kAtATime> part;
    Bytes bytes(count * sizeof(T));
    for (std::size_t first = 0; first < count; first += kAtATime) {
      const std::span elements(part.data(), std::min(kAtATime, count - first));
      reduce_as<T>(op, first, elements, seed, ranks);
      std::memcpy(bytes.data() + first * sizeof(T), elements.data(), elements.size_bytes());
    }
    return bytes;
  });
}

void append(Bytes& to, const Bytes& what) { to.insert(to.end(), what.begin(), what.end()); }

Bytes piece(const Bytes& all, int rank, std::size_t n_bytes) {
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(n_bytes) * rank;
  return {begin, begin + static_cast<std::ptrdiff_t>(n_bytes)};
}

}  // namespace lockstep::test
