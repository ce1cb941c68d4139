#include "engines/shared/bootstrap/launcher_socket.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <lockstep/error.hpp>
#include <string>

#include "base/fd_message.hpp"
#include "base/text.hpp"

namespace lockstep::shared {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::uint64_t kNextWorld = 0x646c726f77747865ULL;

/// With the descriptor of a segment, or why there is none.
struct LauncherReply {
  std::uint64_t request;
  std::int32_t error_number;
  std::array<char, 512> text;
};

/// Waits until the socket can be read. Returns false if the limit passed first.
bool wait_for_answer(int socket, milliseconds limit) {
  const auto end = Clock::now() + std::min<milliseconds>(limit, std::chrono::hours(24 * 365));
  while (true) {
    pollfd entry{.fd = socket, .events = POLLIN, .revents = 0};
    const auto left = std::chrono::ceil<milliseconds>(end - Clock::now()).count();
    const int timeout_ms = static_cast<int>(std::clamp<milliseconds::rep>(left, 0, 1000));
    if (::poll(&entry, 1, timeout_ms) > 0) return true;
    if (left <= 0) return false;
  }
}

}  // namespace

LauncherSocket make_launcher_socket() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw SystemError({.operation = "lockstep run"}, errno, "cannot make a socket for a rank");
  }
  return {.launcher = base::UniqueFd(ends[0]), .rank = base::UniqueFd(ends[1])};
}

base::UniqueFd request_next_world(int socket, int rank, const Call& barrier) {
  const ErrorContext context = context_of(barrier, rank);
  if (::send(socket, &kNextWorld, sizeof kNextWorld, MSG_NOSIGNAL) != sizeof kNextWorld) {
    throw SystemError(
        context, errno,
        fmt::format(
            "cannot ask `lockstep run` for another world over descriptor {}, which this rank "
            "inherited; close only descriptors that the program opened",
            socket));
  }
  if (!wait_for_answer(socket, barrier.timeout)) {
    throw TimeoutError(
        context, fmt::format("`lockstep run` gave this rank no other world within {:g} s; is it "
                             "stopped?",
                             std::chrono::duration<double>(barrier.timeout).count()));
  }
  LauncherReply answer{};
  base::UniqueFd segment;
  const ssize_t n = base::receive_with_fd(socket, &answer, sizeof answer, segment);
  if (n != sizeof answer || answer.request != kNextWorld) {
    throw PeerLost(context, "`lockstep run`, which started this rank, is gone");
  }
  if (answer.error_number != 0) {
    throw SystemError(
        context, answer.error_number,
        fmt::format("`lockstep run` cannot make another world: {}", base::text_in(answer.text)));
  }
  if (!segment) {
    throw SystemError(
        context, EMFILE,
        "no descriptor is left for the shared memory of another world; raise the limit "
        "on open files (ulimit -n)");
  }
  return segment;
}

LauncherRequest receive_request(int socket) noexcept {
  std::uint64_t request = 0;
  const ssize_t n = ::recv(socket, &request, sizeof request, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return LauncherRequest::none;
  if (n <= 0) return LauncherRequest::closed;
  return n == sizeof request && request == kNextWorld ? LauncherRequest::next_world
                                                      : LauncherRequest::none;
}

void answer(int socket, const Job& next) noexcept {
  const LauncherReply given{.request = kNextWorld, .error_number = 0, .text = {}};
  base::send_with_fd(socket, &given, sizeof given, next.fd());
}

void refuse(int socket, int error_number, std::string_view text) noexcept {
  LauncherReply given{.request = kNextWorld, .error_number = error_number, .text = {}};
  base::copy_text(given.text, text);
  base::send_with_fd(socket, &given, sizeof given, /*fd=*/-1);
}

}  // namespace lockstep::shared
