#pragma once

#include <lockstep/engine.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engines/shared/algorithms/host_engine.hpp"

namespace lockstep::hierarchical {

/// Shared memory inside each host, `global` between hosts. all_reduce, reduce, reduce_scatter,
/// broadcast, all_gather and barrier go through one rank of each host, so that their bytes cross
/// between hosts once per host and not once per rank. So do gather, scatter and all_to_all if their
/// parts are short, which joins the messages of a host; longer parts, whose bytes cross only once
/// anyway, and messages between two ranks on different hosts are those of `global`.
///
/// Reductions combine the ranks of each host, then the hosts in the order of their lowest ranks,
/// with the all_reduce of `global`, each in the order of a tree: that over all ranks, if each host
/// has 2^k consecutive ones and the last at most as many. 16-bit floats and means of integers stay
/// wide between hosts and are rounded once. One rank of each host rounds, so all ranks have the
/// same bits if `global` gives its ranks the same bits.
///
/// `hosts`: for each rank the lowest rank on its host (find_hosts). Returns `global` itself if no
/// two ranks share a host. Collective; `barrier` has the timeout and the caller's source line.
/// `local`: of the ranks of this host; null: they find each other, with `tune` (Env::tune). Throws
/// what shared::bootstrap and `global` throw.
std::unique_ptr<Engine> make(std::unique_ptr<Engine> global, const std::vector<int>& hosts,
                             const Call& barrier, const std::optional<std::string>& tune = {},
                             std::unique_ptr<shared::HostEngine> local = nullptr);

/// See NativeEngine::divide: of an engine whose ranks share no memory. The first shard of each rank
/// exchanges with the others', over a duplicate of `ranks`. Throws what its split throws.
std::vector<std::unique_ptr<Engine>> divide(internal::NativeEngine& ranks, const Call& call,
                                            std::span<const int> counts);

}  // namespace lockstep::hierarchical
