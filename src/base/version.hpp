#pragma once

#include <string_view>

namespace lockstep::base {

/// The library's version: "0.1.0".
std::string_view version() noexcept;

}  // namespace lockstep::base
