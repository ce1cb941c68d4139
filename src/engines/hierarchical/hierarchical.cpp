#include "engines/hierarchical/hierarchical.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <lockstep/error.hpp>
#include <utility>
#include <vector>

#include "engines/hierarchical/host_collectives.hpp"
#include "engines/hierarchical/hosts.hpp"
#include "engines/hierarchical/levels.hpp"
#include "engines/hierarchical/topology.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"

namespace lockstep::hierarchical {
namespace {

/// The engine between the leaders of `outer`; unused on its other ranks. Collective.
std::unique_ptr<Engine> leaders_of(Engine& outer, const Topology& topology, Call call) {
  if (topology.leaders.size() == 1) return nullptr;
  call.op = Op::split;
  const bool is_leader = topology.leader_of(outer.rank()) == outer.rank();
  return outer.split(call, /*color=*/is_leader ? 0 : 1, /*key=*/outer.rank());
}

/// Ends `engine` on all ranks because of an error found elsewhere, of any type.
void end(Engine& engine, const std::exception& error) noexcept {
  if (const auto* const known = dynamic_cast<const Error*>(&error)) {
    engine.end_with(*known);
  } else {
    engine.abandon(error.what());
  }
}

class HierarchicalEngine final : public Engine {
 public:
  /// The engines are left to the caller if there is no memory for this one.
  HierarchicalEngine(std::unique_ptr<Engine>&& outer, std::unique_ptr<Engine>&& inner,
                     std::unique_ptr<Engine>&& between, Topology&& topology) noexcept
      : levels_{std::move(outer), std::move(inner), std::move(between), std::move(topology)} {}

  std::string_view name() const noexcept override { return "hierarchical"; }
  int rank() const noexcept override { return levels_.rank(); }
  int size() const noexcept override { return levels_.n_ranks(); }
  bool reduces_moments() const noexcept override { return levels_.n_hosts() > 1; }

  std::string_view why_one_thread() const noexcept override {
    return levels_.outer->why_one_thread();
  }
  void run(const Call& call) override {
    levels_.limit = base::TimeLimit(call.timeout);
    levels_.together([&] {
      if (levels_.n_hosts() == 1) return levels_.within([&] { levels_.inner->run(call); }, call);
      run_over_hosts(levels_, call);
    });
  }

  std::unique_ptr<Engine> split(const Call& call, int color, int key) override {
    std::unique_ptr<Engine> engine;
    levels_.limit = base::TimeLimit(call.timeout);
    levels_.together([&] {
      levels_.compare(call);
      auto outer = levels_.outer->split(levels_.limited(call), color, key);
      try {
        std::vector<int> old;  // this group's leaders, by rank of the new group
        levels_.in_new_group(
            [&] {
              old =
                  gather_values(*outer, levels_.limited(call), levels_.topology.leader_of(rank()));
            },
            call);
        std::vector<int> hosts;  // the same as ranks of the new group
        for (const int host : old) {
          hosts.push_back(static_cast<int>(std::find(old.begin(), old.end(), host) - old.begin()));
        }
        std::unique_ptr<Engine> inner;
        levels_.within(
            [&] {
              inner = levels_.inner->split(levels_.limited(call), color, /*key=*/outer->rank());
            },
            call);
        Topology topology(std::move(hosts), outer->rank());
        std::unique_ptr<Engine> between;
        levels_.in_new_group([&] { between = leaders_of(*outer, topology, levels_.limited(call)); },
                             call);
        engine = std::make_unique<HierarchicalEngine>(std::move(outer), std::move(inner),
                                                      std::move(between), std::move(topology));
      } catch (const std::exception& error) {
        end(*outer, error);  // its ranks on other hosts may already wait there
        throw;
      }
    });
    return engine;
  }

  std::unique_ptr<SharedMemory> allocate(const Call& call) override {
    std::unique_ptr<SharedMemory> memory;
    levels_.limit = base::TimeLimit(call.timeout);
    levels_.together([&] {
      levels_.within([&] { memory = levels_.inner->allocate(levels_.limited(call)); }, call);
      if (levels_.n_hosts() == 1) return;
      levels_.compare(call);
      levels_.run_within(barrier_of(call));  // until the leaders have compared
    });
    return memory;
  }

  void refuse(const Refusal& refusal) noexcept override { levels_.refuse(refusal); }
  void abandon(std::string_view reason) noexcept override { levels_.abandon(reason); }

  void leave(std::string_view failure) noexcept override {
    levels_.inner->leave(failure);
    levels_.outer->leave(failure);
  }

 private:
  Levels levels_;
};

}  // namespace

std::unique_ptr<Engine> make(std::unique_ptr<Engine> outer, const std::vector<int>& hosts,
                             const Call& barrier, const std::optional<std::string>& tune) {
  Topology topology(hosts, outer->rank());
  if (topology.leaders.size() == hosts.size()) return outer;
  try {
    const std::vector<std::uint64_t> nonces = gather_values(*outer, barrier, draw_nonce());
    const auto leader = static_cast<std::size_t>(topology.leader_of(outer->rank()));
    auto inner = shared::bootstrap_world(fmt::format("hierarchical {:016x}", nonces[leader]),
                                         topology.place_of(outer->rank()),
                                         static_cast<int>(topology.members.size()), barrier, tune);
    auto between = leaders_of(*outer, topology, barrier);
    return std::make_unique<HierarchicalEngine>(std::move(outer), std::move(inner),
                                                std::move(between), std::move(topology));
  } catch (const std::exception& error) {
    outer->abandon(error.what());
    throw;
  }
}

}  // namespace lockstep::hierarchical
