#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::cli {

/// Exit code of every subcommand when its command line is wrong.
inline constexpr int kUsageExitCode = 2;

/// UsageError, of `lockstep SUBCOMMAND`.
[[noreturn]] void refuse(std::string_view subcommand, const std::string& text);

/// `lockstep run`: starts the ranks of a program on this machine. Takes what follows the subcommand
/// and returns the exit code. Throws lockstep::Error.
int run(const std::vector<std::string>& arguments);

/// `lockstep bench`: measures collectives, alone or beside a peer.
int bench(const std::vector<std::string>& arguments);

/// `lockstep doctor`: what this machine, build and environment have, with advice; with
/// `--record DIR`, which rank made a job fail.
int doctor(const std::vector<std::string>& arguments);

/// `lockstep top`: shows what each rank of a running job does.
int top(const std::vector<std::string>& arguments);

/// `lockstep trace`: a summary of a trace, and one trace of several.
int trace(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
