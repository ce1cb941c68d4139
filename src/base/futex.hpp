#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace lockstep::base {

/// Which threads may wait on a word: those of this process, or of every process that maps it.
enum class FutexScope : std::uint8_t { thread, process };

/// Sleeps while word == expected, until woken, at most `timeout`. Returns false only on timeout;
/// true may be a spurious wake-up, so callers must check again.
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

/// Yields this core to another thread.
void yield_cpu() noexcept;

}  // namespace lockstep::base
