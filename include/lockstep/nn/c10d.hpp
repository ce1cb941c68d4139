#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <lockstep/group.hpp>
#include <string>

namespace lockstep::nn {

/// A Group over a process group of c10d's: Gloo, MPI, UCC, NCCL, or one's own.
///
/// Every operation, type and reduction works on CPU buffers; of `process_group` only send and recv
/// are used (and recvAnysource and Work::abort where it has them: without, a peer's failure is
/// noticed at the deadline or by c10d's own error). NCCL moves the bytes through CUDA memory; that
/// path is untested. While a Group uses the process group, nobody else may. `name`: for errors.
/// `timeout`: limit of one operation. Collective. Errors: as Group's; what c10d throws arrives as
/// EngineError, or PeerLost where a connection closed. Threads: each Group one call at a time;
/// several Groups (split, duplicate) at once, except over NCCL, which tells no messages apart.
Group make_group(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::string name = "c10d",
                 std::chrono::milliseconds timeout = std::chrono::minutes(5));

}  // namespace lockstep::nn
