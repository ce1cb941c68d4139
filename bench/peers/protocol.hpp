#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "base/abstract_socket.hpp"
#include "cli/bench/meter.hpp"

/// The protocol between bench/compare and the ranks of a candidate (bench/peers), which are
/// separate programs.
///
/// Each rank connects to the driver's Unix socket and sleeps in read() between its blocks, so an
/// inactive candidate uses no core.
namespace lockstep::bench {

/// From a rank, once.
struct Hello {
  std::int32_t rank;
  std::int32_t n_ranks;
};

/// From the driver, once: the core to bind to, -1 for any.
struct Welcome {
  std::int32_t core;
};

/// From a rank, after each block; if ok, n times in ns per call (double) follow.
struct Answer {
  std::uint32_t is_ok;
  std::uint32_t n;
  std::array<char, 504> text;  ///< the error, if not ok
};

inline void read_all(int fd, void* data, std::size_t n_bytes) {
  auto* at = static_cast<char*>(data);
  while (n_bytes > 0) {
    const ssize_t n = ::read(fd, at, n_bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw std::system_error(errno, std::generic_category(), "read");
    if (n == 0) throw std::runtime_error("the peer has closed the connection");
    at += n;
    n_bytes -= static_cast<std::size_t>(n);
  }
}

inline void write_all(int fd, const void* data, std::size_t n_bytes) {
  const auto* at = static_cast<const char*>(data);
  while (n_bytes > 0) {
    const ssize_t n = ::send(fd, at, n_bytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw std::system_error(errno, std::generic_category(), "send");
    at += n;
    n_bytes -= static_cast<std::size_t>(n);
  }
}

/// A rank's connection to the driver.
class Rank {
 public:
  Rank(const std::string& driver, int rank, int n_ranks) : rank_(rank), n_ranks_(n_ranks) {
    fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const base::AbstractAddress address(driver);
    if (fd_ < 0 || ::connect(fd_, address.get(), address.n_bytes()) != 0) {
      throw std::system_error(errno, std::generic_category(), "connect to the socket " + driver);
    }
    const Hello hello{rank, n_ranks};
    write_all(fd_, &hello, sizeof hello);
    Welcome welcome{};
    read_all(fd_, &welcome, sizeof welcome);
    if (welcome.core >= 0) bind_to(welcome.core);
  }
  ~Rank() { ::close(fd_); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  /// Runs the driver's blocks until it closes the connection.
  void serve(Collectives& library) {
    Meter meter(library, rank_, n_ranks_);
    Request request{};
    while (next(request)) {
      Answer answer{};
      std::vector<double> times;
      try {
        times = meter.measure(request);
        answer.is_ok = 1;
        answer.n = static_cast<std::uint32_t>(times.size());
      } catch (const std::exception& error) {
        std::strncpy(answer.text.data(), error.what(), answer.text.size() - 1);
      }
      write_all(fd_, &answer, sizeof answer);
      write_all(fd_, times.data(), times.size() * sizeof(double));
      if (answer.is_ok == 0) return;
    }
  }

 private:
  bool next(Request& request) {
    char first = 0;
    ssize_t n = 0;
    do {
      n = ::recv(fd_, &first, 1, MSG_PEEK);
    } while (n < 0 && errno == EINTR);
    if (n <= 0) return false;
    read_all(fd_, &request, sizeof request);
    return true;
  }

  int fd_ = -1;
  int rank_;
  int n_ranks_;
};

}  // namespace lockstep::bench
