#include "engines/hierarchical/hierarchical.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <lockstep/error.hpp>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "engines/hierarchical/hosts.hpp"
#include "engines/hierarchical/levels.hpp"
#include "engines/hierarchical/topology.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "group/native_engine.hpp"
#include "group/step.hpp"

namespace lockstep::hierarchical {
namespace {

/// The ranks of `global` that are leaders of `part`; null on the other ranks, and if this is the
/// only host. Collective: the other ranks split off too.
std::unique_ptr<Engine> leaders_of(Engine& global, const Topology& topology, int rank, int part,
                                   Call call) {
  call.op = Op::split;
  const bool is_leader = topology.leader_of(rank) == rank;
  auto leaders = global.split(call, /*color=*/2 * part + (is_leader ? 0 : 1), /*key=*/rank);
  return is_leader && topology.leaders.size() > 1 ? std::move(leaders) : nullptr;
}

/// Of a topology of ranks, of which rank r is counts[r] shards, that of this rank's i-th shard.
Topology topology_of_shard(const Topology& ranks, std::span<const int> counts, int i) {
  std::vector<int> firsts(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), firsts.begin(), 0);
  std::vector<int> hosts;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    const int leader = ranks.leader_of(static_cast<int>(r));
    hosts.insert(hosts.end(), static_cast<std::size_t>(counts[r]),
                 firsts[static_cast<std::size_t>(leader)]);
  }
  return {std::move(hosts), firsts[static_cast<std::size_t>(ranks.this_rank)] + i};
}

/// See NativeEngine::divide. locals: of this rank's shards, over the memory of its host. leaders:
/// of the hosts' lowest ranks, whose first shards use them; null on the other ranks.
/// adds_in_tree: they reduce in the order of the tree.
std::vector<std::unique_ptr<Engine>> shards_of(
    std::vector<std::unique_ptr<shared::HostEngine>> locals, std::unique_ptr<Engine> leaders,
    const Topology& ranks, std::span<const int> counts, bool adds_in_tree);

class HierarchicalEngine final : public internal::NativeEngine {
 public:
  /// The engines are left to the caller if there is no memory for this one.
  HierarchicalEngine(std::unique_ptr<Engine>&& global, std::unique_ptr<shared::HostEngine>&& local,
                     std::unique_ptr<Engine>&& leaders, Topology&& topology,
                     bool reduces_inputs = false) noexcept
      : host_(*local),
        levels_{.global = std::move(global),
                .local = std::move(local),
                .leaders = std::move(leaders),
                .topology = std::move(topology),
                .reduces_inputs = reduces_inputs} {}

  std::string_view name() const noexcept override { return "hierarchical"; }
  int rank() const noexcept override { return levels_.rank(); }
  int size() const noexcept override { return levels_.n_ranks(); }
  bool reduces_moments() const noexcept override {
    return levels_.n_hosts() > 1 && !levels_.reduces_inputs;
  }

  std::string_view why_one_thread() const noexcept override {
    return levels_.outside() ? levels_.outside()->why_one_thread() : std::string_view();
  }
  void run(const Call& call) override {
    levels_.begin(call);
    levels_.fail_all_levels([&] {
      if (levels_.n_hosts() == 1) return levels_.local->run(call);
      run_over_hosts(levels_, call);
    });
  }

  std::unique_ptr<Engine> split(const Call& call, int color, int key) override {
    std::unique_ptr<Engine> engine;
    levels_.begin(call);
    levels_.fail_all_levels([&] {
      levels_.compare(call);
      if (!levels_.global) {
        engine = duplicate(call, color, key);
        return;
      }
      // All steps use the existing group, which fails on all ranks if one fails: on the new group,
      // ranks would wait for a rank that could not create it.
      struct Choice {
        int color, key, leader, rank;
      };
      auto all =
          internal::gather_values(*levels_.global, levels_.limited(call),
                                  Choice{color, key, levels_.topology.leader_of(rank()), rank()});
      std::erase_if(all, [color](const Choice& choice) { return choice.color != color; });
      const int part = all.front().rank;  // a number that no other part has
      std::ranges::stable_sort(all, {}, &Choice::key);
      std::vector<int> hosts;
      for (const Choice& choice : all) {
        hosts.push_back(
            static_cast<int>(std::ranges::find(all, choice.leader, &Choice::leader) - all.begin()));
      }
      auto global = levels_.global->split(levels_.limited(call), color, key);
      auto local = host_.split_host(levels_.on_host(call), color, /*key=*/global->rank());
      Topology topology(std::move(hosts), global->rank());
      auto leaders =
          leaders_of(*levels_.global, topology, global->rank(), part, levels_.limited(call));
      engine = std::make_unique<HierarchicalEngine>(std::move(global), std::move(local),
                                                    std::move(leaders), std::move(topology));
    });
    return engine;
  }

  std::unique_ptr<SharedMemory> allocate(const Call& call) override {
    std::unique_ptr<SharedMemory> memory;
    levels_.begin(call);
    levels_.fail_all_levels([&] {
      memory = levels_.local->allocate(levels_.on_host(call));
      if (levels_.n_hosts() == 1) return;
      levels_.compare(call);
      levels_.run_local(barrier_of(call));  // until the leaders have compared
    });
    return memory;
  }

