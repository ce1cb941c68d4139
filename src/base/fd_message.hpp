#pragma once

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/fd.hpp"

/// Messages over a Unix socket that may carry a descriptor.
namespace lockstep::base {

/// Sends one message; `fd`: a copy of it goes along, -1: none. Returns false, with errno, if it
/// fails.
inline bool send_with_fd(int socket, const void* bytes, std::size_t n_bytes, int fd) noexcept {
  iovec part{.iov_base = const_cast<void*>(bytes), .iov_len = n_bytes};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof fd)> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(n_bytes);
}

/// Receives one message of at most n_bytes, and the descriptor that came along, if any. Returns
/// what recvmsg returns.
inline ssize_t receive_with_fd(int socket, void* bytes, std::size_t n_bytes,
                               UniqueFd& fd) noexcept {
  iovec part{.iov_base = bytes, .iov_len = n_bytes};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t n = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* const header = n < 0 ? nullptr : CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof received);
    fd.reset(received);
  }
  return n;
}

}  // namespace lockstep::base
