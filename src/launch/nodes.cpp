#include "launch/nodes.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <lockstep/error.hpp>
#include <utility>

#include "base/fd.hpp"
#include "base/text.hpp"
#include "launch/errors.hpp"
#include "launch/rank_environment.hpp"

namespace lockstep::launch {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kGreeting = 0x7365646f6e736b6cULL;
constexpr std::uint32_t kProtocol = 2;
/// Connections that have not said who they are; the oldest make room.
constexpr std::size_t kMaxStrangers = 256;
constexpr milliseconds kRetryEvery{100};
/// How long one attempt to connect may take where nobody answers.
constexpr milliseconds kConnectTime{3000};
/// What node 0's report takes to arrive, at most: it tells more than the others know.
constexpr milliseconds kReportTime{2000};

enum class Kind : std::uint32_t {
  hello,    // to node 0: who, how many ranks
  placed,   // from node 0: all have come
  refused,  // from node 0: text says why
  done,     // to node 0: all ranks here ended well
  all_done,
  failed,
};

/// Fixed in every protocol: the first three fields. Machines of one world have one byte order.
struct Message {
  std::uint64_t greeting = kGreeting;
  std::uint32_t protocol = kProtocol;
  Kind kind = Kind::hello;
  std::int32_t node_rank = 0;
  std::int32_t n_nodes = 0;
  std::int32_t n_ranks = 0;
  std::int32_t n_restarts = 0;
  std::int64_t patience_ms = 0;  ///< how long the sender of hello waits
  std::int32_t first_rank = 0;
  std::int32_t world_size = 0;
  std::int32_t master_port = 0;
  std::int32_t exit_code = 0;
  std::uint32_t interrupted = 0;
  std::array<char, kMaxSecretBytes> secret{};  ///< of hello and placed
  std::array<char, 508> text{};
};
constexpr std::size_t kHeadBytes = offsetof(Message, kind);

std::string text_of(const Message& message) { return std::string(base::text_in(message.text)); }

Message with_text(Kind kind, const std::string& text) {
  Message message;
  message.kind = kind;
  base::copy_text(message.text, text);
  return message;
}

std::array<char, kMaxSecretBytes> padded(const std::string& secret) {
  std::array<char, kMaxSecretBytes> bytes{};
  secret.copy(bytes.data(), bytes.size());
  return bytes;
}

/// Takes as long wherever they differ, so that nobody finds it byte by byte.
bool knows(const Message& message, const std::string& secret) {
  const auto expected = padded(secret);
  unsigned differences = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    differences |= static_cast<unsigned char>(message.secret[i] ^ expected[i]);
  }
  return differences == 0;
}

int timeout_to(Clock::time_point when) {
  const auto left = std::chrono::ceil<milliseconds>(when - Clock::now()).count();
  return static_cast<int>(std::clamp<milliseconds::rep>(left, 0, 1000));
}

/// Polls until `until`, a second at most. Throws Interrupted.
void wait_on(std::vector<pollfd> entries, Clock::time_point until, const Signals& signals) {
  entries.push_back({.fd = signals.fd(), .events = POLLIN, .revents = 0});
  if (::poll(entries.data(), entries.size(), timeout_to(until)) < 0 && errno != EINTR) {
    throw system_error("cannot wait for the other nodes");
  }
  while (const std::optional<Signal> signal = signals.next()) {
    if (signal->number != SIGCHLD) throw Interrupted{signal->number};
  }
}

struct FreeAddresses {
  void operator()(addrinfo* addresses) const { ::freeaddrinfo(addresses); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Addresses resolve(const NodesOptions& options) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      ::getaddrinfo(options.host.c_str(), std::to_string(options.port).c_str(), &hints, &found);
  if (error != 0) {
    throw usage_error(fmt::format("--rdzv {}:{}: cannot find the host: {}", options.host,
                                  options.port, ::gai_strerror(error)));
  }
  return Addresses(found);
}

base::UniqueFd open_socket(const addrinfo& address) {
  base::UniqueFd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw system_error("cannot open a socket");
  return fd;
}

void set_option(int fd, int level, int option, int value) {
  ::setsockopt(fd, level, option, &value, sizeof value);
}

/// A machine that vanished says nothing: the system asks it, and gives up after some 20 s.
void watch(int fd) {
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 20'000);
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
}

}  // namespace

/// One connection: whole messages out of it and into it.
class Link {
 public:
  explicit Link(base::UniqueFd fd) : fd_(std::move(fd)) { watch(fd_.get()); }

  int fd() const { return fd_.get(); }
  bool is_open() const { return static_cast<bool>(fd_); }
  void close() { fd_.reset(); }

