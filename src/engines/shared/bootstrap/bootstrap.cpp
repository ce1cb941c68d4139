#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <lockstep/error.hpp>
#include <thread>

#include "base/fd.hpp"
#include "base/fd_message.hpp"
#include "base/process.hpp"
#include "base/text.hpp"
#include "base/version.hpp"
#include "engines/shared/bootstrap/bootstrap_common.hpp"
#include "engines/shared/segment/layout.hpp"

namespace lockstep::shared {
namespace {

using namespace bootstrap_protocol;  // NOLINT(google-build-using-namespace)

class Follower : Bootstrap {
 public:
  using Bootstrap::Bootstrap;

  std::shared_ptr<Membership> run() {
    base::UniqueFd segment_fd;
    Reply reply{};
    do {
      find_leader();
      send_hello();
      reply = receive(segment_fd);
    } while (reply.failure == kOtherRanks);
    if (reply.failure != 0) {
      fail(static_cast<Kind>(reply.failure - 1), std::string(base::text_in(reply.text)),
           reply.error_number);
    }
    std::shared_ptr<Membership> membership;
    try {
      if (!segment_fd) {
        fail(Kind::system,
             "no descriptor is left for the shared memory; raise the limit on open files "
             "(ulimit -n)",
             EMFILE);
      }
      membership =
          std::make_shared<Membership>(Segment::attach(std::move(segment_fd), reply.nonce), rank_);
    } catch (const Error& error) {
      send_status(error.text());
      throw;
    }
    send_status(kJoined);
    return membership;
  }

 private:
  void send_status(std::string_view text) const {
    ::send(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL);
  }

  void find_leader() {
    while (!(socket_ = connect())) {
      while_waiting_();
      if (Clock::now() > deadline_) {
        fail(Kind::timeout,
             fmt::format("rank {} of {} did not connect to the ranks of this host within {:g} s; "
                         "did it end early, start with other variables than rank {} ({}), or in a "
                         "separate container (network namespace)? Ranks in several containers "
                         "connect over ucx, mpi, gloo or hierarchical",
                         number_of(0), n_ranks_, limit_seconds(), number_of(rank_), job_));
      }
      std::this_thread::sleep_for(kRetryEvery);
    }
    leader_ = base::peer_of(socket_.get());
    leader_start_ = base::process_start_time(leader_.pid);
    refuse_other_user(leader_);
  }

  void send_hello() {
    const auto timeout = duration_cast<milliseconds>(deadline_ - Clock::now());
    Hello hello{.greeting = kGreeting,
                .layout = base::layout_version(),
                .release = {},
                .rank = rank_,
                .n_ranks = n_ranks_,
                .pid = ::getpid(),
                .timeout_ms = timeout.count(),
                .job = {}};
    base::copy_text(hello.release, base::version());
    base::copy_text(hello.job, job_);
    // If rank 0 has closed the socket, its reply may still be there.
    ::send(socket_.get(), &hello, sizeof hello, MSG_NOSIGNAL);
  }

  Reply receive(base::UniqueFd& segment_fd) {
    pollfd entry{.fd = socket_.get(), .events = POLLIN, .revents = 0};
    while (::poll(&entry, 1, milliseconds_to(deadline_ + kLeadersReport)) <= 0) {
      while_waiting_();
      const bool is_stopped =
          base::process_state(leader_.pid, leader_start_) == base::ProcessState::stopped;
      // A leader that runs reports at its own deadline, which may be later by the time that this
      // rank took to begin.
      if (Clock::now() < deadline_ + (is_stopped ? milliseconds(0) : kLeadersReport)) continue;
      const auto waited = duration_cast<milliseconds>(Clock::now() - begin_);
      fail(Kind::timeout,
           fmt::format("rank {} (process {}) {} for {:.1f} s, with a limit of {:g} s; {}",
                       number_of(0), leader_.pid,
                       is_stopped ? "is stopped by a signal or a debugger, and has sent nothing"
                                  : "has sent nothing",
                       std::chrono::duration<double>(waited).count(), limit_seconds(),
                       is_stopped ? fmt::format("kill -CONT {}", leader_.pid)
                                  : std::string("is it stopped?")));
    }
    Reply reply{};
    ssize_t n = base::receive_with_fd(socket_.get(), &reply, sizeof reply, segment_fd);
    // Reported first if rank 0 closed the socket without reading the hello; its reply follows.
    if (n < 0 && errno == ECONNRESET) {
      n = base::receive_with_fd(socket_.get(), &reply, sizeof reply, segment_fd);
    }
    if (n != sizeof reply) {
      fail(Kind::peer_lost, fmt::format("rank {} (process {}) died before all {} ranks connected",
                                        number_of(0), leader_.pid, n_ranks_));
    }
    if (reply.greeting != kGreeting) {
      fail(Kind::mismatch,
           fmt::format("process {} at @{} does not respond as rank {} of this version of lockstep",
                       leader_.pid, socket_name_, number_of(0)));
    }
    return reply;
  }

  base::UniqueFd socket_;
  ucred leader_{};
  std::uint64_t leader_start_ = 0;
  Clock::time_point begin_ = Clock::now();
};

}  // namespace

std::string bootstrap_socket_name(std::string_view job) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return fmt::format("lockstep-{}-{:016x}", ::geteuid(), hash);
}

std::shared_ptr<Membership> bootstrap(std::string_view job, int rank, int n_ranks,
                                      const Call& barrier, const std::optional<std::string>& tune,
                                      const std::function<void()>& while_waiting) {
  if (n_ranks > kMaxRanks) {
    throw UsageError(
        context_of(barrier, rank),
        fmt::format("{} ranks on one host; the shared engine takes 1 to {}", n_ranks, kMaxRanks));
  }
  if (rank == 0) return lead_bootstrap(job, n_ranks, barrier, tune, while_waiting);
  return Follower(job, rank, n_ranks, barrier, while_waiting).run();
}

}  // namespace lockstep::shared
