#pragma once

#include <string>
#include <vector>

namespace lockstep::test {

/// Why this process can have no network namespace of its own; empty: it can.
std::string missing_namespaces();

/// Why no process can have a time namespace of its own; empty: it can.
std::string missing_time_namespaces();

/// Machines for the length of a test: network namespaces on one switch. Only root can make them.
class Namespaces {
 public:
  /// Throws where namespaces can be had and yet these cannot be made.
  /// `rate`: what each machine can send, as tc's tbf takes it ("400mbit"); empty: no limit.
  explicit Namespaces(int n, const std::string& rate = "");
  ~Namespaces();
  Namespaces(const Namespaces&) = delete;
  Namespaces& operator=(const Namespaces&) = delete;

  /// Why they are not there; empty: they are.
  const std::string& missing() const { return missing_; }
  static std::string address(int i);
  /// Pulls a machine's cable out.
  static void cut(int i);
  /// All addresses, each with `suffix`: "10.77.0.1:2,10.77.0.2:2".
  std::string addresses(const std::string& suffix) const;
  /// Starts a command on a machine, with its own host name and IPC, as StartOptions::shell.
  /// `n_seconds_ahead`: of its CLOCK_MONOTONIC; 0: it is the test's own.
  static std::string shell_of(int i, int n_seconds_ahead = 0);
  /// Puts back the cable of every machine that a program on it has set down: `ip link set cable
  /// down`.
  void join_cables() const;
  /// Writes what ssh is for machines elsewhere: `agent [-x] ADDRESS COMMAND...`.
  void write_agent(const std::string& path) const;

 private:
  int n_;
  std::string missing_;
};

}  // namespace lockstep::test
