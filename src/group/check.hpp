#pragma once

#include <cstdint>
#include <optional>
#include <source_location>
#include <string_view>

namespace lockstep::internal {

/// How much of each call ranks compare, see Env::check.
enum class Check : std::uint8_t { off, light, full };
/// "?" for an invalid value: it may come from a peer.
std::string_view name_of(Check check);

/// nullopt if the text is not a level.
std::optional<Check> parse_check(std::string_view text);

/// The current value of LOCKSTEP_CHECK; light if unset (Env::read rejects invalid levels).
Check check_level();

/// Hash of the source line and the file name without its folder, because build folders may differ.
std::uint64_t hash_of(const std::source_location& where);

}  // namespace lockstep::internal
