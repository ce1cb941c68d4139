#include "run/terminal.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "run/errors.hpp"

namespace lockstep::run {
namespace {

constexpr unsigned short kPrefixWidth = 6;  // "[511] "

void set_non_blocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

}  // namespace

OutputPair open_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw system_error("cannot make a pipe for a rank's output");
  set_non_blocking(ends[0]);
  return {base::UniqueFd(ends[0]), base::UniqueFd(ends[1])};
}

OutputPair open_terminal(int like) {
  OutputPair pair;
  pair.launcher_end.reset(open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC));
  int unlock = 0;
  if (!pair.launcher_end || ioctl(pair.launcher_end.get(), TIOCSPTLCK, &unlock) != 0) {
    throw system_error("cannot make a terminal for a rank's output");
  }
  // Via the master's descriptor, so it works if /dev/pts is a different mount.
  pair.rank_end.reset(ioctl(pair.launcher_end.get(), TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC));
  if (!pair.rank_end) throw system_error("cannot open a terminal for a rank's output");

  termios mode{};
  tcgetattr(pair.rank_end.get(), &mode);
  cfmakeraw(&mode);
  tcsetattr(pair.rank_end.get(), TCSANOW, &mode);
  winsize size{};
  if (ioctl(like, TIOCGWINSZ, &size) == 0 && size.ws_col > kPrefixWidth) {
    size.ws_col = static_cast<unsigned short>(size.ws_col - kPrefixWidth);
    ioctl(pair.rank_end.get(), TIOCSWINSZ, &size);
  }
  set_non_blocking(pair.launcher_end.get());
  return pair;
}

}  // namespace lockstep::run
