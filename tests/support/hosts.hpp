#pragma once

#include <string>

#include "cli/command.hpp"

namespace lockstep::test {

/// Output of rank 0 of programs/hosts.cpp.
struct HostsSaid {
  std::string backend;
  int sum = 0;
  int n_local = 0;
  int n_ranks = 0;
  double n_sent = 0;  ///< bytes sent by host 0 over the bytes of an all_reduce
};

HostsSaid read_hosts(const Ended& ended);

/// Fails unless each of `n_hosts` hosts of two ranks sent the traffic of one rank and, without
/// `hierarchical` on the same network, that of two.
void expect_once_per_host(const HostsSaid& hierarchical, const HostsSaid& flat, int n_hosts);

}  // namespace lockstep::test
