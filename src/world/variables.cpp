#include "world/variables.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <lockstep/error.hpp>

namespace lockstep::internal {

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) return std::nullopt;
  return value;
}

const char* first_set(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (std::getenv(name) != nullptr) return name;
  }
  return nullptr;
}

void reject(const std::string& text) { throw UsageError({.operation = "init_dist"}, text); }

Number number(std::string_view launcher, std::initializer_list<const char*> names, int low,
              int high) {
  const char* const name = first_set(names);
  if (name == nullptr) {
    reject(
        fmt::format("{} is not set, though the environment is {}'s; set it, or unset the other "
                    "variables of {}",
                    *names.begin(), launcher, launcher));
  }
  const std::string text = *variable(name);
  int value = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end) {
    reject(fmt::format("{} is '{}', not a whole number", name, text));
  }
  if (value < low || value > high) {
    reject(fmt::format("{} is {}; it must be from {} to {}", name, value, low, high));
  }
  return {name, value};
}

}  // namespace lockstep::internal
