#pragma once

#include <ucp/api/ucp.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engines/ucx/ucx_abi.hpp"

namespace lockstep::ucx_module {

/// Functions that return int return 0, a status of UCX with its sign changed, or one of these.
inline constexpr int kOutOfMemory = -UCS_ERR_NO_MEMORY;
/// An exchange of the group ended in the middle of a message.
inline constexpr int kGroupIsOver = -1;

/// Calls progress() until `is_over()`, or for `at_most`. Returns whether it is over.
template <class Progress, class IsOver>
bool progress_until(std::chrono::milliseconds at_most, Progress progress, IsOver is_over) {
  const auto end = std::chrono::steady_clock::now() + at_most;
  while (!is_over()) {
    progress();
    if (std::chrono::steady_clock::now() > end) return is_over();
  }
  return true;
}

/// Makes the context of all workers, once.
int start(const char* transports);

/// A worker of UCX and its endpoints, one to each peer that has been used. Nothing moves but in its
/// functions. Threads: with `mutex`.
class Worker {
 public:
  /// Leaves `worker` null if it returns an error.
  static int make(std::unique_ptr<Worker>& worker);
  /// Sends what is on the way to peers that still receive it, for a second at most. Leaves the
  /// worker as it is, for ever, if it is stuck, or in a fork of the process that made it.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  int address(LockstepUcxAddress& address);
  void set_peers(const LockstepUcxAddress* addresses, std::size_t n);

  struct Peer {
    std::string address;
    ucp_ep_h endpoint = nullptr;
    ucs_status_t status = UCS_OK;  ///< why its endpoint was closed
  };
  /// Of peer number i, whose endpoint exists from now on unless an error is returned.
  int connect(std::size_t i, Peer*& peer);
  Peer& peer(std::size_t i) { return peers_[i]; }
  std::size_t n_peers() const { return peers_.size(); }

  unsigned progress() { return ucp_worker_progress(worker_); }
  ucp_worker_h get() const { return worker_; }

  std::mutex mutex;
  /// A message may still be written to memory that is not the group's any more: no progress.
  bool is_stuck = false;

 private:
  Worker() = default;

  ucp_worker_h worker_ = nullptr;
  std::vector<Peer> peers_;  // its elements stay where they are
};

/// Whether this process has loaded the module, and is no fork of one that has.
bool is_own_process();

}  // namespace lockstep::ucx_module
