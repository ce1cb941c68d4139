#pragma once

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/error.hpp>
#include <string>
#include <string_view>

#include "base/abstract_socket.hpp"
#include "base/fd.hpp"
#include "base/patience.hpp"
#include "engines/shared/bootstrap/bootstrap.hpp"
#include "group/failure.hpp"

/// What both sides of bootstrap() share: messages and errors.
namespace lockstep::shared::bootstrap_protocol {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using Clock = detail::JobClock;
using Kind = internal::Failure::Kind;

inline constexpr std::uint64_t kGreeting = 0x0174656d70736b6cULL;
inline constexpr std::string_view kJoined = "!";
inline constexpr std::uint32_t kOtherRanks = ~0U;
inline constexpr milliseconds kRetryEvery{5};
using base::patience::kLeadersReport;
/// Upper limit of a bootstrap, so that nanosecond arithmetic does not overflow.
inline constexpr milliseconds kLongest = std::chrono::hours(24 * 365);

// Each struct is one message, so it arrives entirely or not at all.

/// A member's first message.
struct Hello {
  /// These three are read before the version is known to be the same, so they stay where they are.
  std::uint64_t greeting;
  std::uint32_t layout;
  std::array<char, 20> release;
  std::int32_t rank;
  std::int32_t n_ranks;
  std::int32_t pid;
  std::int64_t timeout_ms;  ///< the member's timeout
  std::array<char, 512> job;
};

/// Rank 0's answer, when all ranks have connected or no longer can. A member then replies that it
/// has joined the segment (kJoined), or why not.
struct Reply {
  std::uint64_t greeting;
  /// 1 + its kind; 0: none, and the segment's descriptor is attached; kOtherRanks: these ranks were
  /// complete without the member, whose own rank 0 comes after them (two jobs of one name).
  std::uint32_t failure;
  std::int32_t error_number;
  std::uint64_t nonce;
  std::array<char, 1024> text;
};

class Bootstrap {
 public:
  Bootstrap(std::string_view job, int rank, int n_ranks, const Call& barrier,
            const std::function<void()>& while_waiting)
      : job_(job),
        rank_(rank),
        n_ranks_(n_ranks),
        barrier_(barrier),
        while_waiting_(while_waiting),
        deadline_(Clock::now() + std::min(barrier.timeout, kLongest)),
        socket_name_(bootstrap_socket_name(job)),
        address_(socket_name_) {}

 protected:
  [[noreturn]] void fail(Kind kind, const std::string& text, int error_number = 0) const {
    internal::throw_failure({.kind = kind, .error_number = error_number, .text = text},
                            context_of(barrier_, rank_));
  }

  [[noreturn]] void fail_system(const char* what) const {
    const int error_number = errno;
    throw SystemError(
        context_of(barrier_, rank_), error_number,
        fmt::format("cannot {} the Unix socket through which the ranks of this host connect",
                    what));
  }

  base::UniqueFd open_socket() const {
    base::UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) fail_system("open");
    return socket;
  }

  /// A connection to the process that holds the name; none while no process listens there.
  base::UniqueFd connect() const {
    base::UniqueFd socket = open_socket();
    if (::connect(socket.get(), address_.get(), address_.n_bytes()) != 0) {
      if (errno != ECONNREFUSED && errno != EAGAIN) fail_system("connect");
      socket.reset();
    }
    return socket;
  }

  void refuse_other_user(const ucred& peer) const {
    if (peer.uid == ::geteuid()) return;
    fail(Kind::engine,
         fmt::format(
             "process {} of user {} holds the socket @{} through which this job's ranks connect, "
             "and this is user {}; end that process, or start the job with `lockstep run`",
             peer.pid, peer.uid, socket_name_, ::geteuid()));
  }

  /// Errors name a rank by its number in the group.
  int number_of(int rank) const { return barrier_.number_of(rank); }

  double limit_seconds() const { return std::chrono::duration<double>(barrier_.timeout).count(); }

  int milliseconds_to(Clock::time_point when) const {
    const auto left = duration_cast<milliseconds>(when - Clock::now()).count() + 1;
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000));
  }

  std::string_view job_;
  int rank_;
  int n_ranks_;
  const Call& barrier_;
  const std::function<void()>& while_waiting_;
  Clock::time_point deadline_;
  std::string socket_name_;
  base::AbstractAddress address_;
};

/// bootstrap() on rank 0.
std::shared_ptr<Membership> lead_bootstrap(std::string_view job, int n_ranks, const Call& barrier,
                                           const std::optional<std::string>& tune,
                                           const std::function<void()>& while_waiting);

}  // namespace lockstep::shared::bootstrap_protocol
