#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

/// The time of a job: CLOCK_MONOTONIC without the time for which the job was stopped as a whole,
/// as Ctrl-Z does under `lockstep run`. No rank is late because of that time, so it counts against
/// no limit.
///
/// Its state is one word: the nanoseconds for which the job was stopped before or, while it is
/// stopped, the negated reading at which the clock stands. The launcher writes it into the segment
/// before it stops the ranks and before it continues them; the ranks map it. In a process that no
/// launcher stops the word remains 0. docs/design/013 has what was rejected.
namespace lockstep::base {

std::chrono::nanoseconds job_time() noexcept;

/// The word, and its offset in a memfd: from then on job_time() reads it there. If it cannot be
/// mapped, stopped time counts. The page stays mapped, because any thread may read the clock at any
/// time; the next call replaces it. Threads: any.
void follow_job_clock(int fd, std::size_t offset) noexcept;

// --- the launcher's side: one thread

std::int64_t job_clock_word() noexcept;
/// Both return the new word.
std::int64_t stop_job_clock() noexcept;
std::int64_t continue_job_clock() noexcept;

}  // namespace lockstep::base
