#include "arena.hpp"

#include <cstdlib>
#include <new>

extern "C" {
extern char __executable_start;  // NOLINT: defined by the linker
extern char etext;
}

namespace growth {

char* arena = nullptr;

}  // namespace growth

// Only allocations of this program's code; SimGrid keeps its own memory.
void* operator new(std::size_t n_bytes) {
  const char* const caller = static_cast<const char*>(__builtin_return_address(0));
  if (growth::arena != nullptr && n_bytes >= growth::kLarge && n_bytes <= growth::kArenaBytes &&
      caller >= &__executable_start && caller < &etext) {
    return growth::arena;
  }
  if (void* const data = std::malloc(n_bytes)) return data;
  throw std::bad_alloc();
}

void operator delete(void* data) noexcept {
  if (data != growth::arena) std::free(data);
}

void operator delete(void* data, std::size_t) noexcept { operator delete(data); }
