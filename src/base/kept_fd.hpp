#pragma once

#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <utility>

#include "base/fd.hpp"

namespace lockstep::base {

/// Whether the number is a pidfd of that process. False too where /proc cannot say, and after the
/// process has ended and was waited for.
bool is_pidfd_of(int fd, pid_t pid) noexcept;
/// Whether its inode is one that all descriptors without a file share, as pidfds did before Linux
/// 6.9.
bool has_shared_inode(int fd) noexcept;

/// A descriptor that a library keeps for long inside somebody else's program. That program may
/// close it (a daemon closes all above 2), and the number then becomes a file of its own: ask
/// is_intact() before each use. Closed at the end only if it is still the same file.
class KeptFd {
 public:
  KeptFd() = default;
  explicit KeptFd(UniqueFd fd) noexcept : fd_(fd.release()) {
    struct stat status {};
    if (fd_ < 0 || ::fstat(fd_, &status) != 0) return;
    device_ = status.st_dev;
    inode_ = status.st_ino;
  }
  /// A pidfd of this process.
  KeptFd(UniqueFd pidfd, pid_t pid) noexcept : KeptFd(std::move(pidfd)) {
    if (fd_ >= 0 && has_shared_inode(fd_)) pid_ = pid;
  }
  KeptFd(KeptFd&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)),
        device_(other.device_),
        inode_(other.inode_),
        pid_(other.pid_) {}
  KeptFd& operator=(KeptFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(device_, other.device_);
    std::swap(inode_, other.inode_);
    std::swap(pid_, other.pid_);
    return *this;
  }
  ~KeptFd() {
    if (is_intact()) ::close(fd_);
  }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

  /// Whether the number still stands for the file that it was made of.
  bool is_intact() const noexcept {
    struct stat status {};
    return fd_ >= 0 && ::fstat(fd_, &status) == 0 && status.st_dev == device_ &&
           status.st_ino == inode_ && (pid_ == 0 || is_pidfd_of(fd_, pid_));
  }

 private:
  int fd_ = -1;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  pid_t pid_ = 0;  ///< not 0: the inode alone does not tell whose pidfd it is
};

/// A descriptor held in reserve, for a question that must be answerable when the program has used
/// up all others. Threads: one at a time.
class SpareFd {
 public:
  SpareFd() = default;
  /// A second descriptor of `of`, which outlives this.
  explicit SpareFd(const KeptFd& of) noexcept : of_(&of) { take(); }

  /// Calls ask() with a free descriptor, unless another thread takes it first.
  template <class Ask>
  auto with_room(Ask ask) noexcept {
    spare_ = KeptFd();
    auto answer = ask();
    take();
    return answer;
  }

 private:
  void take() noexcept;

  const KeptFd* of_ = nullptr;
  KeptFd spare_;
};

}  // namespace lockstep::base
