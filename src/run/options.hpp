#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <lockstep/env.hpp>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::run {

/// Maximum number of ranks per launcher: the capacity of a segment.
inline constexpr int kMaxRanks = 512;

/// The longest secret of launchers.
inline constexpr std::size_t kMaxSecretBytes = 64;

enum class Bind : std::uint8_t {
  none,  ///< ranks run wherever the launcher may
  core,  ///< rank i on the i-th allowed core, modulo their number
};

/// When lines have a rank prefix; `automatic`: if the output is a terminal.
enum class Prefix : std::uint8_t { automatic, always, never };

/// Launchers on several machines that start one world together.
struct NodesOptions {
  int n_nodes = 1;
  int node_rank = 0;
  std::string host;  ///< of node 0, for the other nodes
  std::uint16_t port = 0;
  std::chrono::milliseconds timeout{300'000};  ///< until all nodes have connected
  std::string secret;                          ///< at most kMaxSecretBytes; the same on all nodes
  bool has_ucx = false;                        ///< whether the module of the ucx engine is here
};

/// Going on after a lost rank.
struct ElasticOptions {
  int least = 0;  ///< ranks; 0: the loss of a rank ends the job
  int most = 0;   ///< ranks up to which lost ones are replaced; 0: all of all nodes
  /// Of a replacement, until it asks for a world, and of a lost node, until it returns.
  std::chrono::milliseconds start_limit{300'000};
  std::chrono::milliseconds lease{5000};  ///< of the nodes other than node 0: see NodeLease
};

/// The command line of `lockstep run`.
struct Options {
  int n_ranks = 0;
  std::vector<std::string> command;  ///< the program and its arguments
  std::optional<std::filesystem::path> log_dir;
  Env env;
  int max_restarts = 0;
  std::chrono::milliseconds grace{10'000};  ///< between SIGTERM and SIGKILL
  Bind bind = Bind::none;
  Prefix prefix = Prefix::automatic;
  std::optional<int> stdin_rank = 0;  ///< that gets the launcher's standard input; none: no rank
  NodesOptions nodes;
  ElasticOptions elastic;
};

}  // namespace lockstep::run
