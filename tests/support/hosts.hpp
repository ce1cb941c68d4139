#pragma once

#include <string>

#include "cli/command.hpp"

namespace lockstep::test {

/// What rank 0 of programs/hosts.cpp said.
struct HostsSaid {
  std::string backend;
  int sum = 0;
  int n_local = 0;
  int n_ranks = 0;
  double n_sent = 0;  ///< how often an all_reduce's bytes left host 0
};

HostsSaid read_hosts(const Ended& ended);

/// Fails unless each of `n_hosts` hosts of two ranks sent what one rank has to, and without
/// `hierarchical`, on the same cables, what two have to.
void expect_once_per_host(const HostsSaid& hierarchical, const HostsSaid& flat, int n_hosts);

}  // namespace lockstep::test
