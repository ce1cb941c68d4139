#include "run/guard.hpp"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <set>

#include "base/close_from.hpp"
#include "run/errors.hpp"

namespace lockstep::run {
namespace {

/// Where the other end has closed, the process's signal mask or its disposition of SIGPIPE keeps
/// it.
void send(int channel, pid_t message) noexcept {
  while (write(channel, &message, sizeof message) < 0 && errno == EINTR) {
  }
}

/// False at the end of file, and on an error.
bool receive(int channel, pid_t& message) noexcept {
  ssize_t n_bytes = 0;
  while ((n_bytes = read(channel, &message, sizeof message)) < 0 && errno == EINTR) {
  }
  return n_bytes == sizeof message;
}

[[noreturn]] void guard_main(int channel, int launchers_end) {
  close(launchers_end);  // else the read below has no end
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  setsid();  // out of reach of the terminal and of a kill of the launcher's group
  prctl(PR_SET_NAME, "lockstep-guard");
  // A reader of the launcher's outputs must not wait for the guard to close them.
  dup2(channel, STDIN_FILENO);
  base::close_from(STDIN_FILENO + 1);
  send(STDIN_FILENO, getpid());

  std::set<pid_t> groups;
  for (pid_t message = 0; receive(STDIN_FILENO, message);) {
    if (message > 0) {
      groups.insert(message);
    } else {
      groups.erase(-message);
    }
  }
  for (const pid_t group : groups) ChildGroup(group).signal(SIGKILL);
  _exit(0);
}

}  // namespace

Guard::Guard() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw system_error("cannot make the guard's socket");
  }
  base::UniqueFd guards_end(ends[0]);
  channel_.reset(ends[1]);
  const pid_t pid = fork();
  if (pid < 0) throw start_error("the guard process");
  if (pid == 0) guard_main(guards_end.get(), channel_.get());
  process_ = ChildGroup(pid);
  guards_end.reset();
  if (pid_t message = 0; !receive(channel_.get(), message)) {
    errno = ECHILD;
    throw start_error("the guard process");
  }
}

Guard::~Guard() {
  channel_.reset();
  process_.reap();
}

void Guard::add_own_group() const noexcept { send(channel_.get(), getpid()); }

void Guard::remove_group(pid_t group) const noexcept { send(channel_.get(), -group); }

}  // namespace lockstep::run
