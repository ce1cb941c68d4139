#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace lockstep::test {

/// Two network namespaces joined by a cable, for the length of a test.
class Namespaces {
 public:
  Namespaces() {
    is_there_ =
        shell(fmt::format("ip netns add {0} && ip netns add {1} && "
                          "ip link add {2} netns {0} type veth peer name {3} netns {1} && "
                          "ip -n {0} addr add 10.77.0.1/24 dev {2} && "
                          "ip -n {1} addr add 10.77.0.2/24 dev {3} && "
                          "ip -n {0} link set {2} up && ip -n {1} link set {3} up && "
                          "ip -n {0} link set lo up && ip -n {1} link set lo up",
                          name(0), name(1), link(0), link(1)));
  }
  ~Namespaces() {
    for (const int i : {0, 1}) shell(fmt::format("ip netns del {} 2>/dev/null", name(i)));
  }
  Namespaces(const Namespaces&) = delete;
  Namespaces& operator=(const Namespaces&) = delete;

  bool is_there() const { return is_there_; }
  /// Starts a command inside, with its own host name and shared memory.
  static std::string shell_of(int i) {
    return fmt::format("exec ip netns exec {} unshare --uts --ipc \"$@\"", name(i));
  }

 private:
  static std::string name(int i) { return fmt::format("lockstep-{}-{}", ::getpid(), i); }
  static std::string link(int i) { return fmt::format("ls{}-{}", ::getpid(), i); }
  static bool shell(const std::string& line) { return std::system(line.c_str()) == 0; }

  bool is_there_;
};

}  // namespace lockstep::test
