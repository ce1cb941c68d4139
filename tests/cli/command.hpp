#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.hpp"

namespace lockstep::test {

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct Ended {
  int exit_code = -1;  ///< -1: killed by `signal`
  int signal = 0;
  std::string out;
  std::string err;
};

/// How to start the command.
struct StartOptions {
  std::vector<std::string> arguments = {};            ///< after the command's own name
  std::map<std::string, std::string> variables = {};  ///< over the test's environment
  std::optional<std::string> input = {};              ///< on its stdin; else /dev/null
  bool terminal = false;                              ///< stdout and stderr are one terminal
  bool session = false;    ///< and stdin, which is the controlling terminal of a new session
  std::string shell = {};  ///< a shell line to start it by, where "$@" is the command line
  std::chrono::seconds watchdog{120};  ///< only a hang takes so long
  std::string program = {};            ///< other than `lockstep`
  int missing_call = -1;               ///< a system call that fails with ENOSYS
};

/// Whether missing_call can be had here: a kernel or a sandbox may not have seccomp.
bool can_miss_calls();

/// The real `lockstep` command, or another program, running. Every wait has a watchdog, which kills
/// it and fails the test.
class Command {
 public:
  explicit Command(const StartOptions& start);
  /// Kills the command and whatever it has left.
  ~Command();
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  pid_t pid() const { return pid_; }
  void send(int signal) const;
  /// Types on the terminal of a session.
  void type(const std::string& keys) const;
  /// Reads until `text` has come on stdout or stderr so many times.
  void read_until(const std::string& text, int times = 1);
  /// Reads until is_there; `what`: for the watchdog's text.
  void read_until(const std::function<bool()>& is_there, const std::string& what);
  /// Reads what has come.
  void read_available();
  /// What has been read.
  const std::string& out() const { return ended_.out; }
  const std::string& err() const { return ended_.err; }
  /// Waits for its end, without reading what it writes.
  void wait_unread();
  /// Reads to the end of its outputs and waits for its end.
  Ended wait();
  /// Processes that still run: the command and all its descendants, by a mark in the environment.
  std::vector<pid_t> processes() const;
  void wait_for_processes(std::size_t count) const;
  /// Fails unless all of them end, and unless nothing remains in /dev/shm and among the sockets.
  void expect_nothing_left() const;

 private:
  bool read_some(int timeout_ms);

  std::string mark_;
  std::chrono::seconds watchdog_;
  pid_t pid_ = -1;
  bool reaped_ = false;
  base::UniqueFd out_;
  base::UniqueFd err_;
  Ended ended_;
};

/// Runs `lockstep run` with these arguments to its end; nothing may be left then.
Ended run(const StartOptions& start);
Ended run(const std::vector<std::string>& arguments);

/// A rank that is the shell script `text`.
std::vector<std::string> script(const std::vector<std::string>& options, const std::string& text);

/// Of a shell script: waits for a file, which a test or another rank makes.
inline std::string await_file(const std::string& file) {
  return "until [ -e " + file + " ]; do sleep 0.01; done; ";
}
/// Of a shell script: waits until the process whose pid is in this file has ended, and its parent
/// knows.
inline std::string await_end_of(const std::string& file) {
  return await_file(file) + "while kill -0 $(cat " + file + ") 2>/dev/null; do sleep 0.01; done; ";
}
/// Of a shell script: writes its pid to this file.
inline std::string write_pid(const std::string& file) {
  return "echo $$ > " + file + "~; mv " + file + "~ " + file + "; ";
}

std::vector<std::string> lines_of(const std::string& text);
std::vector<std::string> sorted_lines_of(const std::string& text);

std::string contents_of(const std::string& path);

}  // namespace lockstep::test
