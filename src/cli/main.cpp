#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <exception>
#include <lockstep/error.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "cli/files.hpp"
#include "cli/subcommands.hpp"
#include "run/errors.hpp"

namespace {

struct Subcommand {
  std::string_view name;
  std::string_view summary;
  int (*run)(const std::vector<std::string>& arguments);
};

constexpr std::array kSubcommands = {
    Subcommand{"run", "start a program as N ranks on this machine", lockstep::cli::run},
    Subcommand{"bench", "measure collectives and thresholds on this machine", lockstep::cli::bench},
    Subcommand{"doctor", "check machine, build and environment, with advice",
               lockstep::cli::doctor},
    Subcommand{"top", "show what each rank of a running job is doing", lockstep::cli::top},
    Subcommand{"trace", "summarise where a traced run spent its time", lockstep::cli::trace},
};

std::string help() {
  std::string text =
      "lockstep: distributed training that moves together, or says who stopped.\n\n"
      "Usage: lockstep SUBCOMMAND [OPTIONS] ...\n\nSubcommands:\n";
  for (const Subcommand& subcommand : kSubcommands)
    text += fmt::format("  {:<8}{}\n", subcommand.name, subcommand.summary);
  return text +
         "\n"
         "See lockstep SUBCOMMAND --help for details. To begin:\n"
         "  lockstep run -n 4 -- ./my_program\n\n"
         "Options:\n"
         "  -h,--help   print this help\n"
         "  --version   print the version\n";
}

int dispatch(const std::vector<std::string>& arguments) {
  if (arguments.empty()) {
    fmt::print(stderr, "{}", help());
    return lockstep::cli::kUsageExitCode;
  }
  const std::string& first = arguments.front();
  if (first == "--help" || first == "-h") {
    fmt::print("{}", help());
    return 0;
  }
  if (first == "--version") {
    fmt::print("lockstep {}\n", LOCKSTEP_VERSION);
    return 0;
  }
  for (const Subcommand& subcommand : kSubcommands) {
    if (first == subcommand.name) return subcommand.run({arguments.begin() + 1, arguments.end()});
  }
  const bool is_program = first.starts_with("-n") || first.find('/') != std::string::npos;
  fmt::print(stderr, "lockstep: unknown subcommand '{}'; {}see lockstep --help\n", first,
             is_program ? "a program is started by lockstep run -n N -- ./program; " : "");
  return lockstep::cli::kUsageExitCode;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return dispatch({argv + 1, argv + argc});
  } catch (const lockstep::run::ExecError& error) {
    fmt::print(stderr, "{}\n", lockstep::cli::printable(error.what()));
    return error.exit_code();
  } catch (const lockstep::UsageError& error) {
    fmt::print(stderr, "{}\n", lockstep::cli::printable(error.what()));
    return lockstep::cli::kUsageExitCode;
  } catch (const std::exception& error) {
    const std::string text = lockstep::cli::printable(error.what());
    // Errors of a subcommand begin with its name.
    fmt::print(stderr, "{}{}\n", text.starts_with("lockstep ") ? "" : "lockstep: ", text);
    return 1;
  }
}
