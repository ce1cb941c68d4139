#include "engines/shared/bootstrap/launcher_socket.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <lockstep/error.hpp>
#include <new>
#include <string>

#include "base/fd_message.hpp"
#include "base/text.hpp"

namespace lockstep::shared {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::uint64_t kNextWorld = 0x646c726f77747865ULL;

struct Request {
  std::uint64_t request;
  std::uint64_t number;
  std::int64_t limit_ms;
  std::int64_t last_generation;
};

/// With the descriptor of a segment, or why there is none. n_lost times Lost and n_joined ranks
/// follow.
struct LauncherReply {
  std::uint64_t request;
  std::uint64_t number;  ///< of the request
  std::int32_t is_refused;
  std::int32_t error_number;
  std::int32_t rank;
  std::int32_t size;
  std::uint32_t generation;
  std::uint32_t n_lost;
  std::uint32_t n_joined;
  std::array<char, 512> text;
};

/// Of a message: a job that lost more ranks at once than this tells of the first.
constexpr std::size_t kMostLost = 512, kMostJoined = 512;
constexpr std::size_t kAnswerBytes =
    sizeof(LauncherReply) + kMostLost * sizeof(Lost) + kMostJoined * sizeof(std::int32_t);

template <class T>
std::vector<T> read_list(const std::byte*& bytes, std::uint32_t n) {
  std::vector<T> list(n);
  if (n > 0) std::memcpy(list.data(), bytes, n * sizeof(T));
  bytes += n * sizeof(T);
  return list;
}

template <class T>
void append(std::vector<std::byte>& bytes, const T* data, std::size_t n) {
  const auto* const first = reinterpret_cast<const std::byte*>(data);
  bytes.insert(bytes.end(), first, first + n * sizeof(T));
}

/// No limit, and still no overflow.
constexpr milliseconds kYear = std::chrono::hours(24 * 365);

/// Waits until the socket can be read. Returns false if `end` comes first.
bool wait_for_answer(int socket, Clock::time_point end) {
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

NextWorld request_next_world(int socket, int rank, std::int64_t last_generation, bool is_elastic,
                             const Call& barrier) {
  const ErrorContext context = context_of(barrier, rank);
  static std::atomic<std::uint64_t> n_requests{0};
  const Request request{.request = kNextWorld,
                        .number = ++n_requests,
                        .limit_ms = barrier.timeout.count(),
                        .last_generation = last_generation};
  if (::send(socket, &request, sizeof request, MSG_NOSIGNAL) != sizeof request) {
    throw SystemError(
        context, errno,
        fmt::format(
            "cannot ask `lockstep run` for another world over descriptor {}, which this rank "
            "inherited; close only descriptors that the program opened",
            socket));
  }
  const auto end = Clock::now() + std::min<milliseconds>(
                                      is_elastic ? milliseconds::max() : barrier.timeout, kYear);
  std::vector<std::byte> bytes(kAnswerBytes);
  NextWorld next;
  ssize_t n = 0;
  LauncherReply answer{};
  do {
    if (!wait_for_answer(socket, end)) {
      throw TimeoutError(
          context, fmt::format("`lockstep run` gave this rank no other world within {:g} s; is it "
                               "stopped?",
                               std::chrono::duration<double>(barrier.timeout).count()));
    }
    next.segment.reset();
    n = base::receive_with_fd(socket, bytes.data(), bytes.size(), next.segment);
    answer = {};
    if (n >= static_cast<ssize_t>(sizeof answer)) {
      std::memcpy(&answer, bytes.data(), sizeof answer);
    }
    // An earlier request has ended by its limit before its answer came.
  } while (answer.request == kNextWorld && answer.number != request.number);
  if (answer.request != kNextWorld || answer.n_lost > kMostLost || answer.n_joined > kMostJoined ||
      static_cast<std::size_t>(n) !=
          sizeof answer + answer.n_lost * sizeof(Lost) + answer.n_joined * sizeof(std::int32_t)) {
    throw PeerLost(context, "`lockstep run`, which started this rank, is gone");
  }
  if (answer.is_refused != 0 && answer.error_number == 0) {
    throw EngineError(context,
                      fmt::format("`lockstep run` ends the job: {}", base::text_in(answer.text)));
  }
  if (answer.is_refused != 0) {
    throw SystemError(
        context, answer.error_number,
        fmt::format("`lockstep run` cannot make another world: {}", base::text_in(answer.text)));
  }
  if (!next.segment) {
    throw SystemError(
        context, EMFILE,
        "no descriptor is left for the shared memory of another world; raise the limit "
        "on open files (ulimit -n)");
  }
  const std::byte* rest = bytes.data() + sizeof answer;
  next.rank = answer.rank;
  next.size = answer.size;
  next.generation = answer.generation;
  next.lost = read_list<Lost>(rest, answer.n_lost);
  next.joined = read_list<std::int32_t>(rest, answer.n_joined);
  return next;
}

LauncherRequest receive_request(int socket) noexcept {
  using Kind = LauncherRequest::Kind;
  LauncherRequest newest{.kind = Kind::none};
  while (true) {
    Request request{};
    const ssize_t n = ::recv(socket, &request, sizeof request, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return newest;
    if (n <= 0) return {.kind = Kind::closed};
    if (n != sizeof request || request.request != kNextWorld) continue;
    newest = {.kind = Kind::next_world,
              .number = request.number,
              .limit = milliseconds(request.limit_ms),
              .last_generation = request.last_generation};
  }
}

void answer(int socket, std::uint64_t number, int segment, const NextWorld& next) noexcept try {
  LauncherReply given{
      .request = kNextWorld,
      .number = number,
      .is_refused = 0,
      .error_number = 0,
      .rank = next.rank,
      .size = next.size,
      .generation = next.generation,
      .n_lost = static_cast<std::uint32_t>(std::min(next.lost.size(), kMostLost)),
      .n_joined = static_cast<std::uint32_t>(std::min(next.joined.size(), kMostJoined)),
      .text = {}};
  std::vector<std::byte> bytes;
  append(bytes, &given, 1);
  append(bytes, next.lost.data(), given.n_lost);
  append(bytes, next.joined.data(), given.n_joined);
  base::send_with_fd(socket, bytes.data(), bytes.size(), segment);
} catch (const std::bad_alloc&) {
  refuse(socket, number, ENOMEM, "no memory for the answer");
}

void refuse(int socket, std::uint64_t number, int error_number, std::string_view text) noexcept {
  LauncherReply given{};
  given.request = kNextWorld;
  given.number = number;
  given.is_refused = 1;
  given.error_number = error_number;
  base::copy_text(given.text, text);
  base::send_with_fd(socket, &given, sizeof given, /*fd=*/-1);
}

}  // namespace lockstep::shared
