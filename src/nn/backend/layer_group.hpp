#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <lockstep/group.hpp>

/// What a batch normalisation communicates through: Groups that have all_gather and all_reduce
/// only, and whose calls Ctrl-C ends also within backward. Not collective. Threads: as the group's.
namespace lockstep::backend {

Group layer_group(const Group& group);

/// Does not keep the process group alive. Its calls take their place among the other users' of the
/// process group, in the order of the program, and have its timeout. Ranks in different layers are
/// a MismatchError over any backend. Over lockstep's own, errors are its own; of others
/// EngineError, or PeerLost or TimeoutError where the text says so.
Group layer_group(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group);

}  // namespace lockstep::backend
