#include "base/job_clock.hpp"

#include <sys/mman.h>

#include <atomic>
#include <mutex>

namespace lockstep::base {
namespace {

using Word = std::atomic<std::int64_t>;

constexpr std::size_t kPage = 4096;

constinit Word own_word{0};
constinit std::atomic<const Word*> word{&own_word};

std::chrono::nanoseconds monotonic() noexcept {
  return std::chrono::steady_clock::now().time_since_epoch();
}

/// Acquire: what a rank does after it was continued is timed by the word written before that.
std::chrono::nanoseconds job_time_by(std::int64_t state) noexcept {
  return state < 0 ? std::chrono::nanoseconds(-state)
                   : monotonic() - std::chrono::nanoseconds(state);
}

}  // namespace

std::chrono::nanoseconds job_time() noexcept {
  return job_time_by(word.load(std::memory_order_acquire)->load(std::memory_order_acquire));
}

void follow_job_clock(int fd, std::size_t offset) noexcept {
  static constinit std::mutex mutex;
  static void* page = nullptr;
  const std::lock_guard lock(mutex);
  const auto first = static_cast<off_t>(offset / kPage * kPage);
  const int fixed = page == nullptr ? 0 : MAP_FIXED;
  void* const mapped = ::mmap(page, kPage, PROT_READ, MAP_SHARED | fixed, fd, first);
  if (mapped == MAP_FAILED) {
    word.store(&own_word, std::memory_order_release);
    return;
  }
  page = mapped;
  word.store(reinterpret_cast<const Word*>(static_cast<std::byte*>(page) + offset % kPage),
             std::memory_order_release);
}

std::int64_t job_clock_word() noexcept { return own_word.load(std::memory_order_relaxed); }

std::int64_t stop_job_clock() noexcept {
  const std::int64_t stands = -job_time_by(job_clock_word()).count();
  own_word.store(stands, std::memory_order_relaxed);
  return stands;
}

std::int64_t continue_job_clock() noexcept {
  const std::int64_t state = job_clock_word();
  const std::int64_t stopped = (monotonic() - job_time_by(state)).count();
  own_word.store(stopped, std::memory_order_relaxed);
  return stopped;
}

}  // namespace lockstep::base
