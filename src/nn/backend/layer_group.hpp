#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <lockstep/group.hpp>

namespace lockstep::backend {

/// What a batch normalisation communicates through: a Group that has all_gather and all_reduce
/// only. Does not keep the process group alive. Its calls take their place among the other users'
/// of the process group, in the order of the program, and have its timeout. Ranks in different
/// layers are a MismatchError over any backend. Over lockstep's own, errors are its own; of others
/// EngineError, or PeerLost or TimeoutError where the text says so. Not collective. Threads: as the
/// process group's.
Group layer_group(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group);

}  // namespace lockstep::backend
