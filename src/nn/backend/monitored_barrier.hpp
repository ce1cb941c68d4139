#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <lockstep/error.hpp>
#include <utility>

#include "nn/gloo_engine/c10d_rendezvous.hpp"

namespace lockstep::backend {

using nn::detail::Membership;

/// torch's monitored barrier: rank 0 waits for the others for a limited time and names those that
/// did not arrive. It uses the store only, needs no connection between the ranks, and leaves the
/// group unchanged whatever the result. Threads: one call at a time.
class MonitoredBarrier {
 public:
  struct Limits {
    std::chrono::milliseconds of_rank_0;
    std::chrono::milliseconds of_others;
    bool names_all_late_ranks;  // else the first
  };

  MonitoredBarrier(c10::intrusive_ptr<c10d::Store> store, Membership membership)
      : store_(std::move(store)), membership_(std::move(membership)) {}

  /// Collective. Throws TimeoutError, PeerLost; EngineError if the store fails. Their texts begin
  /// as those of Gloo, which programs look for.
  void wait(const ErrorContext& context, const Limits& limits);

 private:
  class Round;

  c10::intrusive_ptr<c10d::Store> store_;
  Membership membership_;
  std::uint64_t n_calls_ = 0;
};

}  // namespace lockstep::backend
