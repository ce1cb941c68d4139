#pragma once

#include <cstdint>
#include <lockstep/engine.hpp>
#include <source_location>
#include <string_view>

namespace lockstep::internal {

/// "?" for an invalid value: it may come from a peer.
std::string_view name_of(Check check);

/// Hash of the source line and the file name without its folder, because build folders may differ.
std::uint64_t hash_of(const std::source_location& where);

}  // namespace lockstep::internal
