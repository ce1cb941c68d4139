#include "record/trace_file.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <lockstep/error.hpp>
#include <span>
#include <system_error>

#include "base/file_limit.hpp"
#include "base/memory.hpp"
#include "base/process.hpp"
#include "base/text.hpp"
#include "record/mapped_file.hpp"
#include "record/recorder.hpp"

namespace lockstep::internal {
namespace {

/// Events for which space is reserved at once: 64 KiB.
constexpr std::size_t kChunk = 1024;
static_assert(TraceFile::kMaxEvents % kChunk == 0);

constexpr auto relaxed = std::memory_order_relaxed;

[[noreturn]] void fail(int error_number, const std::string& text) {
  throw SystemError({.operation = "trace"}, error_number, text);
}

/// Returns an errno value.
int reserve(int fd, TraceFile* file, std::size_t offset, std::size_t n_bytes) noexcept {
  if (const int error_number = reserve_file(fd, offset, n_bytes); error_number != 0) {
    return error_number;
  }
  // Optional: without it the traced program has a fault for each page.
  static_cast<void>(base::populate_to_write(reinterpret_cast<std::byte*>(file) + offset, n_bytes));
  return 0;
}

}  // namespace

std::string name_of_clock() {
  std::error_code ignored;  // a system without time namespaces
  const auto space = std::filesystem::read_symlink("/proc/self/ns/time", ignored);
  return base::boot_id() + ' ' + space.string();
}

Trace::Trace(const std::string& dir, const FlightRecord& record, int n_restarts) {
  std::string path = fmt::format("{}/rank-{}.XXXXXX", dir, record.rank);
  fd_ = base::GuardedFd(base::UniqueFd(::mkostemp(path.data(), O_CLOEXEC)));
  if (!fd_) fail(errno, fmt::format("cannot make '{}' (LOCKSTEP_TRACE)", path));
  constexpr std::size_t kHead = offsetof(TraceFile, events);
  int error_number = base::exceeds_file_limit(sizeof(TraceFile)) ? EFBIG : 0;
  if (error_number == 0 && ::ftruncate(fd_.get(), sizeof(TraceFile)) != 0) error_number = errno;
  if (error_number == 0) {
    file_ = map_file<TraceFile>(fd_.get(), PROT_READ | PROT_WRITE);
    error_number =
        file_ ? reserve(fd_.get(), file_.get(), 0, kHead + kChunk * sizeof(TraceEvent)) : errno;
  }
  if (error_number != 0) {
    ::unlink(path.c_str());
    fail(error_number, fmt::format("no space for '{}' (LOCKSTEP_TRACE), of up to {} MiB; free "
                                   "some, or raise the limits (ulimit -f, ulimit -v)",
                                   path, sizeof(TraceFile) >> 20U));
  }

  file_->rank = record.rank;
  file_->world_size = record.world_size;
  file_->pid = record.pid;
  file_->n_restarts = n_restarts;
  file_->job = record.job;
  base::copy_text(file_->clock, name_of_clock());
  ::gethostname(file_->host.data(), file_->host.size() - 1);
  const base::TickAnchor anchor = base::now();
  file_->anchor_ticks = anchor.ticks;
  file_->anchor_ns = anchor.ns;
  file_->n_room.store(kChunk, std::memory_order_release);
  for (std::uint32_t i = 0; i < FlightRecord::kMaxSites; ++i) name_site(i, site_of(record, i));
  for (std::uint32_t i = 0; i < FlightRecord::kMaxGroups; ++i) {
    name_group(i, name_of(record.groups[i]));
  }
  std::copy(TraceFile::kMagic.begin(), TraceFile::kMagic.end(), file_->magic.begin());
}

void Trace::name_site(std::uint32_t number, std::string_view text) noexcept {
  base::copy_text(file_->sites[number], text);
}

void Trace::name_group(std::uint32_t number, std::string_view text) noexcept {
  base::copy_text(file_->groups[number], text);
}

TraceEvent* Trace::begin(const TraceEvent::CallPart& call, std::uint64_t start) noexcept {
  TraceEvent* const event = take(this_thread(), start);
  if (event == nullptr) return nullptr;
  event->call = call;
  event->kind.store(TraceEvent::Kind::call, std::memory_order_release);
  return event;
}

TraceEvent* Trace::begin(std::string_view region, std::uint64_t start) noexcept {
  return begin_text(TraceEvent::Kind::region, region, this_thread(), start);
}

TraceEvent* Trace::begin_text(TraceEvent::Kind kind, std::string_view text, std::int32_t thread,
                              std::uint64_t start) noexcept {
  TraceEvent* const event = take(thread, start);
  if (event == nullptr) return nullptr;
  std::memcpy(event->text.data(), text.data(), std::min(text.size(), event->text.size()));
  event->kind.store(kind, std::memory_order_release);
  return event;
}

TraceEvent* Trace::take(std::int32_t thread, std::uint64_t start) noexcept {
  const std::uint64_t number = file_->n_events.fetch_add(1, relaxed);
  if (number >= file_->n_room.load(std::memory_order_acquire) && !make_room(number)) {
    return nullptr;
  }
  TraceEvent& event = file_->events[number];
  event.start = start;
  event.thread = thread;
  return &event;
}

bool Trace::make_room(std::uint64_t number) noexcept {
  if (number >= TraceFile::kMaxEvents || file_->error_number.load(relaxed) != 0) return false;
  const std::lock_guard lock(mutex_);
  while (number >= file_->n_room.load(relaxed) && file_->error_number.load(relaxed) == 0) {
    const std::uint64_t n_room = file_->n_room.load(relaxed);
    const std::size_t offset = offsetof(TraceFile, events) + n_room * sizeof(TraceEvent);
    // The program may have closed the descriptor and reused its number for another file.
    const int error_number =
        fd_.is_intact() ? reserve(fd_.get(), file_.get(), offset, kChunk * sizeof(TraceEvent))
                        : EBADF;
    if (error_number != 0) {
      file_->error_number.store(error_number, relaxed);
    } else {
      file_->n_room.store(n_room + kChunk, std::memory_order_release);
    }
  }
  return number < file_->n_room.load(relaxed);
}

/// The first call of a thread in a trace also records the thread's name.
std::int32_t Trace::this_thread() noexcept {
  struct Known {
    const TraceFile* file = nullptr;
    std::int64_t anchor_ns = 0;  // a new trace may be mapped at the address of an old one
    std::int32_t thread = 0;
  };
  thread_local Known known;
  if (known.file == file_.get() && known.anchor_ns == file_->anchor_ns) return known.thread;
  known = {file_.get(), file_->anchor_ns, ::gettid()};
  std::array<char, 16> name{};
  if (known.thread == ::getpid()) {
    base::copy_text(name, "main");
  } else {
    ::pthread_getname_np(::pthread_self(), name.data(), name.size());
  }
  begin_text(TraceEvent::Kind::thread, name.data(), known.thread, base::ticks());
  return known.thread;
}

}  // namespace lockstep::internal
