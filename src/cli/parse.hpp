#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/number.hpp"

namespace lockstep::cli {

/// Parses the arguments of a subcommand. Returns an exit code to end it: help was requested, or the
/// command line is wrong, which is reported on standard error.
std::optional<int> parse(CLI::App& app, const std::vector<std::string>& words);

/// Rejects an empty argument: `--log-dir "$UNSET"`.
inline CLI::Validator not_empty() {
  return CLI::Validator(
      [](const std::string& text) -> std::string {
        return text.empty() ? "the name is empty" : std::string();
      },
      /*validator_desc=*/"");
}

/// Accepts numbers from `least` to `most`. `what` describes them.
template <class Number>
CLI::Validator number(Number least, Number most, const char* what) {
  return CLI::Validator(
      [least, most, what](const std::string& text) -> std::string {
        const auto value = base::parse_number<Number>(text);
        if (value && *value >= least && *value <= most) return {};
        return fmt::format("got '{}', expected {} from {} to {}", text, what, least, most);
      },
      /*validator_desc=*/"");
}

/// Accepts the names of an enum's values.
template <class Enum>
CLI::Validator choice(std::map<std::string, Enum> values) {
  return CLI::Validator(
      [values = std::move(values)](std::string& text) -> std::string {
        const auto found = values.find(text);
        if (found != values.end()) {
          text = std::to_string(static_cast<int>(found->second));
          return {};
        }
        std::string names;
        for (const auto& [name, value] : values) names += (names.empty() ? "" : ", ") + name;
        return fmt::format("got '{}', expected one of: {}", text, names);
      },
      /*validator_desc=*/"");
}

}  // namespace lockstep::cli
