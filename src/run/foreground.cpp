#include "run/foreground.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <initializer_list>

#include "base/close_from.hpp"

namespace lockstep::run {
namespace {

/// A real-time signal: the relay takes pending ones of the terminal first (signal(7)).
const int kEndRelay = SIGRTMIN;

sigset_t set_of(std::initializer_list<int> signals) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : signals) sigaddset(&set, signal);
  return set;
}

/// Of a background process that writes or gives the foreground away: the launcher does both while a
/// rank has the foreground.
void block_sigttou(bool is_blocked) noexcept {
  const sigset_t set = set_of({SIGTTOU});
  sigprocmask(is_blocked ? SIG_BLOCK : SIG_UNBLOCK, &set, nullptr);
}

[[noreturn]] void relay_main(pid_t launcher, pid_t launchers_group) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(0);
  prctl(PR_SET_NAME, "lockstep-relay");
  base::close_from(STDIN_FILENO);
  const sigset_t set = set_of({SIGINT, SIGQUIT, SIGHUP, kEndRelay});
  for (;;) {
    siginfo_t info{};
    const int signal = sigwaitinfo(&set, &info);
    if (signal == kEndRelay) _exit(0);
    // Not what the launcher, or a process of the rank, sends to the rank's group.
    if (signal > 0 && info.si_code == SI_KERNEL) kill(-launchers_group, signal);
  }
}

}  // namespace

Foreground::Foreground() : terminal_(open("/dev/tty", O_RDWR | O_NOCTTY | O_CLOEXEC)) {}

Foreground::~Foreground() { end(); }

bool Foreground::rules(int fd) noexcept { return tcgetpgrp(fd) >= 0; }

bool Foreground::is_own() const noexcept {
  return terminal_ && tcgetpgrp(terminal_.get()) == getpgrp();
}

void Foreground::start_relay(pid_t group) noexcept {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before);
  const pid_t launcher = getpid();
  const pid_t launchers_group = getpgrp();
  const pid_t pid = fork();
  if (pid == 0) relay_main(launcher, launchers_group);
  if (pid > 0) setpgid(pid, group);
  sigprocmask(SIG_SETMASK, &before, nullptr);
  relay_ = ChildGroup(pid);
}

bool Foreground::lend_to(const ChildGroup& rank) noexcept {
  if (!is_own()) return false;
  if (relay_.leader() == 0) start_relay(rank.leader());
  if (termios mode{}; !mode_ && tcgetattr(terminal_.get(), &mode) == 0) mode_ = mode;
  block_sigttou(true);
  borrower_ = rank.leader();
  tcsetpgrp(terminal_.get(), borrower_);
  return true;
}

void Foreground::take_back() noexcept {
  if (borrower_ == 0) return;
  if (tcgetpgrp(terminal_.get()) == borrower_) tcsetpgrp(terminal_.get(), getpgrp());
  borrower_ = 0;
  block_sigttou(false);
}

void Foreground::end() noexcept {
  take_back();
  // A rank that was killed at a prompt has left the terminal without echo.
  if (mode_ && is_own()) tcsetattr(terminal_.get(), TCSANOW, &*mode_);
  mode_.reset();
  // A terminal signals the whole group before any process of it can end, so the relay has it.
  for (const int signal : {kEndRelay, SIGCONT}) relay_.signal_leader(signal);
  relay_.reap();
}

}  // namespace lockstep::run
