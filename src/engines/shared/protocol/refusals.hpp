#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/text.hpp"
#include "base/truncated_text.hpp"
#include "engines/shared/segment/layout.hpp"

/// The texts of refused calls in shared memory. One may be read while a later one replaces it,
/// which only affects a diagnosis.
namespace lockstep::shared {

/// peer: of a tagged send or recv; -1: a collective.
inline void add_refusal(Refusals& own, int peer, std::string_view text) noexcept {
  const std::uint32_t number = own.n_texts.load(std::memory_order_relaxed);
  RefusalText& entry = own.texts[number % own.texts.size()];
  std::array<char, sizeof(entry.words)> chars{};
  base::copy_truncated(chars, text);
  for (std::size_t i = 0; i < entry.words.size(); ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, chars.data() + i * sizeof word, sizeof word);
    entry.words[i].store(word, std::memory_order_relaxed);
  }
  entry.peer.store(peer, std::memory_order_relaxed);
  own.n_texts.store(number + 1, std::memory_order_release);
}

/// The last n with this peer, or fewer.
inline std::vector<std::string> last_refusals(const Refusals& refusals, int peer, std::uint32_t n) {
  const std::uint32_t end = refusals.n_texts.load(std::memory_order_acquire);
  const auto n_kept = static_cast<std::uint32_t>(refusals.texts.size());
  std::vector<std::string> texts;
  for (std::uint32_t i = end; i > 0 && end - i < n_kept && texts.size() < n; --i) {
    const RefusalText& text = refusals.texts[(i - 1) % n_kept];
    if (text.peer.load(std::memory_order_relaxed) != peer) continue;
    std::array<char, sizeof(text.words)> chars{};
    for (std::size_t w = 0; w < text.words.size(); ++w) {
      const std::uint64_t word = text.words[w].load(std::memory_order_relaxed);
      std::memcpy(chars.data() + w * sizeof word, &word, sizeof word);
    }
    texts.emplace_back(base::text_in(chars));
  }
  std::ranges::reverse(texts);
  return texts;
}

}  // namespace lockstep::shared
