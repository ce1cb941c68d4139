#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <lockstep/lockstep.hpp>
#include <mutex>
#include <string>
#include <vector>

#include "support/seccomp.hpp"

// Conditions under which a rank runs while another has a fault: LOCKSTEP_FAULT_LOAD of faulty_rank.
namespace lockstep::test::rank_loads {

inline const std::string& name() {
  static const char* const text = std::getenv("LOCKSTEP_FAULT_LOAD");
  static const std::string name = text == nullptr ? "" : text;
  return name;
}

/// Whether the campaign does something to the job when all have joined, and makes the file `go`
/// then.
inline bool waits_for_go() { return name() == "stopped-launcher" || name() == "garbage"; }

inline void set_soft_limit(int resource, rlim_t value) {
  rlimit limit{};
  ::getrlimit(static_cast<__rlimit_resource>(resource), &limit);
  limit.rlim_cur = value;
  if (::setrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0) std::abort();
}

/// Descriptors that this program's own files need, where its rank has none left.
class Room {
 public:
  Room() : lock_(mutex()) {
    if (lowered() != 0) set_soft_limit(RLIMIT_NOFILE, lowered() + 64);
  }
  ~Room() {
    if (lowered() != 0) set_soft_limit(RLIMIT_NOFILE, lowered());
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  /// Leaves this process no descriptor.
  static void use_up() {
    const std::lock_guard lock(mutex());
    lowered() = 400;
    set_soft_limit(RLIMIT_NOFILE, lowered());
    while (::open(".", O_RDONLY | O_CLOEXEC) >= 0) {
    }
  }

 private:
  static std::mutex& mutex() {
    static std::mutex& mutex = *new std::mutex;
    return mutex;
  }
  static rlim_t& lowered() {
    static rlim_t value = 0;
    return value;
  }
  std::lock_guard<std::mutex> lock_;
};

/// `ulimit -v`, to what the process has and so much more.
inline void limit_address_space(std::size_t n_bytes_more) {
  std::size_t n_pages = 0;
  std::ifstream("/proc/self/statm") >> n_pages;
  set_soft_limit(RLIMIT_AS,
                 n_pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) + n_bytes_more);
}

/// A child of this rank, which leaves by exit(); before, it may try to call.
inline void fork_a_child(bool calls) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);  // the watchdog
    std::string error = calls ? "none" : "";
    try {
      std::vector<double> data(4);
      if (calls) all_reduce(data);
    } catch (const UsageError&) {
      error.clear();
    } catch (const Error& other) {
      error = other.what();
    }
    if (!error.empty()) std::fprintf(stderr, "a fork of a rank got: %s\n", error.c_str());
    std::exit(error.empty() ? 0 : 1);
  }
  int status = -1;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (status == 0) return;
  std::fprintf(stderr, "a fork of a rank ended with status %d\n", status);
  std::abort();
}

/// A signal whose handler does nothing, every millisecond until all have joined: system calls that
/// wait end with EINTR.
inline void set_signals(bool come) {
  struct sigaction action = {};
  action.sa_handler = [](int) {};
  ::sigaction(SIGALRM, &action, nullptr);
  const timeval period{.tv_sec = 0, .tv_usec = come ? 1000 : 0};
  const itimerval timer{.it_interval = period, .it_value = period};
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

inline void apply_before_init() {
  if (name() == "no-pidfd") forbid(SYS_pidfd_open);
  if (name() == "signals") set_signals(true);
}

/// When all have joined.
inline void apply() {
  if (name() == "signals") set_signals(false);
  if (name() == "descriptors") Room::use_up();
  if (name() == "address-space") limit_address_space(std::size_t{128} << 20U);
  if (name() == "file-size") set_soft_limit(RLIMIT_FSIZE, 64U << 10U);
  if (name() == "fork-exit" || name() == "fork-call") fork_a_child(name() == "fork-call");
}

}  // namespace lockstep::test::rank_loads
