#pragma once

#include <fmt/format.h>

#include <chrono>
#include <source_location>
#include <string>
#include <string_view>

#include "base/text.hpp"

namespace lockstep::internal {

/// How much longer than its own limit a call waits for posted ones before it, whose limits began
/// before and whose errors name the ranks that are late: they look every few milliseconds, and
/// between hosts they have a second more.
inline constexpr std::chrono::milliseconds kPostedReportTime{2000};

/// An asynchronous call, as errors name it.
struct PostedCall {
  std::string_view operation;  ///< static
  std::source_location where{};

  /// Of a call whose limit ended in the wait for this one.
  std::string waited_for(int rank, double limit_s) const {
    return fmt::format("rank {} waited {:g} s for its own {}, posted at {}:{}, which has not ended",
                       rank, limit_s, operation, base::base_name(where.file_name()), where.line());
  }
};

/// With kPostedReportTime; nanoseconds::max() remains.
inline std::chrono::nanoseconds with_report_time(std::chrono::nanoseconds left) {
  constexpr auto kMost = std::chrono::nanoseconds::max();
  return left >= kMost - kPostedReportTime ? kMost : left + kPostedReportTime;
}

}  // namespace lockstep::internal
