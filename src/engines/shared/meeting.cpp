#include "engines/shared/meeting.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <lockstep/error.hpp>
#include <thread>
#include <vector>

#include "base/fd.hpp"
#include "base/text.hpp"
#include "engines/shared/world.hpp"

namespace lockstep::shared {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kGreeting = 0x0174656d70736b6cULL;
constexpr milliseconds kRetryEvery{5};
/// What rank 0's report takes to arrive, at most: it tells more than a member knows.
constexpr milliseconds kReportTime{2000};
/// Nobody meets for longer, and a clock's count of nanoseconds has its end.
constexpr milliseconds kLongest = std::chrono::hours(24 * 365);

enum class Answer : std::uint32_t {
  segment,  // its descriptor comes with it
  mismatch,
  timeout,
  peer_lost,
  peer_failed,
  unreachable,
};

// One message each, so no part of one can be missing.

/// A member's first message.
struct Hello {
  std::uint64_t greeting;
  std::uint32_t layout;
  std::int32_t rank;
  std::int32_t n_ranks;
  std::int32_t pid;
  std::int64_t patience_ms;  ///< how long it is going to wait
  std::array<char, 512> job;
};

/// Rank 0's answer, when all have come or cannot come any more. A member that has its place in the
/// segment then says so with a single byte.
struct Reply {
  std::uint64_t greeting;
  Answer answer;
  std::uint64_t nonce;
  std::array<char, 1024> text;
};

struct Address {
  sockaddr_un name{};
  socklen_t n_bytes = 0;
  std::string text;
};

Address address_of(std::string_view job) {
  Address address;
  address.text = meeting_name(job);
  address.name.sun_family = AF_UNIX;
  // Abstract: a zero byte first, and gone with the socket.
  std::memcpy(address.name.sun_path + 1, address.text.data(), address.text.size());
  address.n_bytes =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.text.size());
  return address;
}

/// Who is at the other end of a connected socket.
ucred peer_of(const base::UniqueFd& socket) {
  ucred peer{.pid = 0, .uid = static_cast<uid_t>(-1), .gid = 0};
  socklen_t n_bytes = sizeof peer;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &n_bytes);
  return peer;
}

class Meeting {
 public:
  Meeting(std::string_view job, int rank, int n_ranks, const Call& barrier)
      : job_(job),
        rank_(rank),
        n_ranks_(n_ranks),
        barrier_(barrier),
        deadline_(Clock::now() + std::min(barrier.timeout, kLongest)),
        address_(address_of(job)) {}

 protected:
  [[noreturn]] void fail(Answer answer, const std::string& text) const {
    const ErrorContext context = context_of(barrier_, rank_);
    switch (answer) {
      case Answer::segment: break;
      case Answer::mismatch: throw MismatchError(context, text);
      case Answer::timeout: throw TimeoutError(context, text);
      case Answer::peer_lost: throw PeerLost(context, text);
      case Answer::peer_failed: throw PeerFailed(context, text);
      case Answer::unreachable: throw EngineError(context, text);
    }
    throw EngineError(context, "damaged answer: " + text);
  }

  [[noreturn]] void fail_system(const char* what) const {
    const int error_number = errno;
    throw SystemError(
        context_of(barrier_, rank_), error_number,
        fmt::format("cannot {} the Unix socket at which the ranks of this host meet", what));
  }

