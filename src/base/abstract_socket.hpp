#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>

namespace lockstep::base {

/// The address of a Unix socket with an abstract name: it is not a file, and is released when the
/// socket is closed.
class AbstractAddress {
 public:
  explicit AbstractAddress(std::string_view name)
      : n_bytes_(static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())) {
    if (n_bytes_ > sizeof address_) throw std::length_error(std::string(name));
    address_.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), &address_.sun_path[1]);  // behind a zero byte
  }

  const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&address_); }
  socklen_t n_bytes() const noexcept { return n_bytes_; }

 private:
  sockaddr_un address_{};
  socklen_t n_bytes_;
};

/// The process at the other end of a connected Unix socket; pid 0 and an invalid uid if the system
/// does not report it.
inline ucred peer_of(int socket) noexcept {
  ucred peer{.pid = 0, .uid = static_cast<uid_t>(-1), .gid = static_cast<gid_t>(-1)};
  socklen_t n_bytes = sizeof peer;
  ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &n_bytes);
  return peer;
}

}  // namespace lockstep::base
