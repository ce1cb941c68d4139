#include "cli/nodes.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <vector>

#include "support/free_port.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {

sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return address;
}

std::string free_rendezvous() {
  static std::vector<std::unique_ptr<FreePort>> ports;  // no other process's while this one runs
  ports.push_back(std::make_unique<FreePort>());
  return fmt::format("127.0.0.1:{}", ports.back()->number());
}

base::UniqueFd connect_to(const std::string& rendezvous) {
  const sockaddr_in address = loopback(std::stoi(rendezvous.substr(rendezvous.find(':') + 1)));
  base::UniqueFd fd;
  const auto connect = [&] {
    fd.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    return ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  };
  EXPECT_TRUE(wait_until(connect)) << "no listener at " << rendezvous;
  return fd;
}

std::unique_ptr<Command> start(const Node& node) {
  std::vector<std::string> arguments = {"run",
                                        "--nnodes",
                                        std::to_string(node.n_nodes),
                                        "--node-rank",
                                        std::to_string(node.node_rank),
                                        "--rdzv",
                                        node.rendezvous,
                                        "-n",
                                        std::to_string(node.n_ranks),
                                        "--rdzv-timeout",
                                        node.timeout_s};
  arguments.insert(arguments.end(), node.options.begin(), node.options.end());
  const std::vector<std::string> script{"sh", "-c", node.script};
  const std::vector<std::string>& program = node.program.empty() ? script : node.program;
  arguments.insert(arguments.end(), program.begin(), program.end());
  return std::make_unique<Command>(
      StartOptions{.arguments = arguments, .variables = node.variables, .shell = node.shell});
}

}  // namespace lockstep::test
