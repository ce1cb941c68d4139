#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::cli {

/// Exit code of every subcommand for a wrong command line.
inline constexpr int kUsageExitCode = 2;

/// UsageError, of `lockstep SUBCOMMAND`.
[[noreturn]] void reject(std::string_view subcommand, const std::string& text);

/// `lockstep run`: starts the ranks of a program on this machine. Takes the arguments after the
/// subcommand and returns the exit code. Throws lockstep::Error.
int run(const std::vector<std::string>& arguments);

/// `lockstep bench`: measures collectives, or thresholds of the shared engine.
int bench(const std::vector<std::string>& arguments);

/// `lockstep doctor`: reports on this machine, build and environment, with advice; with
/// `--record DIR`, which rank caused a job to fail.
int doctor(const std::vector<std::string>& arguments);

/// `lockstep top`: shows the current activity of each rank of a running job.
int top(const std::vector<std::string>& arguments);

/// `lockstep trace`: summarises a trace, and merges several.
int trace(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
