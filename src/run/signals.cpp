#include "run/signals.hpp"

#include <sys/signalfd.h>
#include <unistd.h>

#include "run/errors.hpp"

namespace lockstep::run {

Signals::Signals() {
  // A parent may have left SIGCHLD ignored, and then there would be no exit status.
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &action, nullptr);

  sigset_t wanted;
  sigemptyset(&wanted);
  sigaddset(&wanted, SIGCHLD);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGTSTP}) {
    struct sigaction old {};
    sigaction(number, nullptr, &old);
    if (old.sa_handler != SIG_IGN) sigaddset(&wanted, number);
  }
  fd_.reset(signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) throw system_error("cannot make a signal descriptor");

  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &old_pipe_);
  sigaction(SIGXFSZ, &ignore, &old_file_size_);
  sigprocmask(SIG_BLOCK, &wanted, &old_mask_);
}

Signals::~Signals() { restore(); }

std::optional<Signal> Signals::next() const {
  signalfd_siginfo info{};
  if (read(fd_.get(), &info, sizeof info) != sizeof info) return std::nullopt;
  return Signal{static_cast<int>(info.ssi_signo), static_cast<pid_t>(info.ssi_pid)};
}

bool Signals::stop_by(int signal, bool whole_group) noexcept {
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, signal);
  sigset_t resume;
  sigemptyset(&resume);
  sigaddset(&resume, SIGCONT);
  sigset_t before;
  sigprocmask(SIG_BLOCK, &resume, &before);  // then it stays pending, if it comes
  kill(whole_group ? 0 : getpid(), signal);
  sigprocmask(SIG_UNBLOCK, &stop, nullptr);  // stops here
  const timespec no_time{};
  const bool was_stopped = sigtimedwait(&resume, nullptr, &no_time) == SIGCONT;
  sigprocmask(SIG_SETMASK, &before, nullptr);
  return was_stopped;
}

void Signals::restore() const noexcept {
  sigaction(SIGPIPE, &old_pipe_, nullptr);
  sigaction(SIGXFSZ, &old_file_size_, nullptr);
  sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
}

}  // namespace lockstep::run
