#include "run/node_link.hpp"

#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "run/node_sockets.hpp"

namespace lockstep::run {

Link::Link(base::UniqueFd fd, bool is_known) : fd_(std::move(fd)) {
  enable_keepalive(fd_.get());
  reader_.accepts_body = is_known;
}

std::string Link::peer() const {
  sockaddr_storage address{};
  socklen_t n_bytes = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  std::array<char, NI_MAXHOST> host{};
  const bool is_known =
      ::getpeername(fd_.get(), generic, &n_bytes) == 0 &&
      ::getnameinfo(generic, n_bytes, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) == 0;
  return is_known ? host.data() : "an unknown address";
}

void Link::send(const NodeMessage& message, std::string_view body) {
  if (!fd_) return;
  unsent_.append(reinterpret_cast<const char*>(&message), sizeof message);
  unsent_.append(body);
  send_rest();
}

void Link::send_rest() {
  while (fd_ && has_unsent()) {
    const ssize_t n = ::send(fd_.get(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      if (errno != EAGAIN) unsent_.clear();  // receive() finds that it is closed
      return;
    }
    unsent_.erase(0, static_cast<std::size_t>(n));
  }
}

std::optional<ReceivedMessage> Link::receive() {
  for (;;) {
    if (auto message = reader_.next()) return message;
    if (reader_.is_foreign()) close();
    if (!fd_) return std::nullopt;
    std::array<char, sizeof(NodeMessage)> bytes;
    const ssize_t n =
        ::recv(fd_.get(), bytes.data(), std::min(reader_.n_wanted(), bytes.size()), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return std::nullopt;
    if (n <= 0) {
      close();
      return std::nullopt;
    }
    reader_.add({bytes.data(), static_cast<std::size_t>(n)});
  }
}

int accept_pending(int listener, std::vector<std::unique_ptr<Link>>& links) {
  for (std::size_t i = 0; i < kMaxUnidentified; ++i) {
    base::UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      const bool is_short =
          errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      return is_short ? errno : 0;
    }
    links.push_back(std::make_unique<Link>(std::move(fd)));
  }
  return 0;
}

}  // namespace lockstep::run
