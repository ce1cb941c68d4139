#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "run/options.hpp"
#include "run/signals.hpp"

namespace lockstep::run {

/// Limit of unidentified connections; the oldest are dropped.
inline constexpr std::size_t kMaxUnidentified = 256;

/// Position of one launcher's ranks in their world.
struct RankLayout {
  int node_rank = 0;
  int n_nodes = 1;
  int first_rank = 0;
  int world_size = 0;
  std::string master_addr;
  std::uint16_t master_port = 0;
  std::string run_id;     ///< TORCHELASTIC_RUN_ID: the same on all nodes and after a restart
  std::uint32_t key = 0;  ///< of several nodes: the same on all, and hardly in another job
  /// The network interface over which the nodes reached each other; empty: one node, or unknown.
  std::string interface {};
  /// Holds the port until rank 0 listens on it: see choose_master_port. Null: the user's port.
  std::shared_ptr<const base::UniqueFd> port_holder = nullptr;
};

/// A launcher's world on one machine. Throws what choose_master_port throws.
RankLayout single_node_layout(int n_ranks, const std::string& run_id);

/// Why a failure on another node ends this node's ranks.
struct NodeFailure {
  int exit_code;
  bool interrupted;  ///< by a signal to a launcher: no restart
  std::string text;
  int rank = -1;  ///< of the world, that failed; -1: unknown
};

/// What a rank of any node tells the others of its world: see shared::exchange_addresses.
struct RankAddress {
  int rank;
  std::uint64_t world;
  std::string bytes;
};

/// A signal ended the launcher while it waited for the other nodes.
struct Interrupted {
  int signal;
};

class Link;
struct NodeMessage;

/// This launcher's connection to the other nodes, for one start of the ranks: node 0 listens, the
/// others connect. It carries the number of ranks per node, the ranks' addresses and how each node
/// ended: control messages only, no data of ranks. Messages have one size. A peer without the
/// secret is rejected; a node with it is trusted. Nothing is encrypted.
class Nodes {
 public:
  /// Waits until all nodes have connected. `run_id`: that of node 0 is used on all. Throws
  /// Interrupted and, with host and port in the text: TimeoutError, MismatchError (nodes disagree),
  /// UsageError (no such host), PeerLost, SystemError.
  Nodes(const NodesOptions& options, int n_ranks, int n_restarts, const std::string& run_id,
        const Signals& signals);
  ~Nodes();
  Nodes(const Nodes&) = delete;
  Nodes& operator=(const Nodes&) = delete;

  const RankLayout& placement() const noexcept { return placement_; }

  void append_to(std::vector<pollfd>& entries) const;
  /// Processes received messages. Returns the first failure once.
  std::optional<NodeFailure> service();
  /// Sends the address of a rank of this node to the other nodes.
  void send(const RankAddress& address);
  /// Those that service() has received since the last call.
  std::vector<RankAddress> take_addresses() { return std::exchange(addresses_, {}); }
  /// Reports that all ranks here succeeded, once.
  void report_done();
  /// Only the first failure is reported.
  void report_failed(const NodeFailure& failure);
  /// All nodes are done, or one has failed.
  bool over() const noexcept { return over_; }

 private:
  using Clock = std::chrono::steady_clock;

  // node 0. ranks_of: how many ranks each node has; 0: it has not connected
  void accept_nodes(const Signals& signals, int n_ranks, int n_restarts);
  void join(Link& link, const NodeMessage& hello, int n_restarts, std::vector<int>& ranks_of);
  /// Drops closed links, and the oldest unidentified ones above their limit. shortage: the errno
  /// value with which a connection could not be accepted; 0: none.
  void drop_links(int shortage);
  [[noreturn]] void fail_missing(const std::vector<int>& ranks_of);
  void send_layout(const std::vector<int>& ranks_of);
  // the other nodes
  void connect_to_node_0(const Signals& signals);
  NodeMessage greet_node_0(const Signals& signals, int n_ranks, int n_restarts);
  void relay(const NodeMessage& message, const Link& from);
  void reject(Link& link, const std::string& text);
  [[noreturn]] void reject_all(const std::string& text);
  void finish_if_all_done();
  std::string limit() const;

  NodesOptions options_;
  std::string address_;  // "HOST:PORT"
  Clock::time_point deadline_;
  RankLayout placement_;
  std::string rejected_;                      // why the last peer was rejected
  std::vector<std::unique_ptr<Link>> links_;  // node 0: one to each other; others: one to node 0
  std::vector<RankAddress> addresses_;
  int n_done_ = 0;
  bool done_reported_ = false;
  bool over_ = false;
};

}  // namespace lockstep::run
