#pragma once

#include <cstdint>
#include <optional>
#include <source_location>
#include <string_view>

namespace lockstep::internal {

/// What ranks compare of each call, see Env::check.
enum class Check : std::uint8_t { off, light, full };
/// "?" where the value is none: it may come from a peer.
std::string_view name_of(Check check);

/// nullopt where the text is no level.
std::optional<Check> parse_check(std::string_view text);

/// What LOCKSTEP_CHECK says now; light where it says nothing (Env::read refuses what is no level).
Check check_level();

/// Of the source line and the file's name without its folder: ranks may be built in several places.
std::uint64_t hash_of(const std::source_location& where);

}  // namespace lockstep::internal
