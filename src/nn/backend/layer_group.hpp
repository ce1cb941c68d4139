#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <lockstep/group.hpp>

/// What a batch normalisation communicates through: Groups that have all_gather and all_reduce
/// only, and whose calls Ctrl-C ends also within backward. Not collective. Threads: as the group's.
namespace lockstep::backend {

Group layer_group(const Group& group);

/// The same Group for each process group, which it does not keep alive. Its calls take their place
/// among the other users' of the process group, in the order of the program, and have its timeout.
/// Errors of c10d: EngineError, or PeerLost or TimeoutError where the text says so.
Group layer_group(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group);

}  // namespace lockstep::backend
