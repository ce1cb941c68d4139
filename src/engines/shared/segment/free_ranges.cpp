#include "engines/shared/segment/free_ranges.hpp"

namespace lockstep::shared {
namespace {

std::uint64_t pack(FreeRanges::Pages pages) noexcept {
  return std::uint64_t{pages.first} << 32U | pages.n;
}

FreeRanges::Pages unpack(std::uint64_t entry) noexcept {
  return {.first = static_cast<std::uint32_t>(entry >> 32U),
          .n = static_cast<std::uint32_t>(entry)};
}

/// Acquire: taking pages is ordered after all accesses of their last users and after zeroing;
/// release: for the rank that takes them next. ABA is harmless: an entry that was taken and put
/// back meanwhile holds the same free pages.
bool exchange(std::atomic<std::uint64_t>& entry, std::uint64_t expected,
              std::uint64_t wanted) noexcept {
  return entry.compare_exchange_strong(expected, wanted, std::memory_order_acq_rel,
                                       std::memory_order_relaxed);
}

}  // namespace

std::optional<std::uint32_t> FreeRanges::take(std::uint32_t n) noexcept {
  while (true) {
    std::atomic<std::uint64_t>* best = nullptr;
    std::uint64_t found = 0;
    for (auto& entry : entries_) {
      const std::uint64_t word = entry.load(std::memory_order_relaxed);
      if (word == 0 || unpack(word).n < n) continue;
      if (best == nullptr || unpack(word).n < unpack(found).n) {
        best = &entry;
        found = word;
      }
    }
    if (best == nullptr) return std::nullopt;
    if (!exchange(*best, found, 0)) continue;  // another rank took it first
    const Pages pages = unpack(found);
    if (pages.n > n) put({.first = pages.first + n, .n = pages.n - n});
    return pages.first;
  }
}

void FreeRanges::put(Pages pages) noexcept {
  // If two ranks release adjacent ranges at the same time, the ranges may stay separate.
  for (auto& entry : entries_) {
    const std::uint64_t word = entry.load(std::memory_order_relaxed);
    if (word == 0) continue;
    const Pages other = unpack(word);
    const bool is_before = other.first + other.n == pages.first;
    const bool is_behind = pages.first + pages.n == other.first;
    if ((!is_before && !is_behind) || !exchange(entry, word, 0)) continue;
    pages = {.first = is_before ? other.first : pages.first, .n = other.n + pages.n};
  }
  for (auto& entry : entries_) {
    if (entry.load(std::memory_order_relaxed) == 0 && exchange(entry, 0, pack(pages))) return;
  }
}

}  // namespace lockstep::shared
