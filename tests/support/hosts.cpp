#include "support/hosts.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

namespace lockstep::test {

HostsSaid read_hosts(const Ended& ended) {
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  HostsSaid said;
  char name[64] = "";
  EXPECT_EQ(std::sscanf(ended.out.c_str(), "%63s sum %d local %d of %d sent %lf", name, &said.sum,
                        &said.n_local, &said.n_ranks, &said.n_sent),
            5)
      << ended.out << ended.err;
  std::printf("%s", ended.out.c_str());
  said.backend = name;
  return said;
}

void expect_once_per_host(const HostsSaid& hierarchical, const HostsSaid& flat, int n_hosts) {
  EXPECT_EQ(hierarchical.backend, "hierarchical");
  EXPECT_NE(flat.backend, "hierarchical");
  const int n_ranks = 2 * n_hosts;
  for (const HostsSaid& said : {hierarchical, flat}) {
    EXPECT_EQ(said.sum, static_cast<int>(std::pow(n_ranks, 4)));  // the sum of a sum, four times
    EXPECT_EQ(said.n_local, 2);
    EXPECT_EQ(said.n_ranks, n_ranks);
  }
  // A rank on each host sends all but its own slice, of the sum and of the result; TCP headers and
  // load imbalance add to that.
  const double least = 2.0 * (n_hosts - 1) / n_hosts;
  EXPECT_GT(hierarchical.n_sent, 0.95 * least);
  EXPECT_LT(hierarchical.n_sent, 1.15 * least);
  EXPECT_GT(flat.n_sent, 1.7 * least);
}

}  // namespace lockstep::test
