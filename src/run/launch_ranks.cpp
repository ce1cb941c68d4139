#include "run/launch_ranks.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <optional>
#include <random>
#include <string>

#include "base/cpus.hpp"
#include "base/plural.hpp"
#include "run/attempt.hpp"
#include "run/errors.hpp"
#include "run/node_link.hpp"
#include "run/rank_environment.hpp"

namespace lockstep::run {
namespace {

/// Raises the soft limit of open files to the number needed for the ranks and the other launchers.
/// Returns the previous limits.
rlimit raise_file_limit(const Options& options) {
  rlimit before{};
  if (getrlimit(RLIMIT_NOFILE, &before) != 0) throw system_error("cannot read the file limit");
  // Per rank two outputs, two logs and a socket; a few for the segment, the signals, one start and
  // inherited descriptors. On node 0 a connection to each node.
  const bool is_node_0 = options.nodes.n_nodes > 1 && options.nodes.node_rank == 0;
  const rlim_t n_needed = 5 * static_cast<rlim_t>(options.n_ranks) + 64 +
                          (is_node_0 ? static_cast<rlim_t>(options.nodes.n_nodes) : 0);
  // Descriptors for unidentified connections at --rdzv are optional.
  const rlim_t n_wanted = n_needed + (is_node_0 ? kMaxUnidentified : 0);
  if (before.rlim_cur >= n_wanted) return before;
  if (before.rlim_max < n_needed) {
    throw usage_error(
        fmt::format("{} rank{}{} need {} open files, and the limit is {}; raise it (ulimit -Hn, "
                    "/etc/security/limits.conf) or start fewer ranks",
                    options.n_ranks, base::plural(options.n_ranks),
                    is_node_0 ? fmt::format(" and {} nodes", options.nodes.n_nodes) : "", n_needed,
                    before.rlim_max));
  }
  const rlimit raised{.rlim_cur = std::min(n_wanted, before.rlim_max), .rlim_max = before.rlim_max};
  if (setrlimit(RLIMIT_NOFILE, &raised) != 0) throw system_error("cannot raise the file limit");
  return before;
}

/// Keeps our pipes from becoming descriptor 0, 1 or 2 if the caller closed one of these.
void fill_standard_descriptors() {
  while (true) {
    const int fd = open("/dev/null", O_RDWR);
    if (fd < 0) throw system_error("cannot open /dev/null");
    if (fd > STDERR_FILENO) {
      close(fd);
      return;
    }
  }
}

std::string draw_run_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

}  // namespace

int launch_ranks(const Options& options) {
  fill_standard_descriptors();
  const std::string program = find_program(options.command.front());
  const rlimit open_files = raise_file_limit(options);
  const Guard guard;
  const Signals signals;
  OutputMux mux(options.prefix);
  std::vector<int> cores = base::allowed_cores();
  if (options.bind == Bind::core && static_cast<std::size_t>(options.n_ranks) > cores.size()) {
    mux.print_line(fmt::format("--bind core: {} ranks share {} cores, so some wait for each other",
                               options.n_ranks, cores.size()));
  }
  const LaunchContext context{options,    program, draw_run_id(), std::move(cores),
                              open_files, guard,   signals,       mux};
  std::uint32_t left_job = 0;
  for (int n_restarts = 0;;) {
    std::optional<Nodes> nodes;
    if (options.nodes.n_nodes > 1) {
      try {
        nodes.emplace(options, n_restarts, context.run_id, signals, left_job);
      } catch (const Interrupted& interrupted) {
        return 128 + interrupted.signal;
      }
    }
    const Outcome outcome = Attempt(context, n_restarts, nodes ? &*nodes : nullptr).run();
    left_job = outcome.joins_again ? nodes->placement().key : 0;
    if (outcome.joins_again) continue;
    const bool again =
        outcome.exit_code != 0 && !outcome.interrupted && n_restarts < options.max_restarts;
    if (!again) {
      if (outcome.exit_code != 0 || mux.write_error() == 0) return outcome.exit_code;
      return mux.write_error() == EPIPE ? 128 + SIGPIPE : 1;
    }
    ++n_restarts;
    mux.print_line(fmt::format("restart {} of {}: starting all {} ranks again", n_restarts,
                               options.max_restarts, options.n_ranks));
  }
}

}  // namespace lockstep::run
