#pragma once

#include <algorithm>
#include <span>
#include <string_view>

#include "base/text.hpp"

namespace lockstep::base {

/// Ends a text that did not fit.
inline constexpr std::string_view kCutMark = " ... (cut here: too long to pass on whole)";

/// As copy_text, for what a person reads: a text that does not fit ends with kCutMark.
inline void copy_marked_text(std::span<char> to, std::string_view text) noexcept {
  if (text.size() < to.size()) return copy_text(to, text);
  copy_text(to.first(to.size() - kCutMark.size()), text);
  const std::size_t n = text_in(to).size();
  std::copy_n(kCutMark.data(), kCutMark.size(), to.data() + n);
  to[n + kCutMark.size()] = '\0';
}

}  // namespace lockstep::base
