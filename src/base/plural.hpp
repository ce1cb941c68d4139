#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep::base {

/// Follows a noun after a number: "1 rank", "2 ranks".
inline std::string_view plural(std::int64_t n) noexcept { return n == 1 ? "" : "s"; }

}  // namespace lockstep::base
