#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::internal {

/// An environment variable; nullopt if it is not set.
std::optional<std::string> variable(const char* name);

/// The name of the first of `names` that is set; nullptr if none is.
const char* first_set(std::initializer_list<const char*> names);

/// Throws a UsageError from init_dist.
[[noreturn]] void reject(const std::string& text);

/// A number and the variable that gave it.
struct Number {
  const char* name;
  int value;
};

/// More ranks than any world has.
inline constexpr int kMaxWorldSize = 1 << 24;

/// The integer in [low, high] that the first set variable of `names` holds. Throws UsageError with
/// the variable and its value if it holds none, or if none is set; `launcher`: whose variables
/// they are.
Number number(std::string_view launcher, std::initializer_list<const char*> names, int low,
              int high);

}  // namespace lockstep::internal
