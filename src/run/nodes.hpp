#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.hpp"
#include "run/elastic_membership.hpp"
#include "run/node_lease.hpp"
#include "run/node_sockets.hpp"
#include "run/options.hpp"
#include "run/rank_layout.hpp"
#include "run/signals.hpp"

namespace lockstep::run {

/// A launcher's world on one machine. Throws what choose_master_port throws.
RankLayout single_node_layout(int n_ranks, const std::string& run_id);

class Link;
struct NodeMessage;
struct ReceivedMessage;
struct NodeCommand;

/// This launcher's connection to the other nodes, for one start of the ranks: node 0 listens, the
/// others connect. It carries the number of ranks per node, the ranks' addresses, what they ask of
/// their store and how each node ended, in an elastic job also what ElasticMembership is told and
/// decides: control messages only, no data of ranks. A peer that does not prove the secret is
/// rejected; a node that does is trusted (LinkKey). Nothing is encrypted.
class Nodes {
 public:
  /// Waits until all nodes have connected, or in an elastic job that runs, until node 0 lets this
  /// one join. `run_id`: that of node 0 is used on all. left_job: RankLayout::key of the job that
  /// this node was cut off from, and joins again; 0: none. Throws
  /// Interrupted and, with host and port in the text: TimeoutError, MismatchError (nodes disagree),
  /// UsageError (no such host), PeerLost, SystemError.
  Nodes(const Options& options, int n_restarts, const std::string& run_id, const Signals& signals,
        std::uint32_t left_job = 0);
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
  /// To node 0, or from it to the node of the rank.
  void send(const StoreMessage& store);
  std::vector<StoreMessage> take_store_messages() { return std::exchange(store_messages_, {}); }
  /// Reports that all ranks here succeeded, once.
  void report_done();
  /// Only the first failure is reported.
  void report_failed(const NodeFailure& failure);
  /// All nodes are done, or one has failed.
  bool over() const noexcept { return over_; }

  // --- an elastic job: node 0

  /// What the members have reported.
  std::vector<NodeEvent> take_events() { return std::exchange(events_, {}); }
  /// Nodes that ask to be members.
  std::vector<int> joining() const;
  void welcome(int node, int incarnation);
  /// What comes from it is ignored from now on.
  void drop(int node);
  void send(int node, const NodeCommand& command);
  /// "node 1 (its host name)"
  std::string name_of(int node) const;
  /// No process of the job runs any more.
  void end();

  // --- an elastic job: the other nodes

  void report(NodeEvent event);
  /// In their order.
  std::vector<NodeCommand> take_commands();
  /// See NodeLease.
  NodeLease::Clock::time_point lease_until() const { return lease_.until(); }
  /// Whether the lease has run out, or node 0 has closed the connection: the ranks must end.
  bool is_cut_off() const;
  /// Until there is something to send.
  std::chrono::milliseconds idle_for() const;

 private:
  using Clock = std::chrono::steady_clock;

  // node 0. ranks_of: how many ranks each node has; 0: it has not connected
  void accept_nodes(const Signals& signals, int n_restarts);
  /// Answers a hello. Returns whether the node may join.
  bool greet(Link& link, const ReceivedMessage& received, int n_restarts,
             std::span<const int> ranks_of);
  /// Of an elastic job that runs: connections that have come.
  void accept_again();
  bool runs() const { return placement_.world_size > 0; }  ///< the job has begun
  void send_layout_to(Link& link);
  Link* link_of(int node) const;
  /// Drops closed links, and the oldest unidentified ones above their limit. shortage: the errno
  /// value with which a connection could not be accepted; 0: none.
  void drop_links(int shortage);
  [[noreturn]] void fail_missing(const std::vector<int>& ranks_of);
  void send_layout(std::vector<int> ranks_of);
  // the other nodes
  struct Closed {  // the connection, by node 0 or on the way
    std::string text;
  };
  void join_node_0(const Signals& signals, int n_restarts);
  void connect_to_node_0(const Signals& signals);
  ReceivedMessage greet_node_0(const Signals& signals, int n_restarts);
  void wait_for_lease(const Signals& signals);
  void beat();
  /// To node 0, or from it to the others, but not to those that ask to be members.
  void send_to_members(const NodeMessage& message, const Link* but = nullptr);
  void reject(Link& link, const std::string& text);
  [[noreturn]] void reject_all(const std::string& text);
  void reject_joining(const std::string& text);
  void finish_if_all_done();
  std::string limit() const;

  bool is_elastic() const { return elastic_.least > 0; }

  NodesOptions options_;
  const ElasticOptions elastic_;
  const int n_ranks_;
  const std::uint32_t left_job_;
  const std::chrono::milliseconds limit_;  // of joining
  base::UniqueFd listener_;
  std::string address_;  // "HOST:PORT"
  Clock::time_point deadline_;
  RankLayout placement_;
  std::string rejected_;                      // why the last peer was rejected
  std::vector<std::unique_ptr<Link>> links_;  // node 0: one to each other; others: one to node 0
  std::vector<RankAddress> addresses_;
  std::vector<StoreMessage> store_messages_;
  std::vector<NodeEvent> events_;
  std::map<int, std::string> host_names_;  // by node
  std::vector<NodeCommand> commands_;
  NodeLease lease_;
  Clock::time_point next_beat_{};
  std::uint64_t n_reports_ = 0;
  int n_done_ = 0;
  bool done_reported_ = false;
  bool over_ = false;
};

}  // namespace lockstep::run
