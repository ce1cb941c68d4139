#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <lockstep/error.hpp>
#include <thread>
#include <vector>

#include "base/fd.hpp"
#include "base/fd_message.hpp"
#include "base/text.hpp"
#include "base/version.hpp"
#include "engines/shared/bootstrap/bootstrap_common.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/shared/segment/layout.hpp"

namespace lockstep::shared::bootstrap_protocol {
namespace {

class Leader : Bootstrap {
 public:
  using Bootstrap::Bootstrap;

  std::shared_ptr<Membership> run(const std::optional<std::string>& tune) {
    if (n_ranks_ > 1) listen();
    while (n_known_ < n_ranks_ - 1) wait_for_hello();
    std::shared_ptr<Membership> membership;
    try {
      membership =
          std::make_shared<Membership>(make_world(Segment::for_processes(n_ranks_), tune), rank_);
    } catch (const Error& error) {
      const internal::Failure failure = internal::failure_for_peers(error, rank_);
      send_failure_to_all(failure.kind, internal::text_of(failure));
      throw;
    }
    // check() compared each rank's own pid with the pid that the system reports here.
    membership->segment().header().has_one_pid_namespace.store(true, std::memory_order_relaxed);
    send_segment(*membership);
    return membership;
  }

 private:
  struct Member {
    base::UniqueFd socket;
    pid_t pid = 0;
    int rank = -1;  // -1: not received yet
  };

  void listen() {
    listener_ = open_socket();
    while (::bind(listener_.get(), address_.get(), address_.n_bytes()) != 0) {
      if (errno != EADDRINUSE) fail_system("bind");
      ucred holder{};
      if (const base::UniqueFd probe = connect()) {
        holder = base::peer_of(probe.get());
        refuse_other_user(holder);
      }
      if (Clock::now() > deadline_) {
        fail(Kind::timeout,
             fmt::format(
                 "process {} holds the socket @{} through which this job's ranks connect; two jobs "
                 "of one user must differ in the variables that their launchers set: {}",
                 holder.pid, socket_name_, job_));
      }
      while_waiting_();
      std::this_thread::sleep_for(kRetryEvery);
    }
    if (::listen(listener_.get(), n_ranks_) != 0) fail_system("listen at");
  }

