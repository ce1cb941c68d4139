#include <lockstep/trace.hpp>

#include "base/ticks.hpp"
#include "record/trace_file.hpp"
#include "world/session.hpp"

namespace lockstep {

TraceScope::TraceScope(std::string_view name) noexcept {
  const internal::Session* const session = internal::session();
  if (session == nullptr || !session->trace() || session->is_forked_child()) return;
  trace_ = session->trace();
  event_ = trace_->begin(name, base::ticks());
}

TraceScope::~TraceScope() {
  if (event_ != nullptr) internal::Trace::end(*event_, base::ticks(), /*has_failed=*/false);
}

}  // namespace lockstep
