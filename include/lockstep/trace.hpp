#pragma once

#include <memory>
#include <string_view>

namespace lockstep {

namespace internal {
class Trace;
struct TraceEvent;
}  // namespace internal

/// A region of the program in the trace of `lockstep run --trace`: from its making to the end of
/// its block.
///
///   { const lockstep::TraceScope scope("optimizer"); optimizer.step(); }
///
/// name: of which the first 40 bytes are kept; copied. Scopes of a thread nest. Never throws nor
/// allocates; docs/seeing.md has what it costs.
/// Threads: those that belong to a rank, by init_dist or run_ranks; on others it does nothing.
class TraceScope {
 public:
  explicit TraceScope(std::string_view name) noexcept;
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  std::shared_ptr<internal::Trace>
      trace_;                              // which destroy_dist may not close before the block ends
  internal::TraceEvent* event_ = nullptr;  // null where nobody traces
};

}  // namespace lockstep
