#pragma once

namespace lockstep::base {

/// Makes fence_registered() calls in any process reach the threads of this process. False if the
/// kernel or a sandbox does not support it. Threads: any. May be called repeatedly.
bool register_for_fences() noexcept;

/// A full memory fence of this thread and, as if between two of its instructions, of every thread
/// of every registered process. Takes a few microseconds. Call only if register_for_fences()
/// returned true.
void fence_registered() noexcept;

}  // namespace lockstep::base
