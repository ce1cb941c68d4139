#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace lockstep::base {

/// Who may wait on a word: threads of this process only, or every process that maps it.
enum class FutexScope : std::uint8_t { thread, process };

/// Sleeps while word == expected, until woken, at most `timeout`. Returns false only when the time
/// ran out; true may be a spurious wake-up, so callers look again.
bool futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds timeout, FutexScope scope) noexcept;

void futex_wake_all(std::atomic<std::uint32_t>& word, FutexScope scope) noexcept;

/// Tells the core that this is a spin loop.
inline void cpu_relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Lets another thread have this core.
void yield_cpu() noexcept;

}  // namespace lockstep::base
