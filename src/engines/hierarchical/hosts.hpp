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

/// Every rank's value, in rank order. Throws what all_gather throws.
template <class T>
std::vector<T> gather_values(Engine& engine, const Call& call, const T& mine) {
  std::vector<T> all(static_cast<std::size_t>(engine.size()));
  const std::vector<std::size_t> counts(all.size(), sizeof(T));
  Call gather = call;
  gather.op = Op::all_gather;
  gather.dtype = DType::u8;
  gather.count = sizeof(T);
  gather.in = &mine;
  gather.out = all.data();
  gather.counts = counts;
  engine.run(gather);
  return all;
}

/// Unique random bits. Throws SystemError.
std::uint64_t draw_nonce();

}  // namespace lockstep::hierarchical
