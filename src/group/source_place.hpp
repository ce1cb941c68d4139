#pragma once

#include <bit>
#include <source_location>
#include <type_traits>

namespace lockstep::internal {

/// What a std::source_location points to, in libstdc++ and libc++ alike. The language has no other
/// way to make one of a line that the compiler did not see.
struct SourcePlace {
  const char* file = "";
  const char* function = "";
  unsigned line = 0;
  unsigned column = 0;
};
static_assert(sizeof(std::source_location) == sizeof(const SourcePlace*) &&
              std::is_trivially_copyable_v<std::source_location>);

/// `place` must live as long as the process: errors and records point to it.
inline std::source_location location_of(const SourcePlace& place) noexcept {
  return std::bit_cast<std::source_location>(&place);
}

}  // namespace lockstep::internal
