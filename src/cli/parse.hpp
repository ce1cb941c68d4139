#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

namespace lockstep::cli {

/// Parses what follows a subcommand. The exit code where that ends it: its help was asked for, or
/// the line is wrong, which standard error then says.
std::optional<int> parse(CLI::App& app, const std::vector<std::string>& words);

/// Takes numbers from `least` to `most`. `what` says in words what they are.
template <class Number>
CLI::Validator number(Number least, Number most, const char* what) {
  return CLI::Validator(
      [least, most, what](const std::string& text) -> std::string {
        Number value{};
        const char* end = text.data() + text.size();
        const auto [rest, error] = std::from_chars(text.data(), end, value);
        if (error == std::errc() && rest == end && value >= least && value <= most) return {};
        return fmt::format("got '{}', expected {} from {} to {}", text, what, least, most);
      },
      /*validator_desc=*/"");
}

}  // namespace lockstep::cli
