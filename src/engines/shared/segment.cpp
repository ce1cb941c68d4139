#include "engines/shared/segment.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <lockstep/error.hpp>

#include "base/memory.hpp"

namespace lockstep::shared {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t round_to_pages(std::size_t n_bytes) { return (n_bytes + kPage - 1) / kPage * kPage; }

std::size_t base_bytes(int n_ranks) {
  return round_to_pages(sizeof(SegmentHeader) +
                        static_cast<std::size_t>(n_ranks) * sizeof(RankBlock));
}

/// Why a segment is not used.
struct Refused {
  std::string why;
};

/// A number that tells jobs apart, and tells nobody the nonce.
std::uint32_t job_number(std::uint64_t nonce) {
  return static_cast<std::uint32_t>((nonce * 0x9e3779b97f4a7c15ULL) >> 32U) | 1U;
}

[[noreturn]] void fail(const char* what, std::size_t n_bytes) {
  const int error_number = errno;
  throw SystemError({.operation = "shared memory"}, error_number,
                    fmt::format("cannot {} {} bytes; free memory, or raise the limits (ulimit -v, "
                                "-n, the container's memory)",
                                what, n_bytes));
}

std::byte* map_pages(int fd, std::uint64_t offset, std::size_t n_bytes,
                     int protection = PROT_READ | PROT_WRITE) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED | MAP_POPULATE;
  void* data = ::mmap(nullptr, n_bytes, protection, flags, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) fail("map", n_bytes);
  return static_cast<std::byte*>(data);
}

}  // namespace

void Segment::create(int n_ranks) {
  if (n_ranks < 1 || n_ranks > kMaxRanks) {
    throw UsageError(
        {.operation = "shared memory"},
        fmt::format("{} ranks asked for; one machine takes 1 to {}", n_ranks, kMaxRanks));
  }
  n_base_bytes_ = base_bytes(n_ranks);
  // Reserved before use: a store into shared memory must never end in SIGBUS.
  if (fd_ && ::fallocate(fd_.get(), 0, 0, static_cast<off_t>(n_base_bytes_)) != 0) {
    fail("reserve", n_base_bytes_);
  }
  header_ = reinterpret_cast<SegmentHeader*>(map_pages(fd_.get(), 0, n_base_bytes_));
  header_->magic = kMagic;
  header_->version = kVersion;
  header_->n_ranks = n_ranks;
  if (::getrandom(&header_->nonce, sizeof header_->nonce, 0) != sizeof header_->nonce) {
    fail("draw the random", sizeof header_->nonce);
  }
  header_->n_bytes.store(n_base_bytes_, std::memory_order_relaxed);
  for (int r = 0; r < n_ranks; ++r) {
    comm::FlightRecord& flight = rank(r).flight;
    flight.rank = r;
    flight.world_size = n_ranks;
    flight.job = job_number(header_->nonce);
  }
}

std::shared_ptr<Segment> Segment::for_threads(int n_ranks) {
  std::shared_ptr<Segment> segment(new Segment);
  segment->create(n_ranks);
  return segment;
}

std::shared_ptr<Segment> Segment::for_processes(int n_ranks) {
  std::shared_ptr<Segment> segment(new Segment);
  segment->fd_.reset(::memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!segment->fd_) fail("make a memfd for", base_bytes(n_ranks));
  // A memfd is everybody's to write, should a way to it ever be found.
  if (::fchmod(segment->fd_.get(), S_IRUSR | S_IWUSR) != 0) fail("protect", base_bytes(n_ranks));
  // Nobody can cut pages off under a peer's feet.
  if (::fcntl(segment->fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    fail("seal the memfd of", base_bytes(n_ranks));
  }
  segment->create(n_ranks);
  return segment;
}

void Segment::open(base::UniqueFd fd, int protection, const std::optional<std::uint64_t>& nonce) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) throw Refused{"the descriptor is closed"};
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Refused{"the descriptor is no sealed memfd"};
  }
  const auto n_bytes = static_cast<std::size_t>(status.st_size);
  if (n_bytes < kPage) throw Refused{"it is too short"};

  fd_ = std::move(fd);
  n_base_bytes_ = kPage;
  header_ = reinterpret_cast<SegmentHeader*>(map_pages(fd_.get(), 0, kPage, protection));
  if (header_->magic != kMagic) throw Refused{"it holds something else"};
  if (header_->version != kVersion) {
    throw Refused{
        fmt::format("it has layout {}, this library has {}; use the `lockstep` command of the "
                    "library that the program links",
                    header_->version, kVersion)};
  }
  if (nonce && header_->nonce != *nonce) throw Refused{"it belongs to another job"};
  const int n_ranks = header_->n_ranks;
  if (n_ranks < 1 || n_ranks > kMaxRanks || n_bytes < base_bytes(n_ranks)) {
    throw Refused{"its header is damaged"};
  }
  ::munmap(header_, kPage);
  header_ = nullptr;
  n_base_bytes_ = base_bytes(n_ranks);
  header_ = reinterpret_cast<SegmentHeader*>(map_pages(fd_.get(), 0, n_base_bytes_, protection));
}

