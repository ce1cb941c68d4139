#include "engines/hierarchical/levels.hpp"

#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "base/patience.hpp"
#include "group/failure.hpp"

namespace lockstep::hierarchical {

void Levels::refuse(const Refusal& refusal) const noexcept {
  local->refuse(refusal);
  if (leaders) leaders->refuse(refusal);
}

void Levels::abandon(std::string_view reason) const noexcept {
  try {
    end_with(EngineError({}, std::string(reason)));
  } catch (const std::bad_alloc&) {
    local->abandon(reason);
    if (leaders) leaders->abandon(reason);
    if (global) global->abandon(reason);
  }
}

/// Each level has its own rank numbers, so all levels get the error that peers throw, with the
/// group's numbers.
void Levels::end_with(const Error& error) const noexcept {
  const auto end_all = [this](const Error& of_peer) {
    if (global) global->end_with(of_peer);
    if (leaders) leaders->end_with(of_peer);
    local->end_with(of_peer);
  };
  try {
    internal::throw_failure(internal::failure_for_peers(error, rank()), error.context());
  } catch (const Error& of_peer) {
    end_all(of_peer);
  } catch (const std::bad_alloc&) {
    end_all(error);
  }
}

Call Levels::on_host(Call step) {
  if (are_one_channel) {
    if (std::exchange(has_compared, true)) step.check = Check::off;
  } else if (n_hosts() > 1) {
    step.ranks = topology.members;
  }
  return limited(step);
}

void Levels::run_leaders(Call call) {
  call = limited(call);
  if (are_one_channel) return leaders->run(call);
  call.ranks = topology.leaders;
  call.timeout += base::patience::kOtherHosts;
  // The other ranks of this host wait for this one, which is not the late one if a host is late.
  local->extend_deadline(call.timeout + base::patience::kOtherHostsLate);
  leaders->run(call);
  local->extend_deadline(base::patience::kOtherHosts);  // the result is about to reach them
}

void Levels::run_global(Call call) {
  call = limited(call);
  if (are_one_channel) {
    call.check = Check::off;  // after compare()
    return global->run(call);
  }
  call.timeout += base::patience::kOtherHosts;
  local->extend_deadline(call.timeout + base::patience::kOtherHostsLate);
  global->run(call);
  local->extend_deadline(base::patience::kOtherHosts);
}

void Levels::run_message(const Call& call) {
  local->begin_between_hosts(call);
  global->run(limited(call));
  local->end_between_hosts();
}

void Levels::run_barrier(const Call& call) {
  run_local(call);
  if (is_leader()) run_leaders(call);
  // What the leader sends now arrives after all ranks have begun.
  std::byte released{};
  Call release = step_of(call, Op::broadcast, /*root=*/0);
  release.dtype = DType::u8;
  release.count = 1;
  release.in = release.out = &released;
  run_local(release);
}

void Levels::compare(const Call& call) {
  if (call.check == Check::off) return;
  if (are_one_channel) return run_barrier(barrier_of(call));
  run_local(barrier_of(call));
  if (n_hosts() > 1 && is_leader()) run_leaders(barrier_of(call));
}

}  // namespace lockstep::hierarchical
