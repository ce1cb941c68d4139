#pragma once

#include <pthread.h>
#include <signal.h>

#include <cerrno>

namespace lockstep::base {

/// During its lifetime, a write of this thread to a closed connection fails with EPIPE and raises
/// no SIGPIPE: for libraries that write without MSG_NOSIGNAL, such as Gloo. Threads created
/// meanwhile never receive SIGPIPE.
class NoSigpipe {
 public:
  NoSigpipe() noexcept {
    sigset_t pending;
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoSigpipe() {
    const timespec none{};
    while (!was_pending_ && sigtimedwait(&pipe_, nullptr, &none) == -1 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
  bool was_pending_;
};

}  // namespace lockstep::base
