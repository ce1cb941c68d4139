#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <lockstep/engine.hpp>
#include <span>

#include "base/bytes.hpp"
#include "base/memory.hpp"

/// What the algorithms of the shared engine have in common: how they divide and copy data.
namespace lockstep::shared {

using base::bytes;
using base::copy_bytes;

/// Measured best piece sizes of with_write_prefetch: for slots, and for peers' memory, which is
/// also written.
inline constexpr std::size_t kSlotPiece = 1024, kMemoryPiece = 2048;

/// Calls use(begin, length) for pieces of the n_bytes at each of `data`, prefetched for write (RFO)
/// because this rank writes there, now or in a later phase: each line moves between cores once,
/// not twice.
template <class Use>
void with_write_prefetch(std::span<const std::byte* const> data, std::size_t n_bytes,
                         std::size_t piece, Use use) {
  constexpr std::size_t kLineBytes = 64;
  const auto fetch = [&](std::size_t begin) {
    const std::size_t end = std::min(begin + piece, n_bytes);
    for (; begin < end; begin += kLineBytes) {
      for (const std::byte* peers : data) base::prefetch_to_write(peers + begin);
    }
  };
  fetch(0);
  for (std::size_t begin = 0; begin < n_bytes; begin += piece) {
    fetch(begin + piece);
    use(begin, std::min(piece, n_bytes - begin));
  }
}

/// Rank r's part of a call's input, where each has n_bytes.
inline const std::byte* part_of_input(const Call& call, int r, std::size_t n_bytes) {
  const auto at = static_cast<std::size_t>(r);
  return call.ins.empty() ? bytes(call.in) + at * n_bytes : bytes(call.ins[at]);
}

/// Rank r's part of a call's output, where the parts before it have `begin` bytes.
inline std::byte* part_of_output(const Call& call, int r, std::size_t begin) {
  return call.outs.empty() ? bytes(call.out) + begin
                           : bytes(call.outs[static_cast<std::size_t>(r)]);
}

/// The number of elements, without a division: element sizes are powers of two.
inline std::size_t count_of(std::size_t n_bytes, std::size_t element_bytes) {
  return n_bytes >> static_cast<unsigned>(std::countr_zero(element_bytes));
}

/// Splits `n` elements into one slice per rank, aligned to cache lines.
struct Slices {
  std::size_t n_each;
  std::size_t n_total;

  Slices(std::size_t n, int n_ranks, std::size_t element_bytes) : n_total(n) {
    const std::size_t line = count_of(64, element_bytes);
    const std::size_t share =
        (n + static_cast<std::size_t>(n_ranks) - 1) / static_cast<std::size_t>(n_ranks);
    n_each = (share + line - 1) / line * line;
  }
  std::size_t begin(int rank) const {
    return std::min(n_total, static_cast<std::size_t>(rank) * n_each);
  }
  std::size_t length(int rank) const { return begin(rank + 1) - begin(rank); }
};

}  // namespace lockstep::shared
