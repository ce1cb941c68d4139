#include "world/variables.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <lockstep/error.hpp>

#include "base/number.hpp"

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
  const auto value = base::parse_number<int>(text);
  if (!value) reject(fmt::format("{} is '{}', not a whole number", name, text));
  if (*value < low || *value > high) {
    reject(fmt::format("{} is {}; it must be from {} to {}", name, *value, low, high));
  }
  return {name, *value};
}

}  // namespace lockstep::internal