std::shared_ptr<Segment> Segment::attach(base::UniqueFd fd, std::uint64_t nonce) {
  std::shared_ptr<Segment> segment(new Segment);
  try {
    segment->open(std::move(fd), PROT_READ | PROT_WRITE, nonce);
  } catch (const Refused& refused) {
    throw UsageError({.operation = "init_dist"},
                     "LOCKSTEP_SEGMENT does not name this job's segment: " + refused.why +
                         ". Start the program with `lockstep run`, or unset the variable");
  }
  return segment;
}

std::shared_ptr<const Segment> Segment::look(base::UniqueFd fd) {
  std::shared_ptr<Segment> segment(new Segment);
  try {
    segment->open(std::move(fd), PROT_READ, std::nullopt);
  } catch (const Refused& refused) {
    throw UsageError({.operation = "lockstep top"}, "cannot look at this job: " + refused.why);
  }
  return segment;
}

Segment::~Segment() {
  if (header_ != nullptr) ::munmap(header_, n_base_bytes_);
}

RankBlock& Segment::rank(int world_rank) noexcept {
  return reinterpret_cast<RankBlock*>(header_ + 1)[world_rank];
}

const RankBlock& Segment::rank(int world_rank) const noexcept {
  return reinterpret_cast<const RankBlock*>(header_ + 1)[world_rank];
}

std::uint64_t Segment::reserve(std::size_t n_bytes) {
  n_bytes = round_to_pages(n_bytes);
  if (!fd_) return reinterpret_cast<std::uint64_t>(map_pages(-1, 0, n_bytes));
  // The system would give page after page and then end processes to find more.
  if (n_bytes > base::available_memory()) {
    errno = ENOMEM;
    fail("reserve", n_bytes);
  }
  const std::uint64_t offset = header_->n_bytes.fetch_add(n_bytes, std::memory_order_relaxed);
  if (::fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(n_bytes)) != 0) {
    fail("reserve", n_bytes);
  }
  return offset;
}

void Segment::release(std::uint64_t offset, std::size_t n_bytes) noexcept {
  n_bytes = round_to_pages(n_bytes);
  if (!fd_) {
    ::munmap(reinterpret_cast<void*>(offset), n_bytes);
  } else {
    ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                static_cast<off_t>(n_bytes));
  }
}

std::byte* Segment::map(std::uint64_t offset, std::size_t n_bytes) {
  if (!fd_) return reinterpret_cast<std::byte*>(offset);
  n_bytes = round_to_pages(n_bytes);
  // A peer said where; a store behind the end would end in SIGBUS.
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) fail("look at", n_bytes);
  const auto end = static_cast<std::uint64_t>(status.st_size);
  if (offset < n_base_bytes_ || offset % kPage != 0 || offset > end || n_bytes > end - offset) {
    throw EngineError({.operation = "shared memory"},
                      fmt::format("a peer names {} bytes at {} of a segment of {}; its memory is "
                                  "damaged: start the job again",
                                  n_bytes, offset, end));
  }
  return map_pages(fd_.get(), offset, n_bytes);
}

void Segment::unmap(std::byte* data, std::size_t n_bytes) noexcept {
  if (fd_) ::munmap(data, round_to_pages(n_bytes));
}

std::size_t Range::total(std::size_t n_bytes) noexcept { return sizeof(RangeHeader) + n_bytes; }

std::uint64_t Range::make(Segment& segment, std::size_t n_bytes, int n_users,
                          const std::function<void(std::byte*)>& initialise) {
  const std::uint64_t offset = segment.reserve(total(n_bytes));
  try {
    std::byte* data = segment.map(offset, total(n_bytes));
    reinterpret_cast<RangeHeader*>(data)->n_users.store(static_cast<std::uint32_t>(n_users),
                                                        std::memory_order_relaxed);
    initialise(data + sizeof(RangeHeader));
    segment.unmap(data, total(n_bytes));
  } catch (...) {
    segment.release(offset, total(n_bytes));
    throw;
  }
  return offset;
}

Range::Range(std::shared_ptr<Segment> segment, std::uint64_t offset, std::size_t n_bytes)
    : segment_(std::move(segment)),
      offset_(offset),
      n_bytes_(n_bytes),
      data_(segment_->map(offset, total(n_bytes))),
      pid_(::getpid()) {}

Range::~Range() {
  auto& n_users = reinterpret_cast<RangeHeader*>(data_)->n_users;
  // Acquire and release: the last one frees what the others have finished using.
  const bool last = pid_ == ::getpid() && n_users.fetch_sub(1, std::memory_order_acq_rel) == 1;
  segment_->unmap(data_, total(n_bytes_));
  if (last) segment_->release(offset_, total(n_bytes_));
}

}  // namespace lockstep::shared
