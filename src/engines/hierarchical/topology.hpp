#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

namespace lockstep::hierarchical {

/// The topology of one group, as one of its ranks sees it.
struct Topology {
  std::vector<int> hosts;    ///< for each rank, the lowest rank on its host
  std::vector<int> leaders;  ///< the lowest rank of each host, in order
  std::vector<int> members;  ///< the ranks on this host, in order
  std::vector<int> by_host;  ///< all ranks: those of the first host in order, of the second, ...
  std::size_t max_local_size = 0;  ///< of a host
  int this_rank = 0;

  Topology(std::vector<int> hosts_of_ranks, int rank)
      : hosts(std::move(hosts_of_ranks)), by_host(hosts.size()), this_rank(rank) {
    for (int r = 0; r < static_cast<int>(hosts.size()); ++r) {
      by_host[static_cast<std::size_t>(r)] = r;
      if (leader_of(r) == r) leaders.push_back(r);
      if (leader_of(r) == leader_of(rank)) members.push_back(r);
    }
    std::ranges::stable_sort(by_host, {}, [this](int r) { return leader_of(r); });
    const auto ones = sums_by_host([](int) { return std::size_t{1}; });
    max_local_size = *std::ranges::max_element(ones);
  }
  int leader_of(int rank) const { return hosts[static_cast<std::size_t>(rank)]; }
  /// Index of a rank's host among the leaders.
  int host_of(int rank) const {
    return static_cast<int>(std::lower_bound(leaders.begin(), leaders.end(), leader_of(rank)) -
                            leaders.begin());
  }
  /// Index of a rank of this host among the members.
  int local_rank_of(int rank) const {
    return static_cast<int>(std::lower_bound(members.begin(), members.end(), rank) -
                            members.begin());
  }
  /// Of each host, the sum of value_of(rank) over its ranks.
  template <class ValueOf>
  std::vector<std::size_t> sums_by_host(const ValueOf& value_of) const {
    std::vector<std::size_t> sums;
    for (const int r : by_host) {
      if (leader_of(r) == r) sums.push_back(0);
      sums.back() += value_of(r);
    }
    return sums;
  }
  /// Calls f(rank, slot) for all ranks, if each host has max_local_size slots, for its members in
  /// order.
  template <class F>
  void for_each_slot(const F& f) const {
    std::size_t host = 0, place = 0;
    for (std::size_t i = 0; i < by_host.size(); ++i, ++place) {
      if (i > 0 && leader_of(by_host[i]) == by_host[i]) {
        ++host;
        place = 0;
      }
      f(by_host[i], host * max_local_size + place);
    }
  }
  /// Whether the ranks of each host are consecutive.
  bool is_rank_order() const { return std::ranges::is_sorted(by_host); }
  /// Whether the ranks of each host are a node of the tree over all (docs/design/023): 2^k
  /// consecutive ones, and at most as many on the last.
  bool are_nodes() const {
    const auto sizes = sums_by_host([](int) { return std::size_t{1}; });
    return is_rank_order() && std::has_single_bit(sizes.front()) &&
           std::ranges::all_of(sizes.begin(), sizes.end() - 1,
                               [&](std::size_t size) { return size == sizes.front(); }) &&
           sizes.back() <= sizes.front();
  }

  /// Copies the parts of all ranks, count_of(rank) elements each, from host order to rank order.
  template <class CountOf>
  void to_rank_order(std::span<const std::byte> from, const CountOf& count_of, std::size_t element,
                     void* to) const {
    std::vector<std::size_t> begins(hosts.size() + 1);
    for (std::size_t r = 0; r < hosts.size(); ++r) {
      begins[r + 1] = begins[r] + count_of(static_cast<int>(r)) * element;
    }
    for (const int r : by_host) {
      const std::size_t n_bytes = count_of(r) * element;
      if (n_bytes == 0) continue;
      std::memcpy(static_cast<std::byte*>(to) + begins[static_cast<std::size_t>(r)], from.data(),
                  n_bytes);
      from = from.subspan(n_bytes);
    }
  }
};

}  // namespace lockstep::hierarchical
