#include "run/guard.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <set>

#include "run/errors.hpp"

namespace lockstep::run {
namespace {

[[noreturn]] void guard_main(int pipe) {
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  setsid();  // out of reach of the terminal and of a kill of the launcher's group
  prctl(PR_SET_NAME, "lockstep-guard");
  // A reader of the launcher's outputs must not wait for the guard to close them.
  dup2(pipe, STDIN_FILENO);
  const int null = open("/dev/null", O_WRONLY);
  dup2(null, STDOUT_FILENO);
  dup2(null, STDERR_FILENO);
  close_range(STDERR_FILENO + 1, ~0U, 0);

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
  if (pid == 0) guard_main(read_end.get());
  process_ = ChildGroup(pid);
}

Guard::~Guard() {
  pipe_.reset();
  process_.reap();
}

void Guard::add_own_group() const noexcept { send(pipe_.get(), getpid()); }

void Guard::remove_group(pid_t group) const noexcept { send(pipe_.get(), -group); }

}  // namespace lockstep::run