  /// A message of some hundred bytes always fits into an idle connection's buffer.
  void send(const Message& message) {
    if (fd_) ::send(fd_.get(), &message, sizeof message, MSG_NOSIGNAL);
  }

  /// The next message, without waiting; of another protocol: only its head is right. Closed, or not
  /// of lockstep: closes.
  std::optional<Message> receive() {
    while (fd_ && !is_whole()) {
      std::array<char, sizeof(Message)> bytes;
      const ssize_t n = ::recv(fd_.get(), bytes.data(), sizeof(Message) - buffer_.size(), 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) return std::nullopt;
      if (n <= 0) {
        close();
        break;
      }
      buffer_.append(bytes.data(), static_cast<std::size_t>(n));
      if (buffer_.size() >= sizeof kGreeting && head().greeting != kGreeting) {
        is_stranger = true;
        close();
        buffer_.clear();
      }
    }
    if (!is_whole()) return std::nullopt;
    const Message message = head();
    buffer_.clear();
    return message;
  }

  int node_rank = -1;  ///< of the other end; -1: has not said yet
  int n_ranks = 0;
  bool is_stranger = false;

 private:
  Message head() const {
    Message message;
    std::memcpy(&message, buffer_.data(), std::min(buffer_.size(), sizeof message));
    return message;
  }
  bool is_whole() const {
    return buffer_.size() == sizeof(Message) ||
           (buffer_.size() >= kHeadBytes && head().protocol != kProtocol);
  }

  base::UniqueFd fd_;
  std::string buffer_;
};

Placement place_alone(int n_ranks) {
  return {.node_rank = 0,
          .first_rank = 0,
          .world_size = n_ranks,
          .master_addr = "127.0.0.1",
          .master_port = master_port()};
}

Nodes::Nodes(const NodesOptions& options, int n_ranks, int n_restarts, const Signals& signals)
    : options_(options),
      address_(fmt::format("{}:{}", options.host, options.port)),
      deadline_(Clock::now() + options.timeout) {
  placement_.node_rank = options_.node_rank;
  placement_.master_addr = options_.host;
  if (options_.node_rank == 0) {
    lead(signals, n_ranks, n_restarts);
  } else {
    follow(signals, n_ranks, n_restarts);
  }
}

Nodes::~Nodes() = default;

std::string Nodes::limit() const {
  return fmt::format("{:g} s", std::chrono::duration<double>(options_.timeout).count());
}

void Nodes::refuse_all(const std::string& text) {
  for (const auto& link : links_) link->send(with_text(Kind::refused, text));
  throw MismatchError(launcher_context(), text);
}

void Nodes::turn_away(Link& link, const std::string& text) {
  turned_away_ = text;
  link.send(with_text(Kind::refused, text));
  link.close();
}

// --- meeting --------------------------------------------------------------------------------

