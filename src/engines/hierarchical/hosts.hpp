#pragma once

#include <lockstep/engine.hpp>
#include <vector>

namespace lockstep::hierarchical {

/// For each rank of `global`, the lowest rank on its host. Two ranks are on one host if they have
/// the same boot id and one can connect to a socket of the other, as the same user and in the same
/// PID namespace: then they can share memory and detect each other's death. Host names are not
/// used: containers and clones may share them. Collective; `call` has the timeout and the caller's
/// source line. Throws what all_gather throws, SystemError.
std::vector<int> find_hosts(Engine& global, const Call& call);

/// Unique random bits. Throws SystemError.
std::uint64_t draw_nonce();

}  // namespace lockstep::hierarchical
