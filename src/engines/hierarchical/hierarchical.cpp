#include "engines/hierarchical/hierarchical.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <lockstep/error.hpp>
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

class HierarchicalEngine final : public internal::NativeEngine {
 public:
  /// The engines are left to the caller if there is no memory for this one.
  HierarchicalEngine(std::unique_ptr<Engine>&& global, std::unique_ptr<shared::HostEngine>&& local,
                     std::unique_ptr<Engine>&& leaders, Topology&& topology) noexcept
      : host_(*local),
        levels_{std::move(global), std::move(local), std::move(leaders), std::move(topology)} {}

  std::string_view name() const noexcept override { return "hierarchical"; }
  int rank() const noexcept override { return levels_.rank(); }
  int size() const noexcept override { return levels_.n_ranks(); }
  bool reduces_moments() const noexcept override { return levels_.n_hosts() > 1; }

  std::string_view why_one_thread() const noexcept override {
    return levels_.global->why_one_thread();
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
    levels_.global->leave(failure);
  }

 private:
  shared::HostEngine& host_;  // levels_.local
  Levels levels_;
};

}  // namespace

std::unique_ptr<Engine> make(std::unique_ptr<Engine> global, const std::vector<int>& hosts,
                             const Call& barrier, const std::optional<std::string>& tune) {
  Topology topology(hosts, global->rank());
  if (topology.leaders.size() == hosts.size()) return global;
  try {
    const std::vector<std::uint64_t> nonces =
        internal::gather_values(*global, barrier, draw_nonce());
    const auto leader = static_cast<std::size_t>(topology.leader_of(global->rank()));
    Call step = barrier;
    if (topology.leaders.size() > 1) step.ranks = topology.members;
    auto local = shared::bootstrap_world(fmt::format("hierarchical {:016x}", nonces[leader]),
                                         topology.local_rank_of(global->rank()),
                                         static_cast<int>(topology.members.size()), step, tune);
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