  void wait_for_hello() {
    while_waiting_();
    std::vector<pollfd> entries{{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
    for (const Member& member : members_) {
      entries.push_back({.fd = member.socket.get(), .events = POLLIN, .revents = 0});
    }
    if (::poll(entries.data(), entries.size(), milliseconds_to(deadline_)) < 0 && errno != EINTR) {
      fail_system("poll");
    }
    const std::size_t n_before = members_.size();
    for (std::size_t i = 0; i < n_before; ++i) {
      if (entries[i + 1].revents != 0) read_from(members_[i]);
    }
    if (entries[0].revents != 0) accept();
    std::erase_if(members_, [](const Member& member) { return !member.socket; });
    if (Clock::now() > deadline_) fail_all(Kind::timeout, describe_missing_ranks());
  }

  void accept() {
    while (true) {
      Member member;
      member.socket.reset(
          ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!member.socket) {
        const int error_number = errno;
        if (error_number == EMFILE || error_number == ENFILE || error_number == ENOBUFS ||
            error_number == ENOMEM) {
          fail_no_descriptors(error_number);
        }
        return;
      }
      const ucred peer = base::peer_of(member.socket.get());
      if (peer.uid != ::geteuid()) continue;  // another user gets no reply
      member.pid = peer.pid;
      members_.push_back(std::move(member));
    }
  }

  void read_from(Member& member) {
    Hello hello{};
    const ssize_t n = ::recv(member.socket.get(), &hello, sizeof hello, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
      member.socket.reset();
      if (member.rank < 0) return;  // a process that only probed who holds the name
      fail_all(Kind::peer_lost,
               fmt::format("rank {} (process {}) died or timed out before all {} ranks connected",
                           number_of(member.rank), member.pid, n_ranks_));
    }
    if (n < static_cast<ssize_t>(sizeof(std::uint64_t)) || hello.greeting != kGreeting) {
      member.socket.reset();
      return;
    }
    check(member, hello, n);
    member.rank = hello.rank;
    ++n_known_;
    // Missing ranks must be reported before any rank's timeout expires.
    const milliseconds timeout(std::clamp<std::int64_t>(hello.timeout_ms, 0, kLongest.count()));
    deadline_ = std::min(deadline_, Clock::now() + timeout);
  }

  void check(Member& member, const Hello& hello, ssize_t n_bytes) {
    if (n_bytes != sizeof hello || hello.layout != base::layout_version()) {
      fail_all(
          Kind::mismatch,
          fmt::format("process {} links {}, and rank {} {}; build all ranks with one version",
                      member.pid, base::release_text(base::text_in(hello.release), hello.layout),
                      number_of(0), base::release_text(base::version(), base::layout_version())));
    }
    if (hello.n_ranks != n_ranks_ || hello.rank <= 0 || hello.rank >= n_ranks_) {
      fail_all(Kind::mismatch,
               fmt::format("process {} is rank {} of {}, but rank {} has a world of {}; all "
                           "ranks must be started by one launcher",
                           member.pid, hello.rank, hello.n_ranks, number_of(0), n_ranks_));
    }
    for (const Member& other : members_) {
      if (other.rank != hello.rank) continue;
      fail_all(Kind::mismatch, fmt::format("two processes are rank {}: {} and {}; each rank joins "
                                           "once, and a program started by a rank is not a rank",
                                           number_of(hello.rank), other.pid, member.pid));
    }
    if (hello.pid != member.pid) {
      fail_all(Kind::engine,
               fmt::format("rank {} is in another PID namespace (a separate container), so its "
                           "peers could not detect its death; start all ranks of this host in one "
                           "container, or use another backend",
                           number_of(hello.rank)));
    }
    if (base::text_in(hello.job) != base::text_in(my_job())) {
      fail_all(Kind::mismatch,
               fmt::format("rank {} belongs to another job ({}) than rank {} ({})",
                           number_of(hello.rank), base::text_in(hello.job), number_of(0), job_));
    }
  }

  std::array<char, 512> my_job() const {
    std::array<char, 512> job{};
    base::copy_text(job, job_);
    return job;
  }

  std::string describe_missing_ranks() const {
    std::vector<int> missing;
    for (int r = 1; r < n_ranks_; ++r) {
      const bool has_joined = std::any_of(members_.begin(), members_.end(),
                                          [r](const Member& member) { return member.rank == r; });
      if (!has_joined) missing.push_back(number_of(r));
    }
    return fmt::format(
        "rank{} {} of {} did not connect to the ranks of this host within {:g} s; did {} end "
        "early, start with other variables than rank {} ({}), or in a separate container (network "
        "namespace)? Ranks in several containers connect over ucx, mpi, gloo or hierarchical",
        missing.size() == 1 ? "" : "s", fmt::join(missing, ", "), n_ranks_, limit_seconds(),
        missing.size() == 1 ? "it" : "they", number_of(0), job_);
  }

  /// Ends the bootstrap for ranks that are not connected yet.
  void close_listener(const Reply& reply) {
    ::shutdown(listener_.get(), SHUT_RD);  // before any rank can retry; ranks in its queue remain
    while (const base::UniqueFd queued{
        ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)}) {
      if (base::peer_of(queued.get()).uid != ::geteuid()) continue;
      ::send(queued.get(), &reply, sizeof reply, MSG_NOSIGNAL);
    }
    listener_.reset();
  }

  void send_failure_to_all(Kind kind, const std::string& text) {
    const Reply reply = refusal(kind, text);
    close_listener(reply);
    for (const Member& member : members_) {
      if (member.socket) ::send(member.socket.get(), &reply, sizeof reply, MSG_NOSIGNAL);
    }
  }

  static Reply refusal(Kind kind, const std::string& text, int error_number = 0) {
    Reply reply{.greeting = kGreeting,
                .failure = 1 + static_cast<std::uint32_t>(kind),
                .error_number = error_number,
                .nonce = 0,
                .text = {}};
    base::copy_text(reply.text, text);
    return reply;
  }

  /// Notifies the connected ranks and closes their sockets, which frees descriptors for the next;
  /// then notifies ranks that connect later, which would otherwise wait until their timeout.
  [[noreturn]] void fail_no_descriptors(int error_number) {
    const std::string text = fmt::format(
        "rank {} (process {}) cannot accept the connections of all {} ranks of this host; raise "
        "its limit on open files (ulimit -n) by at least {}, or start the job with `lockstep run`",
        number_of(0), ::getpid(), n_ranks_, n_ranks_);
    const Reply reply = refusal(Kind::system, text, error_number);
    const auto give_up = std::min(deadline_, Clock::now() + kLeadersReport);
    for (int n_notified = 0; n_notified < n_ranks_ - 1 && Clock::now() < give_up;) {
      for (const Member& member : members_) {
        // Closing a socket with an unread hello would discard the reply.
        pollfd entry{.fd = member.socket.get(), .events = POLLIN, .revents = 0};
        if (member.rank < 0 && ::poll(&entry, 1, milliseconds_to(give_up)) > 0) {
          Hello hello{};
          ::recv(member.socket.get(), &hello, sizeof hello, 0);
        }
        if (::send(member.socket.get(), &reply, sizeof reply, MSG_NOSIGNAL) > 0) ++n_notified;
      }
      members_.clear();
      base::UniqueFd next(
          ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (next && base::peer_of(next.get()).uid == ::geteuid()) {
        members_.emplace_back().socket = std::move(next);
      } else if (!next) {
        pollfd entry{.fd = listener_.get(), .events = POLLIN, .revents = 0};
        ::poll(&entry, 1, milliseconds_to(give_up));
      }
    }
    listener_.reset();
    fail(Kind::system, text, error_number);
  }

  [[noreturn]] void fail_all(Kind kind, const std::string& text) {
    send_failure_to_all(kind, text);
    fail(kind, text);
  }

  /// From here on, failures are visible in the segment, which rank 0 has joined; only the death of
  /// a rank before it has joined would not be visible there.
  void send_segment(const Membership& membership) {
    // At once: a rank that has joined may already start another bootstrap.
    const Reply others{
        .greeting = kGreeting, .failure = kOtherRanks, .error_number = 0, .nonce = 0, .text = {}};
    if (listener_) close_listener(others);
    Segment& segment = membership.segment();
    const Reply reply{.greeting = kGreeting,
                      .failure = 0,
                      .error_number = 0,
                      .nonce = segment.header().nonce,
                      .text = {}};
    for (const Member& member : members_) {
      if (member.rank < 0) {
        ::send(member.socket.get(), &others, sizeof others, MSG_NOSIGNAL);
        continue;
      }
      // A dead peer is detected below.
      base::send_with_fd(member.socket.get(), &reply, sizeof reply, segment.fd());
    }
    for (const Member& member : members_) {
      if (member.rank < 0) continue;
      pollfd entry{.fd = member.socket.get(), .events = POLLIN, .revents = 0};
      // Also after a signal, which interrupts poll.
      while (::poll(&entry, 1, milliseconds_to(deadline_)) <= 0 && Clock::now() < deadline_) {
      }
      std::array<char, sizeof Reply::text> status{};
      const ssize_t n = ::recv(member.socket.get(), status.data(), status.size() - 1, 0);
      if (base::text_in(status) == kJoined) continue;
      declare_failed(segment, member.rank,
                     n > 0 ? base::text_in(status) : "died, or took too long, before it joined");
    }
  }

  base::UniqueFd listener_;
  std::vector<Member> members_;
  int n_known_ = 0;
};

}  // namespace

std::shared_ptr<Membership> lead_bootstrap(std::string_view job, int n_ranks, const Call& barrier,
                                           const std::optional<std::string>& tune,
                                           const std::function<void()>& while_waiting) {
  return Leader(job, /*rank=*/0, n_ranks, barrier, while_waiting).run(tune);
}

}  // namespace lockstep::shared::bootstrap_protocol
