#pragma once

#include <algorithm>
#include <span>
#include <string_view>

#include "base/text.hpp"

namespace lockstep::base {

/// Appended to a truncated text.
inline constexpr std::string_view kTruncationMark = " ... (truncated)";

/// As copy_text, for what a person reads: a text that does not fit ends with kTruncationMark.
inline void copy_truncated(std::span<char> to, std::string_view text) noexcept {
  if (text.size() < to.size()) return copy_text(to, text);
  copy_text(to.first(to.size() - kTruncationMark.size()), text);
  const std::size_t n = text_in(to).size();
  std::copy_n(kTruncationMark.data(), kTruncationMark.size(), to.data() + n);
  to[n + kTruncationMark.size()] = '\0';
}

}  // namespace lockstep::base
