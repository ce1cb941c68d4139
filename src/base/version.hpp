#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::base {

/// The library's version: "0.2.0".
std::string_view version() noexcept;

/// Of the memory and files that processes share, computed by CMake from the headers that describe
/// them: see lockstep_layout_version. Processes share only what has the same number.
std::uint32_t layout_version() noexcept;

/// "lockstep 0.2.0 (layout 1a2b3c4d)". `release` may come from a process with another layout.
std::string release_text(std::string_view release, std::uint32_t layout);

}  // namespace lockstep::base