void Nodes::lead(const Signals& signals, int n_ranks, int n_restarts) {
  const Addresses addresses = resolve(options_);
  const base::UniqueFd listener = open_socket(*addresses);
  set_option(listener.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (::bind(listener.get(), addresses->ai_addr, addresses->ai_addrlen) != 0 ||
      ::listen(listener.get(), SOMAXCONN) != 0) {
    throw system_error(
        fmt::format("node 0 cannot listen at {}; --rdzv takes an address of node 0's machine and a "
                    "port that is free there",
                    address_));
  }
  std::vector<int> ranks_of(static_cast<std::size_t>(options_.n_nodes), 0);
  ranks_of[0] = n_ranks;
  const auto look_at = [&](Link& link, const Message& hello) {
    // Who does not belong here is sent away, and the others are waited for as before.
    if (hello.protocol != kProtocol) {
      turn_away(link, fmt::format("a node at {} speaks protocol {}, node 0 speaks {}; use one "
                                  "version of lockstep on all nodes",
                                  address_, hello.protocol, kProtocol));
      return;
    }
    if (!knows(hello, options_.secret)) {
      turn_away(link, fmt::format("node {} came to {} with another --rdzv-secret than node 0; "
                                  "give all nodes a file of the same content, or none",
                                  hello.node_rank, address_));
      return;
    }
    if (hello.kind != Kind::hello || hello.n_ranks < 1 || hello.n_ranks > kMaxRanks) {
      link.close();
      return;
    }
    if (hello.n_nodes != options_.n_nodes) {
      refuse_all(
          fmt::format("nodes at {} disagree: node {} has --nnodes {}, node 0 has --nnodes {}",
                      address_, hello.node_rank, hello.n_nodes, options_.n_nodes));
    }
    if (hello.n_restarts != n_restarts) {
      refuse_all(
          fmt::format("nodes at {} disagree: node {} starts after {} restarts, node 0 after "
                      "{}; start all nodes anew, with one --max-restarts",
                      address_, hello.node_rank, hello.n_restarts, n_restarts));
    }
    if (hello.node_rank < 0 || hello.node_rank >= options_.n_nodes ||
        ranks_of[static_cast<std::size_t>(hello.node_rank)] != 0) {
      refuse_all(
          fmt::format("two launchers at {} have --node-rank {}; each node has its own, from "
                      "0 to {}",
                      address_, hello.node_rank, options_.n_nodes - 1));
    }
    link.node_rank = hello.node_rank;
    link.n_ranks = hello.n_ranks;
    ranks_of[static_cast<std::size_t>(hello.node_rank)] = hello.n_ranks;
    // The report of who is missing shall come before anybody's patience ends.
    deadline_ = std::min(deadline_,
                         Clock::now() + milliseconds(std::max<std::int64_t>(0, hello.patience_ms)));
  };

  while (std::find(ranks_of.begin(), ranks_of.end(), 0) != ranks_of.end()) {
    std::vector<pollfd> entries{{.fd = listener.get(), .events = POLLIN, .revents = 0}};
    append_to(entries);
    wait_on(entries, deadline_, signals);
    for (std::size_t i = 0; i < kMaxStrangers; ++i) {
      base::UniqueFd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd) break;
      links_.push_back(std::make_unique<Link>(std::move(fd)));
    }
    for (const auto& link : links_) {
      if (const auto hello = link->receive()) look_at(*link, *hello);
      if (link->is_open() || link->node_rank < 0) continue;
      ranks_of[static_cast<std::size_t>(link->node_rank)] = 0;  // it may come again
    }
    auto n_strangers = static_cast<std::size_t>(std::ranges::count_if(
        links_, [](const auto& link) { return link->is_open() && link->node_rank < 0; }));
    std::erase_if(links_, [&](const auto& link) {
      if (link->is_open() && (link->node_rank >= 0 || n_strangers <= kMaxStrangers)) return false;
      if (link->is_open()) --n_strangers;
      return true;
    });
    if (Clock::now() <= deadline_) continue;
    std::vector<int> missing;
    for (int node = 0; node < options_.n_nodes; ++node) {
      if (ranks_of[static_cast<std::size_t>(node)] == 0) missing.push_back(node);
    }
    const std::string text = fmt::format(
        "node{} {} of {} did not come to {} within {}; start `lockstep run` there with "
        "the same --nnodes and --rdzv{}",
        missing.size() == 1 ? "" : "s", fmt::join(missing, ", "), options_.n_nodes, address_,
        limit(), turned_away_.empty() ? "" : "; sent away: " + turned_away_);
    for (const auto& link : links_) link->send(with_text(Kind::refused, text));
    throw TimeoutError(launcher_context(), text);
  }

  std::erase_if(links_, [](const auto& link) { return link->node_rank < 0; });
  placement_.master_port = master_port();
  Message placed;
  placed.kind = Kind::placed;
  placed.secret = padded(options_.secret);
  placed.master_port = placement_.master_port;
  for (const int n : ranks_of) placed.world_size += n;
  placement_.world_size = placed.world_size;
  for (const auto& link : links_) {
    placed.first_rank = 0;
    for (int node = 0; node < link->node_rank; ++node) {
      placed.first_rank += ranks_of[static_cast<std::size_t>(node)];
    }
    link->send(placed);
  }
}

