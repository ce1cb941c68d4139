#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "base/fd.hpp"
#include "base/futex.hpp"
#include "base/guarded_fd.hpp"
#include "engines/shared/segment/layout.hpp"

namespace lockstep::shared {

/// Memory shared by all ranks of a world. It grows by ranges, identified by offsets that are valid
/// on every rank: the address itself within one process, the offset in a memfd between processes.
/// No other process can open the memfd; it is freed with its last process. Ranges are reused.
class Segment {
 public:
  /// For ranks that are threads of this process.
  static std::shared_ptr<Segment> for_threads(int n_ranks);
  /// For processes: a sealed memfd.
  static std::shared_ptr<Segment> for_processes(int n_ranks);
  /// Maps the segment of `fd` and takes ownership of `fd`, also when it throws. Throws UsageError
  /// if the segment belongs to another job or another version of the library. From then on this
  /// process follows the clock of its launcher, if it has one.
  static std::shared_ptr<Segment> attach(base::UniqueFd fd, std::uint64_t nonce);

  /// Maps the base of any job's segment read-only. Throws UsageError if `fd` is not a segment, or
  /// belongs to another version of the library.
  static std::shared_ptr<const Segment> attach_read_only(base::UniqueFd fd);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  SegmentHeader& header() noexcept { return *header_; }
  const SegmentHeader& header() const noexcept { return *header_; }
  RankBlock& rank(int world_rank) noexcept;
  const RankBlock& rank(int world_rank) const noexcept;
  int n_ranks() const noexcept { return n_ranks_; }
  bool is_between_processes() const noexcept { return static_cast<bool>(fd_); }
  /// The memfd; -1: ranks are threads.
  int fd() const noexcept { return fd_.get(); }
  const base::GuardedFd& guarded_fd() const noexcept { return fd_; }
  base::FutexScope scope() const noexcept {
    return fd_ ? base::FutexScope::process : base::FutexScope::thread;
  }

  /// Reserves zeroed pages, of which the first n_backed_bytes have memory at once, the others after
  /// Range::back. Throws SystemError. Call release for pages that are never mapped.
  std::uint64_t reserve(std::size_t n_bytes, std::size_t n_backed_bytes);
  void release(std::uint64_t offset, std::size_t n_bytes) noexcept;

  /// Wakes the threads that sleep on the word at an offset that a rank published; reads and writes
  /// nothing there. Of a segment between processes.
  void wake_at(std::uint64_t offset) noexcept;

 private:
  friend class Range;
  Segment() = default;
  void create(int n_ranks);
  void open(base::UniqueFd fd, int protection, const std::optional<std::uint64_t>& nonce);
  std::byte* map(std::uint64_t offset, std::size_t n_bytes, std::size_t n_backed_bytes);
  void unmap(std::byte* data, std::size_t n_bytes) noexcept;
  void check_fd() const;
  std::uint64_t take_offset(std::size_t n_bytes) noexcept;
  void free_offset(std::uint64_t offset, std::size_t n_bytes) noexcept;

  base::GuardedFd fd_;  // none: ranks are threads
  SegmentHeader* header_ = nullptr;
  int n_ranks_ = 0;  // the header may be damaged later
  std::size_t n_base_bytes_ = 0;
};

/// A mapped, reference-counted range of the segment: the last of its `n_users` releases the pages.
class Range {
 public:
  struct Size {
    Size(std::size_t all) : Size(all, all) {}  // NOLINT: most ranges have all of their memory
    Size(std::size_t all, std::size_t backed) : n_bytes(all), n_backed_bytes(backed) {}

    std::size_t n_bytes;
    /// The first bytes, which have memory from the start; a rank calls back() before it accesses
    /// others that no rank has backed.
    std::size_t n_backed_bytes;
  };

  /// Reserves a range to which n_users ranks will attach; `initialise` gets its zeroed bytes, those
  /// that have memory, before any other rank can access it.
  static std::uint64_t make(Segment& segment, Size size, int n_users,
                            const std::function<void(std::byte*)>& initialise);

  /// If it throws SystemError, this user has already been released.
  Range(std::shared_ptr<Segment> segment, std::uint64_t offset, Size size);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  std::byte* data() const noexcept { return data_ + sizeof(RangeHeader); }
  /// Allocates memory for parts of the range that have none, so that a store to them cannot raise
  /// SIGBUS: n_bytes at `first`, and at n_parts - 1 more places, `stride` bytes apart. Throws
  /// SystemError. Threads: any.
  void back(std::byte* first, std::size_t n_bytes, std::size_t n_parts = 1, std::size_t stride = 0);
  const std::shared_ptr<Segment>& segment() const noexcept { return segment_; }

 private:
  static std::size_t total(std::size_t n_bytes) noexcept;
  static void detach(Segment& segment, RangeHeader& header, std::uint64_t offset,
                     std::size_t n_bytes, std::size_t n_mapped_bytes) noexcept;
  static std::byte* attach(Segment& segment, std::uint64_t offset, Size size);

  std::shared_ptr<Segment> segment_;
  std::uint64_t offset_;
  std::size_t n_bytes_;
  std::byte* data_;
  pid_t pid_;  ///< a fork of this process inherits the object but is not a user of the range
};

}  // namespace lockstep::shared
