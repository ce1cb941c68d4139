#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "base/fd.hpp"

namespace lockstep::test {

/// A port of this host that no other program gets as a free one while the object lives. A listener
/// needs SO_REUSEADDR.
class FreePort {
 public:
  FreePort() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t n_bytes = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    const int reuse = 1;
    EXPECT_EQ(::bind(fd_.get(), any, n_bytes), 0);
    EXPECT_EQ(::setsockopt(fd_.get(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse), 0);
    EXPECT_EQ(::getsockname(fd_.get(), any, &n_bytes), 0);
    number_ = ntohs(address.sin_port);
  }
  int number() const { return number_; }

 private:
  base::UniqueFd fd_;
  int number_ = 0;
};

}  // namespace lockstep::test
