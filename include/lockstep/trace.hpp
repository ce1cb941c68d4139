#pragma once

#include <memory>
#include <string_view>

namespace lockstep {

namespace internal {
class Trace;
struct TraceEvent;
}  // namespace internal

/// A region of the program in the trace of `lockstep run --trace`: from its construction to its
/// destruction.
///
///     { const lockstep::TraceScope scope("optimizer"); optimizer.step(); }
///
/// name: copied and truncated to 40 bytes. Scopes of a thread nest. Never throws or allocates; see
/// docs/observability.md for its cost.
/// Threads: those that belong to a rank (init_dist or run_ranks); does nothing on other threads.
class TraceScope {
 public:
  explicit TraceScope(std::string_view name) noexcept;
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  std::shared_ptr<internal::Trace> trace_;  // keeps the trace open after destroy_dist
  internal::TraceEvent* event_ = nullptr;   // null if tracing is off
};

}  // namespace lockstep
