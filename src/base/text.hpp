#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>

/// Texts in fixed-length arrays, as used in shared memory, files and messages.
namespace lockstep::base {

/// Copies as much of the text as fits before a terminating null, without a part of a character of
/// UTF-8.
inline void copy_text(std::span<char> to, std::string_view text) noexcept {
  std::size_t n = std::min(text.size(), to.size() - 1);
  const auto is_within = [&] { return (static_cast<unsigned char>(text[n]) & 0xc0U) == 0x80U; };
  for (int i = 0; i < 3 && n > 0 && n < text.size() && is_within(); ++i) --n;
  std::copy_n(text.data(), n, to.data());  // data() of an empty view may be null
  to[n] = '\0';
}

/// The file of a path, without its folders.
inline std::string_view base_name(std::string_view path) noexcept {
  return path.substr(path.find_last_of('/') + 1);  // npos + 1 is 0: the whole path
}

/// The text up to the null, or the whole array: the writer may have omitted the null.
inline std::string_view text_in(std::span<const char> array) noexcept {
  return {array.data(), ::strnlen(array.data(), array.size())};
}

}  // namespace lockstep::base
