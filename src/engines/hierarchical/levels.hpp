#pragma once

#include <chrono>
#include <cstddef>
#include <limits>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/engine.hpp>
#include <lockstep/error.hpp>
#include <memory>
#include <string_view>

#include "engines/hierarchical/topology.hpp"
#include "group/native_engine.hpp"
#include "group/step.hpp"

namespace lockstep::hierarchical {

/// The engines of one group, by the ranks that they connect. In a MessageEngine a host is a block
/// of up to 8 ranks.
struct Levels {
  std::unique_ptr<Engine> global;                 ///< all ranks; null if these are shards
  std::unique_ptr<internal::NativeEngine> local;  ///< the ranks of this host
  std::unique_ptr<Engine> leaders;  ///< the leaders of all hosts; null on the other ranks
  Topology topology;
  /// Whether all levels are parts of one channel of messages, which has the numbers of the group's
  /// ranks: one failure ends all levels, and a rank whose time ends finds the late one on any level
  /// (MessageChannel). Ranks that have compared a call then do not compare its further steps.
  bool are_one_channel = false;
  /// A call in which a rank has more than this for each other one goes directly from rank to rank.
  std::size_t most_bytes = std::numeric_limits<std::size_t>::max();
  /// Whether the leaders gather and reduce the inputs of all ranks: hosts' ranks are no subtrees,
  /// so that sums of hosts would give other bits.
  bool reduces_inputs = false;
  /// The limit of the current call, which its steps share.
  detail::TimeLimit limit{std::chrono::milliseconds::max()};
  bool has_compared = false;  ///< with the ranks of this host, in the current call

  /// What reaches other hosts; null on a shard that is not a leader.
  Engine* outside() const noexcept { return global ? global.get() : leaders.get(); }
  int rank() const noexcept { return topology.this_rank; }
  int n_ranks() const noexcept { return static_cast<int>(topology.hosts.size()); }
  int n_hosts() const noexcept { return static_cast<int>(topology.leaders.size()); }
  bool is_leader() const { return topology.leader_of(rank()) == rank(); }
  bool is_on_this_host(int r) const { return topology.leader_of(r) == topology.leader_of(rank()); }

  /// If one level fails in `work`, ends the other levels with the same error: ranks that wait there
  /// would otherwise wait forever. The group does so for an exception that is not an Error.
  template <class Work>
  void fail_all_levels(const Work& work) {
    try {
      work();
    } catch (const UsageError&) {
      throw;
    } catch (const Error& error) {
      end_with(error);
      throw;
    }
  }

  /// Before each call.
  void begin(const Call& call) {
    limit = detail::TimeLimit(call.timeout);
    has_compared = false;
  }
  /// A step of the current call, with what is left of its limit.
  Call limited(Call step) {
    step.timeout = limit.of_step();
    if (step.limit == std::chrono::milliseconds::zero()) step.limit = limit.whole();
    return step;
  }
  /// The same, for the ranks of this host.
  Call on_host(Call step);
  void run_local(const Call& call) { local->run(on_host(call)); }
  /// On a leader: runs the call among all leaders. The other ranks of its host wait that much
  /// longer for it.
  void run_leaders(Call call);
  /// Runs the call among all ranks. A rank that waits for another host delays the ranks of its own
  /// host, which may already be in the next call, but is not itself late.
  void run_global(Call call);
  /// Returns when all ranks have begun the call, of which `call` is a barrier.
  void run_barrier(const Call& call);
  /// A message to or from another host. It involves only two ranks, so the others keep their
  /// timeouts; a rank of this host that times out on this one reports what this one waits for.
  void run_message(const Call& call);
  /// Calls that begin on different levels are not compared with each other, so those that begin on
  /// `global` begin with this: the ranks of a host compare, then the leaders of all hosts. Other
  /// ranks continue meanwhile; if the leaders disagree, they end all levels, which notifies the
  /// other ranks. Over one channel no rank continues before all ranks have compared.
  void compare(const Call& call);
  /// See Engine::refuse: on the levels where ranks wait for this one. A rank of another host waits
  /// for the leader of this one, which finds the refusal here and ends the other levels.
  void refuse(const Refusal& refusal) const noexcept;
  /// On all levels: see Engine.
  void end_with(const Error& error) const noexcept;
  void abandon(std::string_view reason) const noexcept;
};

/// Performs a call over several hosts, in steps within hosts and between their leaders. Not a split
/// or an allocation.
void run_over_hosts(Levels& levels, const Call& call);

using internal::barrier_of;
using internal::step_of;

}  // namespace lockstep::hierarchical