void Nodes::follow(const Signals& signals, int n_ranks, int n_restarts) {
  const Addresses addresses = resolve(options_);
  base::UniqueFd fd;
  int error_number = 0;
  for (const addrinfo* address = addresses.get(); !fd;) {
    fd = open_socket(*address);
    error_number = 0;
    if (::connect(fd.get(), address->ai_addr, address->ai_addrlen) != 0) {
      error_number = errno;
      if (error_number == EINPROGRESS) {
        // The last attempt too has the time to learn why it failed.
        const auto now = Clock::now();
        const auto until = std::max(std::min(deadline_, now + kConnectTime), now + kRetryEvery);
        pollfd entry{.fd = fd.get(), .events = POLLOUT, .revents = 0};
        error_number = ETIMEDOUT;
        while (Clock::now() < until) {
          wait_on({entry}, until, signals);
          if (::poll(&entry, 1, 0) != 1) continue;
          socklen_t n_bytes = sizeof error_number;
          ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error_number, &n_bytes);
          break;
        }
      }
    }
    if (error_number == 0) break;
    fd.reset();
    if (Clock::now() > deadline_) {
      throw TimeoutError(
          launcher_context(),
          fmt::format("node {} cannot reach node 0 at {} within {}: {}; start `lockstep run "
                      "--node-rank 0` there, and let its port through",
                      options_.node_rank, address_, limit(), std::strerror(error_number)));
    }
    wait_on({}, std::min(deadline_, Clock::now() + kRetryEvery), signals);
    address = address->ai_next != nullptr ? address->ai_next : addresses.get();
  }
  links_.push_back(std::make_unique<Link>(std::move(fd)));
  Link& link = *links_.front();
  link.node_rank = 0;

  Message hello;
  hello.node_rank = options_.node_rank;
  hello.n_nodes = options_.n_nodes;
  hello.n_ranks = n_ranks;
  hello.n_restarts = n_restarts;
  hello.secret = padded(options_.secret);
  hello.patience_ms = std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now()).count();
  link.send(hello);
  std::optional<Message> reply;
  while (!(reply = link.receive())) {
    if (!link.is_open()) {
      throw PeerLost(
          launcher_context(),
          fmt::format("{} {}", address_,
                      link.is_stranger
                          ? "answers, but not as `lockstep run --node-rank 0`; --rdzv "
                            "takes a port that nobody else uses"
                          : "closed the connection: node 0 ended, or refused this node"));
    }
    if (Clock::now() > deadline_ + kReportTime) {
      throw TimeoutError(launcher_context(),
                         fmt::format("node 0 at {} does not answer within {}", address_, limit()));
    }
    wait_on({{.fd = link.fd(), .events = POLLIN, .revents = 0}}, deadline_ + kReportTime, signals);
  }
  if (reply->protocol != kProtocol) {
    throw MismatchError(
        launcher_context(),
        fmt::format("node 0 at {} speaks protocol {}, this node {}; use one version "
                    "of lockstep on all nodes",
                    address_, reply->protocol, kProtocol));
  }
  if (reply->kind != Kind::placed) throw MismatchError(launcher_context(), text_of(*reply));
  if (!knows(*reply, options_.secret)) {
    throw MismatchError(launcher_context(),
                        fmt::format("who answers at {} does not know the secret of --rdzv-secret: "
                                    "it is no node 0 of this job",
                                    address_));
  }
  placement_.first_rank = reply->first_rank;
  placement_.world_size = reply->world_size;
  placement_.master_port = static_cast<std::uint16_t>(reply->master_port);
}

// --- running --------------------------------------------------------------------------------

void Nodes::append_to(std::vector<pollfd>& entries) const {
  for (const auto& link : links_) {
    if (link->is_open()) entries.push_back({.fd = link->fd(), .events = POLLIN, .revents = 0});
  }
}

std::optional<NodeFailure> Nodes::service() {
  for (const auto& link : links_) {
    if (!link->is_open()) continue;
    while (const auto message = link->receive()) {
      if (message->kind == Kind::failed && !over_) {
        const NodeFailure failure{.exit_code = message->exit_code,
                                  .interrupted = message->interrupted != 0,
                                  .text = text_of(*message)};
        say_failed(failure);
        return failure;
      }
      if (message->kind == Kind::all_done) over_ = true;
      if (message->kind == Kind::done) {
        ++n_done_;
        finish_if_all_done();
      }
    }
    if (link->is_open() || over_) continue;
    const NodeFailure failure{
        .exit_code = 1,
        .interrupted = false,
        .text = fmt::format("node {} is lost: its `lockstep run`, or its machine, is gone",
                            link->node_rank)};
    say_failed(failure);
    return failure;
  }
  return std::nullopt;
}

void Nodes::say_done() {
  if (said_done_ || over_) return;
  said_done_ = true;
  ++n_done_;
  if (placement_.node_rank == 0) {
    finish_if_all_done();
    return;
  }
  Message done;
  done.kind = Kind::done;
  links_.front()->send(done);
}

void Nodes::finish_if_all_done() {
  if (placement_.node_rank != 0 || n_done_ < options_.n_nodes) return;
  over_ = true;
  Message all_done;
  all_done.kind = Kind::all_done;
  for (const auto& link : links_) link->send(all_done);
}

void Nodes::say_failed(const NodeFailure& failure) {
  if (over_) return;
  over_ = true;
  Message message = with_text(Kind::failed, failure.text);
  message.exit_code = failure.exit_code;
  message.interrupted = failure.interrupted ? 1 : 0;
  for (const auto& link : links_) link->send(message);
}

}  // namespace lockstep::launch
