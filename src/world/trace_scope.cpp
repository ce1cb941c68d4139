#include <lockstep/trace.hpp>

#include "base/ticks.hpp"
#include "record/trace_file.hpp"
#include "world/session.hpp"

namespace lockstep {

TraceScope::TraceScope(std::string_view name) noexcept : trace_(internal::trace()) {
  if (trace_ != nullptr) event_ = trace_->begin(name, base::ticks());
}

TraceScope::~TraceScope() {
  if (event_ != nullptr) internal::Trace::end(*event_, base::ticks(), /*has_failed=*/false);
}

}  // namespace lockstep
