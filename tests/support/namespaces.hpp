#pragma once

#include <string>
#include <vector>

namespace lockstep::test {

/// Why this process cannot create a network namespace; empty: it can.
std::string missing_namespaces();

/// Why no process can create a time namespace; empty: it can.
std::string missing_time_namespaces();

/// Machines for the duration of a test: network namespaces on one switch. Requires root.
class Namespaces {
 public:
  /// Throws if namespaces are supported but these cannot be created.
  /// `rate`: the bandwidth of each machine, in the syntax of tc's tbf ("400mbit"); empty: no limit.
  explicit Namespaces(int n, const std::string& rate = "");
  ~Namespaces();
  Namespaces(const Namespaces&) = delete;
  Namespaces& operator=(const Namespaces&) = delete;

  /// Why they do not exist; empty: they do.
  const std::string& missing() const { return missing_; }
  static std::string address(int i);
  /// Disconnects a machine, and connects it again.
  static void cut(int i);
  static void connect(int i);
  /// All addresses, each with `suffix`: "10.77.0.1:2,10.77.0.2:2".
  std::string addresses(const std::string& suffix) const;
  /// Starts a command on a machine, with its own host name and IPC, for StartOptions::shell.
  /// `n_seconds_ahead`: offset of its CLOCK_MONOTONIC; 0: the clock of the test.
  static std::string shell_of(int i, int n_seconds_ahead = 0);
  /// Reconnects every machine that a program on it has disconnected by `ip link set cable
  /// down`.
  void join_cables() const;
  /// Writes a substitute for ssh to other machines: `agent [-x] ADDRESS COMMAND...`.
  void write_agent(const std::string& path) const;

 private:
  int n_;
  std::string missing_;
};

}  // namespace lockstep::test
