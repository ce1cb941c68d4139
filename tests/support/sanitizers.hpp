#pragma once

namespace lockstep::test {

/// UndefinedBehaviorSanitizer opens a pipe to check whether memory is readable, and treats a
/// failure as unreadable memory: it must not run in tests that exhaust the descriptors.
#if defined(__SANITIZE_ADDRESS__)  // which includes it
inline constexpr bool kSanitizerNeedsDescriptors = true;
#else
inline constexpr bool kSanitizerNeedsDescriptors = false;
#endif

}  // namespace lockstep::test
