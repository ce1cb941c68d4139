#pragma once

namespace lockstep::test {

/// UndefinedBehaviorSanitizer opens a pipe to look whether memory can be read, and takes a failure
/// for memory that cannot: it must not run where a test uses up the descriptors.
#if defined(__SANITIZE_ADDRESS__)  // which is built with it
inline constexpr bool kSanitizerNeedsDescriptors = true;
#else
inline constexpr bool kSanitizerNeedsDescriptors = false;
#endif

}  // namespace lockstep::test
