#include "group/native_engine.hpp"

#include "group/group_state.hpp"

namespace lockstep::internal {
namespace {

bool ask(const Engine* engine, bool (NativeEngine::*question)() const noexcept) noexcept {
  const auto* const native = dynamic_cast<const NativeEngine*>(engine);
  return native != nullptr && (native->*question)();
}

}  // namespace

bool reports_progress(const Engine& engine) noexcept {
  return ask(&engine, &NativeEngine::reports_progress);
}

bool NativeGroup::has_low_latency(const Group& group) noexcept {
  return ask(group.state_->engine(), &NativeEngine::has_low_latency);
}

bool NativeGroup::reduces_moments(const Group& group) noexcept {
  return ask(group.state_->engine(), &NativeEngine::reduces_moments);
}

}  // namespace lockstep::internal
