#pragma once

#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <utility>

#include "base/fd.hpp"

namespace lockstep::base {

/// Whether fd is a pidfd of that process. Also false if /proc does not say, and after the process
/// has been reaped.
bool is_pidfd_of(int fd, pid_t pid) noexcept;
/// Whether its inode is the one that all anonymous-inode descriptors share, as pidfds did before
/// Linux 6.9.
bool has_shared_inode(int fd) noexcept;

/// A long-lived descriptor of a library inside a user's program. The program may close it (a daemon
/// closes all above 2) and reuse the number for another file: check is_intact() before each use.
/// The destructor closes it only if it is still the same file.
class GuardedFd {
 public:
  GuardedFd() = default;
  explicit GuardedFd(UniqueFd fd) noexcept : fd_(fd.release()) {
    struct stat status {};
    if (fd_ < 0 || ::fstat(fd_, &status) != 0) return;
    device_ = status.st_dev;
    inode_ = status.st_ino;
  }
  /// A pidfd of this process.
  GuardedFd(UniqueFd pidfd, pid_t pid) noexcept : GuardedFd(std::move(pidfd)) {
    if (fd_ >= 0 && has_shared_inode(fd_)) pid_ = pid;
  }
  GuardedFd(GuardedFd&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)),
        device_(other.device_),
        inode_(other.inode_),
        pid_(other.pid_) {}
  GuardedFd& operator=(GuardedFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(device_, other.device_);
    std::swap(inode_, other.inode_);
    std::swap(pid_, other.pid_);
    return *this;
  }
  ~GuardedFd() {
    if (is_intact()) ::close(fd_);
  }

  int get() const noexcept { return fd_; }
  ino_t inode() const noexcept { return inode_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

  /// Whether the number still refers to the original file.
  bool is_intact() const noexcept {
    struct stat status {};
    return fd_ >= 0 && ::fstat(fd_, &status) == 0 && status.st_dev == device_ &&
           status.st_ino == inode_ && (pid_ == 0 || is_pidfd_of(fd_, pid_));
  }

 private:
  int fd_ = -1;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  pid_t pid_ = 0;  ///< not 0: the inode does not identify the pidfd's process
};

/// A reserve descriptor, for a query that must work even if the program has used up all other
/// descriptors. Threads: one at a time.
class ReservedFd {
 public:
  ReservedFd() = default;
  /// A duplicate of `of`, which must outlive this object.
  explicit ReservedFd(const GuardedFd& of) noexcept : of_(&of) { take(); }

  /// Calls ask() with a free descriptor, unless another thread takes it first.
  template <class Ask>
  auto with_free_fd(Ask ask) noexcept {
    spare_ = GuardedFd();
    auto answer = ask();
    take();
    return answer;
  }

 private:
  void take() noexcept;

  const GuardedFd* of_ = nullptr;
  GuardedFd spare_;
};

}  // namespace lockstep::base
