#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "base/fd.hpp"
#include "base/futex.hpp"
#include "base/kept_fd.hpp"
#include "engines/shared/bootstrap/layout.hpp"

namespace lockstep::shared {

/// Memory that all ranks of a world reach. It grows by ranges, named by offsets that mean the
/// same on every rank: in one process the address itself, between processes a place in a memfd
/// that nobody else can open and that ends with its last process. Ranges given back are used again.
class Segment {
 public:
  /// For ranks that are threads of this process.
  static std::shared_ptr<Segment> for_threads(int n_ranks);
  /// For processes: a sealed memfd.
  static std::shared_ptr<Segment> for_processes(int n_ranks);
  /// Maps the segment behind `fd`, which it takes over, also when it throws. Throws UsageError
  /// where it is not this job's, or of another version of the library.
  static std::shared_ptr<Segment> attach(base::UniqueFd fd, std::uint64_t nonce);

  /// Maps the base of any job's segment behind `fd` to read only. Throws UsageError where it is
  /// none, or of another version of the library.
  static std::shared_ptr<const Segment> look(base::UniqueFd fd);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  SegmentHeader& header() noexcept { return *header_; }
  RankBlock& rank(int world_rank) noexcept;
  const RankBlock& rank(int world_rank) const noexcept;
  int n_ranks() const noexcept { return n_ranks_; }
  bool is_between_processes() const noexcept { return static_cast<bool>(fd_); }
  /// Of the memfd; -1: threads.
  int fd() const noexcept { return fd_.get(); }
  const base::KeptFd& kept_fd() const noexcept { return fd_; }
  base::FutexScope scope() const noexcept {
    return fd_ ? base::FutexScope::process : base::FutexScope::thread;
  }

  /// Reserves zeroed pages. Throws SystemError. Release what is never mapped.
  std::uint64_t reserve(std::size_t n_bytes);
  void release(std::uint64_t offset, std::size_t n_bytes) noexcept;

 private:
  friend class Range;
  Segment() = default;
  void create(int n_ranks);
  void open(base::UniqueFd fd, int protection, const std::optional<std::uint64_t>& nonce);
  std::byte* map(std::uint64_t offset, std::size_t n_bytes);
  void unmap(std::byte* data, std::size_t n_bytes) noexcept;
  void check_fd() const;
  std::uint64_t take_offset(std::size_t n_bytes) noexcept;
  void give_back_offset(std::uint64_t offset, std::size_t n_bytes) noexcept;

  base::KeptFd fd_;  // none: threads
  SegmentHeader* header_ = nullptr;
  int n_ranks_ = 0;  // the header may be damaged later
  std::size_t n_base_bytes_ = 0;
};

/// A mapped range of the segment, counted: the last of its `n_users` to let go gives the pages
/// back.
class Range {
 public:
  /// Reserves a range that n_users ranks are going to attach to; `initialise` gets its zeroed
  /// bytes before anybody else can know of it.
  static std::uint64_t make(Segment& segment, std::size_t n_bytes, int n_users,
                            const std::function<void(std::byte*)>& initialise);

  /// Throws SystemError; then this user has let go.
  Range(std::shared_ptr<Segment> segment, std::uint64_t offset, std::size_t n_bytes);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  std::byte* data() const noexcept { return data_ + sizeof(RangeHeader); }
  const std::shared_ptr<Segment>& segment() const noexcept { return segment_; }

 private:
  static std::size_t total(std::size_t n_bytes) noexcept;
  static void detach(Segment& segment, RangeHeader& header, std::uint64_t offset,
                     std::size_t n_bytes, std::size_t n_mapped_bytes) noexcept;
  static std::byte* attach(Segment& segment, std::uint64_t offset, std::size_t n_bytes);

  std::shared_ptr<Segment> segment_;
  std::uint64_t offset_;
  std::size_t n_bytes_;
  std::byte* data_;
  pid_t pid_;  ///< a fork of this process inherits the object, but is no user of the range
};

}  // namespace lockstep::shared
