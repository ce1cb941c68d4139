#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "engines/shared/segment/layout.hpp"

namespace lockstep::shared {

/// The released ranges of a segment, for reuse. Lock-free, because processes that share it may die
/// at any instruction: an entry is one word (first page, pages; 0: none), taken by exchanging it
/// for 0 and put by exchanging 0 for it. A range is lost until the job ends if a process dies right
/// after taking it, or if no entry is free when it is released; this costs address space but no
/// memory.
class FreeRanges {
 public:
  struct Pages {
    std::uint32_t first;
    std::uint32_t n;
  };
  using Entries = std::array<std::atomic<std::uint64_t>, kFreeRanges>;

  /// entries: initially all zero.
  explicit FreeRanges(Entries& entries) noexcept : entries_(entries) {}

  /// n pages from the smallest range that is large enough.
  std::optional<std::uint32_t> take(std::uint32_t n) noexcept;
  /// The pages must be unused and zero; they are merged with adjacent ranges.
  void put(Pages pages) noexcept;

 private:
  Entries& entries_;
};

}  // namespace lockstep::shared