  base::UniqueFd open_socket() const {
    base::UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) fail_system("open");
    return socket;
  }

  const sockaddr* name() const { return reinterpret_cast<const sockaddr*>(&address_.name); }

  /// A connection to whoever holds the name; none while nobody listens there.
  base::UniqueFd connect() const {
    base::UniqueFd socket = open_socket();
    if (::connect(socket.get(), name(), address_.n_bytes) != 0) {
      if (errno != ECONNREFUSED && errno != EAGAIN) fail_system("connect");
      socket.reset();
    }
    return socket;
  }

  void refuse_other_user(const ucred& peer) const {
    if (peer.uid == ::geteuid()) return;
    fail(Answer::unreachable,
         fmt::format("process {} of user {} holds the socket @{} at which this job's ranks meet, "
                     "and this is user {}; end that process, or start the job with `lockstep run`",
                     peer.pid, peer.uid, address_.text, ::geteuid()));
  }

  double limit_seconds() const { return std::chrono::duration<double>(barrier_.timeout).count(); }

  int milliseconds_to(Clock::time_point when) const {
    const auto left = duration_cast<milliseconds>(when - Clock::now()).count() + 1;
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000));
  }

  std::string_view job_;
  int rank_;
  int n_ranks_;
  const Call& barrier_;
  Clock::time_point deadline_;
  Address address_;
};

// --- rank 0 ---------------------------------------------------------------------------------

class Leader : Meeting {
 public:
  using Meeting::Meeting;

  std::shared_ptr<Seat> run() {
    if (n_ranks_ > 1) listen();
    while (n_known_ < n_ranks_ - 1) wait_for_hello();
    std::shared_ptr<Seat> seat;
    try {
      seat = std::make_shared<Seat>(make_world(Segment::for_processes(n_ranks_)), rank_);
    } catch (const Error& error) {
      tell_all(Answer::peer_failed, "rank 0 failed: " + error.text());
      throw;
    }
    hand_over(*seat);
    return seat;
  }

 private:
  struct Member {
    base::UniqueFd socket;
    pid_t pid = 0;
    int rank = -1;  // -1: has not said yet
  };

  void listen() {
    listener_ = open_socket();
    while (::bind(listener_.get(), name(), address_.n_bytes) != 0) {
      if (errno != EADDRINUSE) fail_system("bind");
      ucred holder{};
      if (const base::UniqueFd probe = connect()) {
        holder = peer_of(probe);
        refuse_other_user(holder);
      }
      if (Clock::now() > deadline_) {
        fail(Answer::timeout,
             fmt::format("process {} holds the socket @{} at which this job's ranks meet; two jobs "
                         "of one user must differ in what their launcher tells them: {}",
                         holder.pid, address_.text, job_));
      }
      std::this_thread::sleep_for(kRetryEvery);
    }
    if (::listen(listener_.get(), n_ranks_) != 0) fail_system("listen at");
  }

  void wait_for_hello() {
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
    if (Clock::now() > deadline_) fail_all(Answer::timeout, who_is_missing());
  }

  void accept() {
    while (true) {
      Member member;
      member.socket.reset(
          ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!member.socket) return;
      const ucred peer = peer_of(member.socket);
      if (peer.uid != ::geteuid()) continue;  // a stranger hears nothing
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
      if (member.rank < 0) return;  // somebody who only looked who holds the name
      fail_all(Answer::peer_lost,
               fmt::format("rank {} (process {}) died or gave up before all {} ranks had come",
                           member.rank, member.pid, n_ranks_));
    }
    if (n < static_cast<ssize_t>(sizeof(std::uint64_t)) || hello.greeting != kGreeting) {
      member.socket.reset();
      return;
    }
    check(member, hello, n);
    member.rank = hello.rank;
    ++n_known_;
    // The report of who is missing shall come before anybody's patience ends.
    const milliseconds patience(std::clamp<std::int64_t>(hello.patience_ms, 0, kLongest.count()));
    deadline_ = std::min(deadline_, Clock::now() + patience);
  }

