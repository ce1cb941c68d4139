#pragma once

#include <cstddef>
#include <cstdint>
#include <lockstep/types.hpp>
#include <vector>

/// Expected results of collectives, computed on one rank in the simplest way.
namespace lockstep::test {

using Bytes = std::vector<std::byte>;

/// The data of `rank`: pseudo-random elements, small enough that no integer or float overflows.
Bytes values(DType dtype, std::size_t count, std::uint64_t seed, int rank);

/// values() of n ranks, reduced in the order of the tree over ranks (combined_in_tree).
Bytes reduced(DType dtype, ReduceOp op, std::size_t count, std::uint64_t seed, int n_ranks);

/// values() of the ranks of several hosts: in the order of the tree over each host's ranks, then of
/// the tree over the hosts, in the order of their lowest ranks. `hosts`: for each rank the lowest
/// rank on its host.
Bytes reduced_by_host(DType dtype, ReduceOp op, std::size_t count, std::uint64_t seed,
                      const std::vector<int>& hosts);

void append(Bytes& to, const Bytes& what);
/// The rank-th piece of n_bytes.
Bytes piece(const Bytes& all, int rank, std::size_t n_bytes);

}  // namespace lockstep::test
