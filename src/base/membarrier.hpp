#pragma once

namespace lockstep::base {

/// Lets others' fence_registered() reach the threads of this process. False where the kernel, or a
/// sandbox, has no such call. Threads: any, any number of times.
bool register_for_fences() noexcept;

/// A full memory fence of this thread and, as if it stood between two of its instructions, of every
/// thread of every registered process. Some microseconds. Only where register_for_fences() said
/// that it can be had.
void fence_registered() noexcept;

}  // namespace lockstep::base
