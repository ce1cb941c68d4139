#include "run/guard.hpp"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <set>

#include "base/close_from.hpp"
#include "run/errors.hpp"

namespace lockstep::run {
namespace {

using base::BootClock;

struct Message {
  pid_t group;                     ///< 0: of the lease
  BootClock::rep lease_until = 0;  ///< 0: there is none
};

/// Where the other end has closed, the process's signal mask or its disposition of SIGPIPE keeps
/// it.
void send(int channel, const Message& message) noexcept {
  while (write(channel, &message, sizeof message) < 0 && errno == EINTR) {
  }
}

/// False at the end of file, and on an error.
bool receive(int channel, Message& message) noexcept {
  ssize_t n_bytes = 0;
  while ((n_bytes = read(channel, &message, sizeof message)) < 0 && errno == EINTR) {
  }
  return n_bytes == sizeof message;
}

/// Returns whether a message may be received; false: the lease has run out.
bool wait_for_message(int channel, BootClock::time_point lease) noexcept {
  while (true) {
    // Also of a lease that has run out: the guard may have been stopped while it was renewed.
    const auto left = std::clamp<BootClock::duration>(
        lease - BootClock::now(), BootClock::duration::zero(), std::chrono::minutes(1));
    pollfd entry{.fd = channel, .events = POLLIN, .revents = 0};
    const auto timeout = std::chrono::ceil<std::chrono::milliseconds>(left);
    if (poll(&entry, 1, static_cast<int>(timeout.count())) > 0) return true;
    if (BootClock::now() >= lease) return false;
  }
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
  send(STDIN_FILENO, {.group = getpid()});

  constexpr auto kNone = BootClock::time_point::max();
  std::set<pid_t> groups;
  const auto kill_all = [&] {
    for (const pid_t group : groups) ChildGroup(group).signal(SIGKILL);
  };
  auto lease = kNone;
  for (Message message{};;) {
    if (!wait_for_message(STDIN_FILENO, lease)) {
      kill_all();
      lease = kNone;
      continue;
    }
    if (!receive(STDIN_FILENO, message)) break;
    if (message.group > 0) {
      groups.insert(message.group);
    } else if (message.group < 0) {
      groups.erase(-message.group);
    } else {
      lease = BootClock::time_point(BootClock::duration(message.lease_until));
    }
  }
  kill_all();
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
  if (Message message{}; !receive(channel_.get(), message)) {
    errno = ECHILD;
    throw start_error("the guard process");
  }
}

Guard::~Guard() {
  channel_.reset();
  process_.reap();
}

void Guard::add_own_group() const noexcept { send(channel_.get(), {.group = getpid()}); }

void Guard::remove_group(pid_t group) const noexcept { send(channel_.get(), {.group = -group}); }

void Guard::set_lease(BootClock::time_point until) const noexcept {
  // A guard that is stopped must not stop its launcher.
  const Message message{.group = 0, .lease_until = until.time_since_epoch().count()};
  ::send(channel_.get(), &message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace lockstep::run
