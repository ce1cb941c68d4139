#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::cli {

/// Parses what follows a verb. The exit code where that ends it: its help was asked for, or the
/// line is wrong, which standard error then says.
std::optional<int> parse(CLI::App& app, const std::vector<std::string>& words);

}  // namespace lockstep::cli