  void check(Member& member, const Hello& hello, ssize_t n_bytes) {
    if (n_bytes != sizeof hello || hello.layout != kVersion) {
      fail_all(Answer::mismatch,
               fmt::format("process {} links another version of lockstep than rank 0 (layout {}, "
                           "here {}); build all ranks with one",
                           member.pid, hello.layout, kVersion));
    }
    if (hello.n_ranks != n_ranks_ || hello.rank <= 0 || hello.rank >= n_ranks_) {
      fail_all(Answer::mismatch,
               fmt::format("process {} is rank {} of {}, but rank 0 has a world of {}; all ranks "
                           "must be started by one launcher",
                           member.pid, hello.rank, hello.n_ranks, n_ranks_));
    }
    for (const Member& other : members_) {
      if (other.rank != hello.rank) continue;
      fail_all(Answer::mismatch,
               fmt::format("two processes are rank {}: {} and {}; each rank joins once, and a "
                           "program that a rank starts is no rank",
                           hello.rank, other.pid, member.pid));
    }
    if (hello.pid != member.pid) {
      fail_all(Answer::unreachable,
               fmt::format("rank {} is in another process namespace (a container of its own), so "
                           "its peers could not see it die; start all ranks of this host in one "
                           "container, or use another backend",
                           hello.rank));
    }
    if (base::text_in(hello.job) != base::text_in(my_job())) {
      fail_all(Answer::mismatch, fmt::format("rank {} belongs to another job ({}) than rank 0 ({})",
                                             hello.rank, base::text_in(hello.job), job_));
    }
  }

  std::array<char, 512> my_job() const {
    std::array<char, 512> job{};
    base::copy_text(job, job_);
    return job;
  }

  std::string who_is_missing() const {
    std::vector<int> missing;
    for (int r = 1; r < n_ranks_; ++r) {
      const bool has_come = std::any_of(members_.begin(), members_.end(),
                                        [r](const Member& member) { return member.rank == r; });
      if (!has_come) missing.push_back(r);
    }
    return fmt::format(
        "rank{} {} of {} did not come within {:g} s to where the ranks of this host meet; did {} "
        "end early, start with other variables than rank 0 ({}), or in a container (network "
        "namespace) of its own? Ranks in several containers meet over mpi, gloo or hierarchical",
        missing.size() == 1 ? "" : "s", fmt::join(missing, ", "), n_ranks_, limit_seconds(),
        missing.size() == 1 ? "it" : "they", job_);
  }

  void tell_all(Answer answer, const std::string& text) {
    listener_.reset();  // before anybody can try again
    Reply reply{.greeting = kGreeting, .answer = answer, .nonce = 0, .text = {}};
    base::copy_text(reply.text, text);
    for (const Member& member : members_) {
      if (member.socket) ::send(member.socket.get(), &reply, sizeof reply, MSG_NOSIGNAL);
    }
  }

  [[noreturn]] void fail_all(Answer answer, const std::string& text) {
    tell_all(answer, text);
    fail(answer, text);
  }

  /// From here on failures show in the segment, where rank 0 has its place; only a rank that dies
  /// before it has taken its own would stay unseen.
  void hand_over(const Seat& seat) {
    listener_.reset();  // who has its place may be about to meet again
    Segment& segment = seat.segment();
    const Reply reply{.greeting = kGreeting,
                      .answer = Answer::segment,
                      .nonce = segment.header().nonce,
                      .text = {}};
    for (const Member& member : members_) {
      if (member.rank >= 0) send_segment(member, reply, segment.fd());
    }
    for (const Member& member : members_) {
      if (member.rank < 0) continue;
      pollfd entry{.fd = member.socket.get(), .events = POLLIN, .revents = 0};
      while (::poll(&entry, 1, milliseconds_to(deadline_)) == 0 && Clock::now() < deadline_) {
      }
      char seated = 0;
      if (::recv(member.socket.get(), &seated, 1, 0) != 1) {
        declare_failed(segment, member.rank, "died, or took too long, before it took its place");
      }
    }
  }

  static void send_segment(const Member& member, const Reply& reply, int fd) {
    iovec part{.iov_base = const_cast<Reply*>(&reply), .iov_len = sizeof reply};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof fd)> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    ::sendmsg(member.socket.get(), &message, MSG_NOSIGNAL);  // a dead one is found below
  }

  base::UniqueFd listener_;
  std::vector<Member> members_;
  int n_known_ = 0;
};

