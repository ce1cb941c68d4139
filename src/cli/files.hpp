#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/fd.hpp"

/// Files that another user may have written, and their contents.
namespace lockstep::cli {

/// Opens a regular file for reading. Rejects other file types (a FIFO would block until a writer
/// opens it) and unreadable files.
base::UniqueFd open_regular(std::string_view subcommand, const std::filesystem::path& path);

/// Contents of a regular file. Rejects what open_regular rejects, and files longer than lockstep
/// writes for this purpose.
std::string read_regular(std::string_view subcommand, const std::filesystem::path& path);

/// For json::parse: throws json::other_error if lists and objects are nested deeper than in any
/// file of lockstep, because some code is recursive.
bool check_depth(int depth, nlohmann::json::parse_event_t event, nlohmann::json& value);

/// Refuses to write over anything that is not a regular file: the rename would replace it, even a
/// device.
void check_is_replaceable(std::string_view subcommand, const std::string& path);

/// Text for a terminal: control characters, except newline and tab, are replaced by \xNN.
std::string printable(std::string_view text);

}  // namespace lockstep::cli
