#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "engines/shared/bootstrap/layout.hpp"

namespace lockstep::shared {

/// The ranges of a segment that were given back, for the next who asks. Between processes that may
/// die at any instruction, so without locks: an entry is one word (first page, pages; 0: none),
/// taken by exchanging it for 0 and put by exchanging 0 for it. What a dying process had just
/// taken, and what finds no entry, is lost until the job's end, and costs addresses but no memory.
class FreeRanges {
 public:
  struct Pages {
    std::uint32_t first;
    std::uint32_t n;
  };
  using Entries = std::array<std::atomic<std::uint64_t>, kFreeRanges>;

  /// entries: all zero at first.
  explicit FreeRanges(Entries& entries) noexcept : entries_(entries) {}

  /// n pages of the smallest range that has them.
  std::optional<std::uint32_t> take(std::uint32_t n) noexcept;
  /// Pages that nobody uses any more and that are zero; they are joined to their neighbours.
  void put(Pages pages) noexcept;

 private:
  Entries& entries_;
};

}  // namespace lockstep::shared
