#include "engines/shared/segment/segment.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <lockstep/error.hpp>

#include "base/file_limit.hpp"
#include "base/job_clock.hpp"
#include "base/memory.hpp"
#include "base/text.hpp"
#include "base/version.hpp"
#include "engines/shared/segment/free_ranges.hpp"

namespace lockstep::shared {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t round_to_pages(std::size_t n_bytes) { return (n_bytes + kPage - 1) / kPage * kPage; }

std::size_t base_bytes(int n_ranks) {
  return round_to_pages(sizeof(SegmentHeader) +
                        static_cast<std::size_t>(n_ranks) * sizeof(RankBlock));
}

/// Why a segment is rejected.
struct Rejected {
  std::string why;
};

/// A number that identifies the job without revealing the nonce.
std::uint32_t job_number(std::uint64_t nonce) {
  return static_cast<std::uint32_t>((nonce * 0x9e3779b97f4a7c15ULL) >> 32U) | 1U;
}

const char* advice_for(int error_number) {
  switch (error_number) {
    case EFBIG: return "raise the limit on the size of files, which applies to it too (ulimit -f)";
    case EMFILE:
    case ENFILE: return "raise the limit on open files (ulimit -n)";
    case EPERM:
    case EACCES:
    case ENOSYS:
      return "let the container's seccomp profile, or the sandbox, allow memfd_create, fallocate, "
             "mmap and getrandom";
    default: return "free memory, or raise the limits (ulimit -v, the container's memory)";
  }
}

[[noreturn]] void fail(const char* what, std::size_t n_bytes, int error_number = errno) {
  throw SystemError({.operation = "shared memory"}, error_number,
                    fmt::format("cannot {} {} bytes; {}", what, n_bytes, advice_for(error_number)));
}

/// Otherwise the system would overcommit and then kill processes to free memory.
void check_available(std::size_t n_bytes) {
  if (n_bytes > base::available_memory()) fail("reserve", n_bytes, ENOMEM);
}

/// Allocates memory for a part of the file before use: a store to shared memory must never raise
/// SIGBUS. Returns an error number.
int reserve_pages(int fd, std::uint64_t offset, std::size_t n_bytes) noexcept {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return errno;
  const std::uint64_t end = offset + n_bytes;
  const bool grows = end > static_cast<std::uint64_t>(status.st_size);
  if (grows && base::exceeds_file_limit(end)) return EFBIG;
  while (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(n_bytes)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

/// populates: avoids a fault for each page; allocates those without memory.
std::byte* map_pages(int fd, std::uint64_t offset, std::size_t n_bytes, bool populates,
                     int protection = PROT_READ | PROT_WRITE) {
  const int shared = populates ? MAP_SHARED | MAP_POPULATE : MAP_SHARED;
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : shared;
  void* data = ::mmap(nullptr, n_bytes, protection, flags, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) fail("map", n_bytes);
  return static_cast<std::byte*>(data);
}

/// With many ranks, each uses few of the pages, and the cost of populating all pages on all ranks
/// is quadratic.
bool populates_all(int n_ranks) { return n_ranks <= 32; }

}  // namespace

void Segment::create(int n_ranks) {
  if (n_ranks < 1 || n_ranks > kMaxRanks) {
    throw UsageError(
        {.operation = "shared memory"},
        fmt::format("{} ranks requested; one machine supports 1 to {}", n_ranks, kMaxRanks));
  }
  n_ranks_ = n_ranks;
  n_base_bytes_ = base_bytes(n_ranks);
  if (fd_) {
    const int error_number = reserve_pages(fd_.get(), 0, n_base_bytes_);
    if (error_number != 0) fail("reserve", n_base_bytes_, error_number);
  }
  header_ = reinterpret_cast<SegmentHeader*>(
      map_pages(fd_.get(), 0, n_base_bytes_, populates_all(n_ranks)));
  header_->magic = kMagic;
  header_->version = base::layout_version();
  base::copy_text(header_->release, base::version());
  header_->n_ranks = n_ranks;
  if (::getrandom(&header_->nonce, sizeof header_->nonce, 0) != sizeof header_->nonce) {
    fail("draw the random", sizeof header_->nonce);
  }
  header_->n_bytes.store(n_base_bytes_, std::memory_order_relaxed);
  for (int r = 0; r < n_ranks; ++r) {
    internal::FlightRecord& flight = rank(r).flight;
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
  segment->fd_ =
      base::GuardedFd(base::UniqueFd(::memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (!segment->fd_) fail("make a memfd for", base_bytes(n_ranks));
  // By default any user may write a memfd that it can reach.
  if (::fchmod(segment->fd_.get(), S_IRUSR | S_IWUSR) != 0) fail("protect", base_bytes(n_ranks));
  // Prevents truncation while a peer uses the pages.
  if (::fcntl(segment->fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    fail("seal the memfd of", base_bytes(n_ranks));
  }
  segment->create(n_ranks);
  return segment;
}

void Segment::open(base::UniqueFd fd, int protection, const std::optional<std::uint64_t>& nonce) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) throw Rejected{"the descriptor is closed"};
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Rejected{"the descriptor is not a sealed memfd"};
  }
  const auto n_bytes = static_cast<std::size_t>(status.st_size);
  if (n_bytes < kPage) throw Rejected{"it is too short"};

  fd_ = base::GuardedFd(std::move(fd));
  n_base_bytes_ = kPage;
  header_ = reinterpret_cast<SegmentHeader*>(
      map_pages(fd_.get(), 0, kPage, /*populates=*/true, protection));
  if (header_->magic != kMagic) throw Rejected{"it contains something else"};
  if (header_->version != base::layout_version()) {
    throw Rejected{
        fmt::format("it is of {}, and this is {}; use the `lockstep` command of the library that "
                    "the program links",
                    base::release_text(base::text_in(header_->release), header_->version),
                    base::release_text(base::version(), base::layout_version()))};
  }
  if (nonce && header_->nonce != *nonce) throw Rejected{"it belongs to another job"};
  const int n_ranks = header_->n_ranks;
  if (n_ranks < 1 || n_ranks > kMaxRanks || n_bytes < base_bytes(n_ranks)) {
    throw Rejected{"its header is damaged"};
  }
  n_ranks_ = n_ranks;
  ::munmap(header_, kPage);
  header_ = nullptr;
  n_base_bytes_ = base_bytes(n_ranks);
  header_ = reinterpret_cast<SegmentHeader*>(
      map_pages(fd_.get(), 0, n_base_bytes_, populates_all(n_ranks), protection));
}

std::shared_ptr<Segment> Segment::attach(base::UniqueFd fd, std::uint64_t nonce) {
  std::shared_ptr<Segment> segment(new Segment);
  try {
    segment->open(std::move(fd), PROT_READ | PROT_WRITE, nonce);
    if (segment->header_->has_launcher) {
      base::follow_job_clock(segment->fd(), offsetof(SegmentHeader, job_clock));
    }
  } catch (const Rejected& rejected) {
    throw UsageError({.operation = "init_dist"},
                     "LOCKSTEP_SEGMENT does not name this job's segment: " + rejected.why +
                         ". Start the program with `lockstep run`, or unset the variable");
  }
  return segment;
}

std::shared_ptr<const Segment> Segment::attach_read_only(base::UniqueFd fd) {
  std::shared_ptr<Segment> segment(new Segment);
  try {
    segment->open(std::move(fd), PROT_READ, std::nullopt);
  } catch (const Rejected& rejected) {
    throw UsageError({.operation = "lockstep top"}, "cannot inspect this job: " + rejected.why);
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

void Segment::check_fd() const {
  if (fd_.is_intact()) return;
  throw SystemError({.operation = "shared memory"}, EBADF,
                    fmt::format("the program has closed descriptor {} of the shared memory, as "
                                "closefrom and close_range do; close only what the program opened, "
                                "or do so before init_dist",
                                fd_.get()));
}

std::uint64_t Segment::take_offset(std::size_t n_bytes) noexcept {
  const std::size_t n_pages = n_bytes / kPage;
  const std::uint64_t end = header_->n_bytes.load(std::memory_order_relaxed);
  if (n_pages <= UINT32_MAX) {
    const auto first = FreeRanges(header_->free_ranges).take(static_cast<std::uint32_t>(n_pages));
    const std::uint64_t offset = first.value_or(0) * std::uint64_t{kPage};
    if (offset >= n_base_bytes_ && offset + n_bytes <= end) return offset;  // else damaged
  }
  return header_->n_bytes.fetch_add(n_bytes, std::memory_order_relaxed);
}

void Segment::free_offset(std::uint64_t offset, std::size_t n_bytes) noexcept {
  if ((offset + n_bytes) / kPage > UINT32_MAX) return;
  FreeRanges(header_->free_ranges)
      .put({.first = static_cast<std::uint32_t>(offset / kPage),
            .n = static_cast<std::uint32_t>(n_bytes / kPage)});
}

std::uint64_t Segment::reserve(std::size_t n_bytes, std::size_t n_backed_bytes) {
  n_bytes = round_to_pages(n_bytes);
  n_backed_bytes = round_to_pages(n_backed_bytes);
  check_available(n_backed_bytes);
  if (!fd_) {
    return reinterpret_cast<std::uint64_t>(map_pages(-1, 0, n_bytes, /*populates=*/false));
  }
  check_fd();
  const std::uint64_t offset = take_offset(n_bytes);
  int error_number = reserve_pages(fd_.get(), offset, n_backed_bytes);
  // The file must reach to the end of what is mapped; only ftruncate could grow it without memory,
  // and a rank that is slower than another would shrink it.
  if (error_number == 0 && n_backed_bytes < n_bytes) {
    error_number = reserve_pages(fd_.get(), offset + n_bytes - kPage, kPage);
  }
  if (error_number != 0) {
    release(offset, n_bytes);
    fail("reserve", n_bytes, error_number);
  }
  return offset;
}

void Segment::release(std::uint64_t offset, std::size_t n_bytes) noexcept {
  n_bytes = round_to_pages(n_bytes);
  if (!fd_) {
    ::munmap(reinterpret_cast<void*>(offset), n_bytes);
    return;
  }
  if (!fd_.is_intact()) return;  // the pages stay until the job ends
  const bool is_zero = ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                   static_cast<off_t>(offset), static_cast<off_t>(n_bytes)) == 0;
  if (is_zero) free_offset(offset, n_bytes);
}

void Segment::wake_at(std::uint64_t offset) noexcept {
  struct stat status {};
  if (!fd_.is_intact() || offset % sizeof(std::uint32_t) != 0 || ::fstat(fd_.get(), &status) != 0 ||
      offset >= static_cast<std::uint64_t>(status.st_size)) {
    return;
  }
  const std::uint64_t page = offset / kPage * kPage;
  void* const data = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(),
                            static_cast<off_t>(page));
  if (data == MAP_FAILED) return;
  base::futex_wake_all(*reinterpret_cast<std::atomic<std::uint32_t>*>(
                           static_cast<std::byte*>(data) + (offset - page)),
                       base::FutexScope::process);
  ::munmap(data, kPage);
}

std::byte* Segment::map(std::uint64_t offset, std::size_t n_bytes, std::size_t n_backed_bytes) {
  if (!fd_) return reinterpret_cast<std::byte*>(offset);
  n_bytes = round_to_pages(n_bytes);
  n_backed_bytes = round_to_pages(n_backed_bytes);
  check_fd();
  // The offset came from a peer; a store beyond the end would raise SIGBUS.
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) fail("access", n_bytes);
  const auto end = static_cast<std::uint64_t>(status.st_size);
  if (offset < n_base_bytes_ || offset % kPage != 0 || offset > end || n_bytes > end - offset) {
    throw EngineError({.operation = "shared memory"},
                      fmt::format("a peer refers to {} bytes at {} of a segment of {}; the shared "
                                  "memory is damaged: restart the job",
                                  n_bytes, offset, end));
  }
  const bool is_backed = n_backed_bytes == n_bytes;
  std::byte* const data =
      map_pages(fd_.get(), offset, n_bytes, is_backed && populates_all(n_ranks_));
  if (!is_backed && populates_all(n_ranks_)) {
    static_cast<void>(base::populate_to_write(data, n_backed_bytes));  // else faults do it
  }
  return data;
}

void Segment::unmap(std::byte* data, std::size_t n_bytes) noexcept {
  if (fd_) ::munmap(data, round_to_pages(n_bytes));
}

std::size_t Range::total(std::size_t n_bytes) noexcept { return sizeof(RangeHeader) + n_bytes; }

std::uint64_t Range::make(Segment& segment, Size size, int n_users,
                          const std::function<void(std::byte*)>& initialise) {
  const std::size_t n_backed = total(size.n_backed_bytes);
  const std::uint64_t offset = segment.reserve(total(size.n_bytes), n_backed);
  try {
    std::byte* data = segment.map(offset, n_backed, n_backed);
    reinterpret_cast<RangeHeader*>(data)->n_users.store(static_cast<std::uint32_t>(n_users),
                                                        std::memory_order_relaxed);
    initialise(data + sizeof(RangeHeader));
    segment.unmap(data, n_backed);
  } catch (...) {
    segment.release(offset, total(size.n_bytes));
    throw;
  }
  return offset;
}

std::byte* Range::attach(Segment& segment, std::uint64_t offset, Size size) try {
  return segment.map(offset, total(size.n_bytes), total(size.n_backed_bytes));
} catch (const SystemError&) {
  // Let the peers release the range without this user; mapping one page may still succeed.
  try {
    std::byte* const page = segment.map(offset, sizeof(RangeHeader), sizeof(RangeHeader));
    detach(segment, *reinterpret_cast<RangeHeader*>(page), offset, total(size.n_bytes),
           sizeof(RangeHeader));
  } catch (const Error&) {
  }
  throw;
}

Range::Range(std::shared_ptr<Segment> segment, std::uint64_t offset, Size size)
    : segment_(std::move(segment)),
      offset_(offset),
      n_bytes_(size.n_bytes),
      data_(attach(*segment_, offset, size)),
      pid_(::getpid()) {}

void Range::back(std::byte* first, std::size_t n_bytes, std::size_t n_parts, std::size_t stride) {
  check_available(n_parts * n_bytes);
  if (segment_->fd() < 0) return;  // the memory of one process needs no more
  for (std::size_t i = 0; i < n_parts; ++i) {
    std::byte* const part = first + i * stride;
    if (base::populate_to_write(part, n_bytes) == 0) continue;
    segment_->check_fd();
    const auto begin = static_cast<std::uint64_t>(part - data_);
    const int error_number = reserve_pages(segment_->fd(), offset_ + begin, n_bytes);
    if (error_number != 0) fail("reserve", n_bytes, error_number);
  }
}

void Range::detach(Segment& segment, RangeHeader& header, std::uint64_t offset, std::size_t n_bytes,
                   std::size_t n_mapped_bytes) noexcept {
  // Acquire and release: the last user frees memory that the others have finished using.
  const bool is_last = header.n_users.fetch_sub(1, std::memory_order_acq_rel) == 1;
  segment.unmap(reinterpret_cast<std::byte*>(&header), n_mapped_bytes);
  if (is_last) segment.release(offset, n_bytes);
}

Range::~Range() {
  if (pid_ != ::getpid()) {
    segment_->unmap(data_, total(n_bytes_));
    return;
  }
  detach(*segment_, *reinterpret_cast<RangeHeader*>(data_), offset_, total(n_bytes_),
         total(n_bytes_));
}

}  // namespace lockstep::shared
