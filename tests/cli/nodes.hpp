#pragma once

#include <netinet/in.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "cli/command.hpp"

// Launchers of one job on several nodes: processes on loopback, or in network namespaces.
namespace lockstep::test {

sockaddr_in loopback(int port);
/// 127.0.0.1 and a port that is free.
std::string free_rendezvous();
/// As soon as somebody listens there.
base::UniqueFd connect_to(const std::string& rendezvous);

struct Node {
  int n_nodes = 2;
  int node_rank = 0;
  std::string rendezvous;
  int n_ranks = 2;
  std::string script;  ///< a rank is this shell script
  std::string timeout_s = "30";
  std::vector<std::string> options = {};
  std::string shell = {};
  std::vector<std::string> program = {};  ///< in place of the script
  std::map<std::string, std::string> variables = {};
};

std::unique_ptr<Command> start(const Node& node);

}  // namespace lockstep::test
