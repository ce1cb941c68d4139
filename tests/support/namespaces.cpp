#include "support/namespaces.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace lockstep::test {
namespace {

std::string name(int i) { return fmt::format("lockstep-{}-{}", ::getpid(), i); }
std::string the_switch() { return fmt::format("lockstep-{}-switch", ::getpid()); }

bool shell(const std::string& line) { return std::system(line.c_str()) == 0; }

}  // namespace

std::string missing_namespaces() {
  if (::geteuid() != 0) return "only root can make network namespaces";
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::unshare(CLONE_NEWNET) == 0 ? 0 : errno);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status == 0 ? ""
                     : fmt::format("this system lets root make no network namespaces ({})",
                                   std::strerror(WEXITSTATUS(status)));
}

std::string missing_time_namespaces() {
  if (!std::filesystem::exists("/proc/self/ns/time")) {
    return "this system has no time namespaces (CONFIG_TIME_NS)";
  }
  return shell("unshare --time --monotonic 1 --fork true 2>/dev/null")
             ? ""
             : "this system does not allow time namespaces";
}

Namespaces::Namespaces(int n, const std::string& rate) : n_(n), missing_(missing_namespaces()) {
  if (!missing_.empty()) return;
  std::string lines = fmt::format(
      "set -e; ip netns add {0}; ip -n {0} link add bridge type bridge; "
      "ip -n {0} link set bridge up; ",
      the_switch());
  for (int i = 0; i < n; ++i) {
    lines += fmt::format(
        "ip netns add {0}; ip -n {0} link add cable type veth peer name port{2} netns {1}; "
        "ip -n {1} link set port{2} master bridge up; "
        "ip -n {0} addr add {3}/24 dev cable; ip -n {0} link set cable up; "
        "ip -n {0} link set lo up; ",
        name(i), the_switch(), i, address(i));
    if (!rate.empty()) {
      lines +=
          fmt::format("tc -n {} qdisc add dev cable root tbf rate {} burst 256kb latency 100ms; ",
                      name(i), rate);
    }
  }
  if (!shell(lines)) throw std::runtime_error("could not do: " + lines);
}

Namespaces::~Namespaces() {
  for (int i = 0; i < n_; ++i) shell(fmt::format("ip netns del {} 2>/dev/null", name(i)));
  shell(fmt::format("ip netns del {} 2>/dev/null", the_switch()));
}

std::string Namespaces::address(int i) { return fmt::format("10.77.0.{}", i + 1); }

namespace {

void set_cable(int i, const char* state) {
  const std::string line = fmt::format("ip -n {} link set cable {}", name(i), state);
  if (!shell(line)) throw std::runtime_error("could not do: " + line);
}

}  // namespace

void Namespaces::cut(int i) { set_cable(i, "down"); }

void Namespaces::connect(int i) { set_cable(i, "up"); }

std::string Namespaces::addresses(const std::string& suffix) const {
  std::string all;
  for (int i = 0; i < n_; ++i) {
    all += fmt::format("{}{}{}", all.empty() ? "" : ",", address(i), suffix);
  }
  return all;
}

std::string Namespaces::shell_of(int i, int n_seconds_ahead) {
  const std::string own_time = fmt::format(
      "set -- unshare --time --monotonic {} --fork --kill-child -- \"$@\"; ", n_seconds_ahead);
  return (n_seconds_ahead == 0 ? "" : own_time) +
         fmt::format(
             "exec ip netns exec {} unshare --uts --ipc sh -c 'hostname machine{}; exec \"$@\"' sh "
             "\"$@\"",
             name(i), i);
}

void Namespaces::join_cables() const {
  for (int i = 0; i < n_; ++i) connect(i);
}

void Namespaces::write_agent(const std::string& path) const {
  std::ofstream file(path);
  file << "#!/bin/sh\n[ \"$1\" != -x ] || shift\naddress=$1; shift\nset -- sh -c \"$*\"\n"
       << "case $address in\n";
  for (int i = 0; i < n_; ++i) file << fmt::format("{}) {} ;;\n", address(i), shell_of(i));
  file << "esac\necho \"no machine has address $address\" >&2; exit 1\n";
  file.close();
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
}

}  // namespace lockstep::test
