#include "support/allocations.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::size_t> n_so_far = 0;
}  // namespace

std::size_t lockstep::test::n_allocations() noexcept { return n_so_far.load(); }

// Here alone, where no caller can be inlined into: compilers take free() for a mistake then.
void* operator new(std::size_t n_bytes) {
  n_so_far.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(n_bytes == 0 ? 1 : n_bytes)) return memory;
  throw std::bad_alloc();
}
// A sanitizer brings every form of its own: what one of these frees, one of these must have made.
void* operator new(std::size_t n_bytes, const std::nothrow_t&) noexcept {
  n_so_far.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(n_bytes == 0 ? 1 : n_bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