// --- all others -----------------------------------------------------------------------------

class Follower : Meeting {
 public:
  using Meeting::Meeting;

  std::shared_ptr<Seat> run() {
    find_leader();
    say_hello();
    base::UniqueFd segment_fd;
    const Reply reply = receive(segment_fd);
    if (reply.answer != Answer::segment) fail(reply.answer, std::string(base::text_in(reply.text)));
    auto seat = std::make_shared<Seat>(Segment::attach(std::move(segment_fd), reply.nonce), rank_);
    ::send(socket_.get(), "!", 1, MSG_NOSIGNAL);
    return seat;
  }

 private:
  void find_leader() {
    while (!(socket_ = connect())) {
      if (Clock::now() > deadline_) {
        fail(Answer::timeout,
             fmt::format(
                 "rank 0 of {} did not come within {:g} s to where the ranks of this host "
                 "meet; did it end early, start with other variables than rank {} ({}), or in "
                 "a container (network namespace) of its own? Ranks in several containers "
                 "meet over mpi, gloo or hierarchical",
                 n_ranks_, limit_seconds(), rank_, job_));
      }
      std::this_thread::sleep_for(kRetryEvery);
    }
    leader_ = peer_of(socket_);
    refuse_other_user(leader_);
  }

  void say_hello() {
    const auto patience = duration_cast<milliseconds>(deadline_ - Clock::now());
    Hello hello{.greeting = kGreeting,
                .layout = kVersion,
                .rank = rank_,
                .n_ranks = n_ranks_,
                .pid = ::getpid(),
                .patience_ms = patience.count(),
                .job = {}};
    base::copy_text(hello.job, job_);
    if (::send(socket_.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) lose_leader();
  }

  [[noreturn]] void lose_leader() const {
    fail(Answer::peer_lost,
         fmt::format("rank 0 (process {}) died or gave up before all {} ranks had come",
                     leader_.pid, n_ranks_));
  }

  Reply receive(base::UniqueFd& segment_fd) {
    pollfd entry{.fd = socket_.get(), .events = POLLIN, .revents = 0};
    while (::poll(&entry, 1, milliseconds_to(deadline_ + kReportTime)) <= 0) {
      if (Clock::now() < deadline_ + kReportTime) continue;
      fail(Answer::timeout,
           fmt::format("rank 0 (process {}) has come, but says nothing for {:g} s; is it stopped?",
                       leader_.pid, limit_seconds()));
    }
    Reply reply{};
    iovec part{.iov_base = &reply, .iov_len = sizeof reply};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t n = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
    if (n != sizeof reply) lose_leader();
    const cmsghdr* const header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
      segment_fd.reset(fd);
    }
    if (reply.greeting != kGreeting || (reply.answer == Answer::segment && !segment_fd)) {
      fail(Answer::mismatch,
           fmt::format("process {} at @{} does not speak as rank 0 of this version "
                       "of lockstep, or no descriptor is left (ulimit -n)",
                       leader_.pid, address_.text));
    }
    return reply;
  }

  base::UniqueFd socket_;
  ucred leader_{};
};

}  // namespace

std::string meeting_name(std::string_view job) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return fmt::format("lockstep-{}-{:016x}", ::geteuid(), hash);
}

std::shared_ptr<Seat> meet(std::string_view job, int rank, int n_ranks, const Call& barrier) {
  if (n_ranks > kMaxRanks) {
    throw UsageError(
        context_of(barrier, rank),
        fmt::format("{} ranks on one host; the shared engine takes 1 to {}", n_ranks, kMaxRanks));
  }
  if (rank == 0) return Leader(job, rank, n_ranks, barrier).run();
  return Follower(job, rank, n_ranks, barrier).run();
}

}  // namespace lockstep::shared
