#include "run/node_link.hpp"

#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "run/node_sockets.hpp"

namespace lockstep::run {

Link::Link(base::UniqueFd fd, std::string_view secret, bool is_known)
    : fd_(std::move(fd)), key_(secret, /*is_node_0=*/!is_known) {
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

void Link::greet(const NodeMessage& hello) {
  hello_ = hello;
  NodeMessage connect(NodeMessageKind::connect);
  connect.nonce = key_.nonce();
  send(connect);
}

bool Link::makes_key(const NodeMessage& message) {
  const auto expected = hello_ ? NodeMessageKind::challenge : NodeMessageKind::connect;
  if (key_.is_complete() || message.protocol != kProtocol || message.kind != expected) return false;
  if (!hello_) {
    NodeMessage challenge(NodeMessageKind::challenge);
    challenge.nonce = key_.nonce();
    send(challenge);
  }
  key_.complete(message.nonce);
  if (hello_) send(*hello_);
  return true;
}

void Link::send(NodeMessage message, std::string_view body) {
  if (!fd_) return;
  if (key_.is_complete()) key_.sign(message, body);
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
    if (auto received = reader_.next()) {
      if (makes_key(received->message)) continue;
      received->is_authentic = key_.verify(received->message, received->body);
      if (!received->is_authentic && is_proved_) {
        close();
        return std::nullopt;
      }
      is_proved_ = received->is_authentic;
      return received;
    }
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

int accept_pending(int listener, std::string_view secret,
                   std::vector<std::unique_ptr<Link>>& links) {
  for (std::size_t i = 0; i < kMaxUnidentified; ++i) {
    base::UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      const bool is_short =
          errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      return is_short ? errno : 0;
    }
    links.push_back(std::make_unique<Link>(std::move(fd), secret));
  }
  return 0;
}

}  // namespace lockstep::run
