#include "run/node_sockets.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <lockstep/error.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "run/errors.hpp"

namespace lockstep::run {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

int timeout_to(Clock::time_point when) {
  const auto left = std::chrono::ceil<milliseconds>(when - Clock::now()).count();
  return static_cast<int>(std::clamp<milliseconds::rep>(left, 0, 1000));
}

void poll_or_interrupt(std::vector<pollfd> entries, Clock::time_point until,
                       const Signals& signals) {
  entries.push_back({.fd = signals.fd(), .events = POLLIN, .revents = 0});
  if (::poll(entries.data(), entries.size(), timeout_to(until)) < 0 && errno != EINTR) {
    throw system_error("cannot wait for the other nodes");
  }
  while (const std::optional<Signal> signal = signals.next()) {
    if (signal->number == SIGTSTP) {
      Signals::stop_by(SIGTSTP, /*whole_group=*/false);
      continue;
    }
    // Warnings are for ranks, and none runs yet.
    if (signal->number != SIGCHLD && !is_warning(signal->number)) throw Interrupted{signal->number};
  }
}

Addresses resolve(const char* host, const NodesOptions& options) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = host == nullptr ? AI_PASSIVE : 0;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host, std::to_string(options.port).c_str(), &hints, &found);
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

namespace {

void set_option(int fd, int level, int option, int value) {
  ::setsockopt(fd, level, option, &value, sizeof value);
}

bool can_bind(const addrinfo& address) {
  sockaddr_storage any_port{};
  std::memcpy(&any_port, address.ai_addr, address.ai_addrlen);
  reinterpret_cast<sockaddr_in&>(any_port).sin_port = 0;  // at the same place in sockaddr_in6
  const base::UniqueFd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return fd && ::bind(fd.get(), reinterpret_cast<sockaddr*>(&any_port), address.ai_addrlen) == 0;
}

base::UniqueFd listen_at(const addrinfo& address) {
  base::UniqueFd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return {};
  set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.ai_family == AF_INET6) set_option(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  const bool listens = ::bind(fd.get(), address.ai_addr, address.ai_addrlen) == 0 &&
                       ::listen(fd.get(), SOMAXCONN) == 0;
  return listens ? std::move(fd) : base::UniqueFd();
}

bool is_literal(const std::string& host) {
  in6_addr ignored{};
  return ::inet_pton(AF_INET, host.c_str(), &ignored) == 1 ||
         ::inet_pton(AF_INET6, host.c_str(), &ignored) == 1;
}

}  // namespace

base::UniqueFd listen_at(const NodesOptions& options) {
  Addresses addresses = resolve(options.host.c_str(), options);
  if (is_literal(options.host)) return listen_at(*addresses);
  const addrinfo* own = addresses.get();
  while (own != nullptr && !can_bind(*own)) own = own->ai_next;
  if (own == nullptr) return {};
  addresses = resolve(nullptr, options);
  for (const int family : {AF_INET6, AF_INET}) {  // an IPv6 socket accepts IPv4 too
    for (own = addresses.get(); own != nullptr; own = own->ai_next) {
      if (own->ai_family != family) continue;
      base::UniqueFd listener = listen_at(*own);
      if (listener || errno == EADDRINUSE) return listener;
    }
  }
  return {};
}

void enable_keepalive(int fd) {
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 20'000);
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
}

std::string interface_of(int fd) {
  sockaddr_storage own{};
  socklen_t n_bytes = sizeof own;
  ifaddrs* all = nullptr;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &n_bytes) != 0 ||
      ::getifaddrs(&all) != 0) {
    return {};
  }
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(all, ::freeifaddrs);
  const auto bytes_of = [](const sockaddr* address) -> std::string_view {
    if (address->sa_family == AF_INET6) {
      const auto* const six = reinterpret_cast<const sockaddr_in6*>(address);
      const auto* const bytes = reinterpret_cast<const char*>(&six->sin6_addr);
      // An IPv4 connection to a socket of both.
      if (IN6_IS_ADDR_V4MAPPED(&six->sin6_addr)) return {bytes + 12, 4};
      return {bytes, sizeof six->sin6_addr};
    }
    const auto* const four = reinterpret_cast<const sockaddr_in*>(address);
    return {reinterpret_cast<const char*>(&four->sin_addr), sizeof four->sin_addr};
  };
  const std::string_view wanted = bytes_of(reinterpret_cast<const sockaddr*>(&own));
  for (const ifaddrs* one = list.get(); one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr) continue;
    const int family = one->ifa_addr->sa_family;
    if ((family == AF_INET || family == AF_INET6) && bytes_of(one->ifa_addr) == wanted) {
      return one->ifa_name;
    }
  }
  return {};
}

namespace {

/// Limit of one connection attempt if there is no answer.
constexpr milliseconds kConnectTime{3000};
constexpr milliseconds kShortestTry{100};

}  // namespace

int connect(int fd, const addrinfo& address, Clock::time_point deadline, const Signals& signals) {
  if (::connect(fd, address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  // The last attempt also gets the time to find out why it failed.
  const auto now = Clock::now();
  const auto until = std::max(std::min(deadline, now + kConnectTime), now + kShortestTry);
  const pollfd written{.fd = fd, .events = POLLOUT, .revents = 0};
  while (Clock::now() < until) {
    poll_or_interrupt({written}, until, signals);
    pollfd entry = written;
    if (::poll(&entry, 1, 0) != 1) continue;
    int error_number = 0;
    socklen_t n_bytes = sizeof error_number;
    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error_number, &n_bytes);
    return error_number;
  }
  return ETIMEDOUT;
}

}  // namespace lockstep::run
