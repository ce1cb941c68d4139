#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace lockstep::base {

/// The number that is the whole text; nullopt: it is none, or out of range. `base`: 10 if omitted.
template <class Number, class... Base>
std::optional<Number> parse_number(std::string_view text, Base... base) noexcept {
  Number number{};
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number, base...);
  return error == std::errc() && rest == end ? std::optional(number) : std::nullopt;
}

}  // namespace lockstep::base
