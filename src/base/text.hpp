#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>

/// Texts in arrays of fixed length, as they lie in shared memory, files and messages.
namespace lockstep::base {

/// As much of the text as fits before a null, and that null.
inline void copy_text(std::span<char> to, std::string_view text) noexcept {
  const std::size_t n = std::min(text.size(), to.size() - 1);
  std::copy_n(text.data(), n, to.data());  // of an empty one the data may be null
  to[n] = '\0';
}

/// What stands before the null, or in the whole array: who wrote it may have left the null out.
inline std::string_view text_in(std::span<const char> array) noexcept {
  return {array.data(), ::strnlen(array.data(), array.size())};
}

}  // namespace lockstep::base
