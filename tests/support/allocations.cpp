#include "support/allocations.hpp"

#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <new>
#include <string_view>
#include <utility>

namespace {
std::atomic<std::size_t> n_so_far = 0;
thread_local int n_until_failure = 0;

/// Whether a function of c10d or Gloo is under way on this thread.
bool is_in_c10d() noexcept {
  std::array<void*, 64> frames{};
  const int n = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  return std::any_of(frames.begin(), frames.begin() + n, [](void* frame) {
    Dl_info info{};
    if (::dladdr(frame, &info) == 0 || info.dli_fname == nullptr) return false;
    const std::string_view file = info.dli_fname;
    return file.find("libtorch") != file.npos || file.find("libgloo") != file.npos;
  });
}

bool fails() noexcept {
  n_so_far.fetch_add(1, std::memory_order_relaxed);
  if (n_until_failure == 0 || --n_until_failure > 0) return false;
  if (!is_in_c10d()) return true;
  n_until_failure = 1;  // the next one
  return false;
}
}  // namespace

std::size_t lockstep::test::n_allocations() noexcept { return n_so_far.load(); }
int lockstep::test::fail_allocation(int n) noexcept { return std::exchange(n_until_failure, n); }

// In a file of its own: inlined into callers, compilers would report free() as a bug.
void* operator new(std::size_t n_bytes) {
  if (fails()) throw std::bad_alloc();
  if (void* memory = std::malloc(n_bytes == 0 ? 1 : n_bytes)) return memory;
  throw std::bad_alloc();
}
// A sanitizer replaces every form: memory freed by one of these must come from one of these.
void* operator new(std::size_t n_bytes, const std::nothrow_t&) noexcept {
  return fails() ? nullptr : std::malloc(n_bytes == 0 ? 1 : n_bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