  void refuse(const Refusal& refusal) noexcept override { levels_.refuse(refusal); }
  void abandon(std::string_view reason) noexcept override { levels_.abandon(reason); }
  void end_with(const Error& error) noexcept override { levels_.end_with(error); }

  void leave(std::string_view failure) noexcept override {
    levels_.local->leave(failure);
    if (levels_.outside()) levels_.outside()->leave(failure);
  }

  std::vector<std::unique_ptr<Engine>> divide(const Call& call,
                                              std::span<const int> counts) override {
    if (!levels_.global) throw UsageError(context_of(call, rank()), "shards have no shards");
    std::vector<std::unique_ptr<Engine>> engines;
    levels_.begin(call);
    levels_.fail_all_levels([&] {
      levels_.compare(call);
      std::vector<int> of_members;
      for (const int member : levels_.topology.members) {
        of_members.push_back(counts[static_cast<std::size_t>(member)]);
      }
      auto locals = host_.divide_host(levels_.on_host(call), of_members);
      auto leaders =
          leaders_of(*levels_.global, levels_.topology, rank(), /*part=*/0, levels_.limited(call));
      engines = shards_of(std::move(locals), std::move(leaders), levels_.topology, counts,
                          dynamic_cast<internal::NativeEngine*>(levels_.global.get()) != nullptr);
    });
    return engines;
  }

 private:
  /// The only groups that shards can have over several hosts: only each host's first one sends to
  /// others.
  std::unique_ptr<Engine> duplicate(const Call& call, int color, int key) {
    struct Choice {
      int color, key;
    };
    const auto all = internal::gather_values(*this, call, Choice{color, key});
    const bool is_same = std::ranges::all_of(
        all, [&](const Choice& choice) { return choice.color == all.front().color; });
    if (!is_same || !std::ranges::is_sorted(all, {}, &Choice::key)) {
      throw UsageError(context_of(call, rank()),
                       "shards over several hosts cannot be split into other groups; make these "
                       "of the ranks, outside of run_shards");
    }
    auto local = host_.split_host(levels_.on_host(call), color, key);
    std::unique_ptr<Engine> leaders;
    if (levels_.leaders) {
      Call between = levels_.limited(call);
      between.ranks = levels_.topology.leaders;
      leaders = levels_.leaders->split(between, color, key);
    }
    return std::make_unique<HierarchicalEngine>(nullptr, std::move(local), std::move(leaders),
                                                Topology(levels_.topology), levels_.reduces_inputs);
  }

  shared::HostEngine& host_;  // levels_.local
  Levels levels_;
};

std::vector<std::unique_ptr<Engine>> shards_of(
    std::vector<std::unique_ptr<shared::HostEngine>> locals, std::unique_ptr<Engine> leaders,
    const Topology& ranks, std::span<const int> counts, bool adds_in_tree) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (std::size_t i = 0; i < locals.size(); ++i) {
    Topology topology = topology_of_shard(ranks, counts, static_cast<int>(i));
    const bool reduces_inputs = !adds_in_tree || !topology.are_nodes();
    // Of the first shard, where this rank is a leader; null afterwards.
    engines.push_back(std::make_unique<HierarchicalEngine>(
        nullptr, std::move(locals[i]), std::move(leaders), std::move(topology), reduces_inputs));
  }
  return engines;
}

}  // namespace

std::vector<std::unique_ptr<Engine>> divide(internal::NativeEngine& ranks, const Call& call,
                                            std::span<const int> counts) {
  std::vector<int> hosts(counts.size());
  std::iota(hosts.begin(), hosts.end(), 0);
  auto locals = shared::ranks_of_threads(counts[static_cast<std::size_t>(ranks.rank())]);
  return shards_of(std::move(locals), ranks.split(call, /*color=*/0, /*key=*/ranks.rank()),
                   Topology(std::move(hosts), ranks.rank()), counts, /*adds_in_tree=*/true);
}

std::unique_ptr<Engine> make(std::unique_ptr<Engine> global, const std::vector<int>& hosts,
                             const Call& barrier, const std::optional<std::string>& tune,
                             std::unique_ptr<shared::HostEngine> local) {
  Topology topology(hosts, global->rank());
  if (topology.leaders.size() == hosts.size()) return global;
  try {
    if (!local) {
      const std::vector<std::uint64_t> nonces =
          internal::gather_values(*global, barrier, draw_nonce());
      const auto leader = static_cast<std::size_t>(topology.leader_of(global->rank()));
      Call step = barrier;
      if (topology.leaders.size() > 1) step.ranks = topology.members;
      local = shared::bootstrap_world(fmt::format("hierarchical {:016x}", nonces[leader]),
                                      topology.local_rank_of(global->rank()),
                                      static_cast<int>(topology.members.size()), step, tune);
    }
    auto leaders = topology.leaders.size() == 1
                       ? nullptr
                       : leaders_of(*global, topology, global->rank(), /*part=*/0, barrier);
    return std::make_unique<HierarchicalEngine>(std::move(global), std::move(local),
                                                std::move(leaders), std::move(topology));
  } catch (const std::exception& error) {
    global->abandon(error.what());
    throw;
  }
}

}  // namespace lockstep::hierarchical
