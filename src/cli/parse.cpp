#include "cli/parse.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <lockstep/error.hpp>

#include "cli/subcommands.hpp"

namespace lockstep::cli {

void reject(std::string_view subcommand, const std::string& text) {
  throw UsageError({.operation = std::string(subcommand)}, text);
}

std::optional<int> parse(CLI::App& app, const std::vector<std::string>& words) {
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // CLI11's order
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return 0;
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "{0}: {1}\nSee {0} --help\n", app.get_name(), error.what());
    return kUsageExitCode;
  }
  return std::nullopt;
}

}  // namespace lockstep::cli
