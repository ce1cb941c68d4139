#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <lockstep/group.hpp>
#include <string>

namespace lockstep::nn {

/// A Group over a c10d process group: Gloo, MPI, UCC, NCCL, or a custom one.
///
/// Every operation, type and reduction works on CPU buffers. Of `process_group` only send and recv
/// are used (and recvAnysource and Work::abort if available; without them a peer's failure is
/// detected at the deadline or by c10d's own error). NCCL transfers through CUDA memory; one
/// rank has run that. The process group must have no other user meanwhile. `name`: for errors.
/// `timeout`: limit of one operation. Collective. Errors: as Group's; c10d's exceptions become
/// EngineError, or PeerLost if a connection was closed. Threads: one call at a time per Group;
/// several Groups (split, duplicate) concurrently, except over NCCL, which has no message tags.
Group make_group(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::string name = "c10d",
                 std::chrono::milliseconds timeout = std::chrono::minutes(5));

}  // namespace lockstep::nn
