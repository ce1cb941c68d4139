#include "run/guard.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <set>

#include "run/errors.hpp"

namespace lockstep::run {
namespace {

/// Closes all descriptors from `first` on. close_range needs Linux 5.9, and a sandbox may forbid
/// it.
void close_from(int first) {
  if (close_range(static_cast<unsigned>(first), ~0U, 0) == 0) return;
  DIR* const listing = opendir("/proc/self/fd");
  while (const dirent* const entry = listing != nullptr ? readdir(listing) : nullptr) {
    int fd = -1;
    std::from_chars(entry->d_name, entry->d_name + std::strlen(entry->d_name), fd);
    if (fd >= first && fd != dirfd(listing)) close(fd);
  }
  if (listing != nullptr) {
    closedir(listing);
    return;
  }
  const long n_descriptors = sysconf(_SC_OPEN_MAX);
  for (int fd = first; fd < n_descriptors; ++fd) close(fd);
}

[[noreturn]] void guard_main(int pipe, int write_end) {
  close(write_end);  // else the read below has no end
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  setsid();  // out of reach of the terminal and of a kill of the launcher's group
  prctl(PR_SET_NAME, "lockstep-guard");
  // A reader of the launcher's outputs must not wait for the guard to close them.
  dup2(pipe, STDIN_FILENO);
  close_from(STDIN_FILENO + 1);

  std::set<pid_t> groups;
  for (;;) {
    pid_t message = 0;
    const ssize_t n_bytes = read(STDIN_FILENO, &message, sizeof message);
    if (n_bytes < 0 && errno == EINTR) continue;
    if (n_bytes != sizeof message) break;
    if (message > 0) {
      groups.insert(message);
    } else {
      groups.erase(-message);
    }
  }
  for (const pid_t group : groups) ChildGroup(group).signal(SIGKILL);
  _exit(0);
}

void send(int pipe, pid_t message) noexcept {
  while (write(pipe, &message, sizeof message) < 0 && errno == EINTR) {
  }
}

}  // namespace

Guard::Guard() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw system_error("cannot make the guard's pipe");
  const base::UniqueFd read_end(ends[0]);
  pipe_.reset(ends[1]);
  const pid_t pid = fork();
  if (pid < 0) throw start_error("the guard process");
  if (pid == 0) guard_main(read_end.get(), pipe_.get());
  process_ = ChildGroup(pid);
}

Guard::~Guard() {
  pipe_.reset();
  process_.reap();
}

void Guard::add_own_group() const noexcept { send(pipe_.get(), getpid()); }

void Guard::remove_group(pid_t group) const noexcept { send(pipe_.get(), -group); }

}  // namespace lockstep::run
