#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

/// Files that somebody else may have written, and what they hold.
namespace lockstep::cli {

/// What stands in a regular file. Refuses what is none (a FIFO would wait for a writer), what
/// cannot be read, and what is longer than any file that lockstep writes for this purpose.
std::string read_regular(std::string_view subcommand, const std::filesystem::path& path);

/// For json::parse: throws json::other_error where lists and objects are nested deeper than in any
/// file of lockstep, of which some code is recursive.
bool check_depth(int depth, nlohmann::json::parse_event_t event, nlohmann::json& value);

/// Refuses to write a file where something other than a regular file is: the rename would replace
/// it, and be it a device.
void check_is_replaceable(std::string_view subcommand, const std::string& path);

/// Text for a terminal, which obeys control characters: each of them but line's end and tab as
/// \xNN.
std::string printable(std::string_view text);

}  // namespace lockstep::cli
