#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::internal {

/// A variable of the environment; nullopt where it is not set.
std::optional<std::string> variable(const char* name);

/// The first of `names` that is set: its name. nullptr where none is.
const char* first_set(std::initializer_list<const char*> names);

/// Throws UsageError of init_dist.
[[noreturn]] void refuse(const std::string& text);

/// A number and the variable that gave it.
struct Number {
  const char* name;
  int value;
};

/// More ranks than any world has.
inline constexpr int kMostRanks = 1 << 24;

/// The whole number in [low, high] that the first set one of `names` holds. Throws UsageError with
/// the variable and its value where it holds none, or where none is set; `launcher` says whose
/// variables they are.
Number number(std::string_view launcher, std::initializer_list<const char*> names, int low,
              int high);

}  // namespace lockstep::internal
