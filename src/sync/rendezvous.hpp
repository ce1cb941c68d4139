#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include <lockstep/sync_master.hpp>
#include <lockstep/types.hpp>

#include "group/failure.hpp"
#include "sync/wait.hpp"

namespace lockstep::detail {

inline constexpr int kMasterId = 0;

using internal::Failure;

/// The state of one participant. Guarded by the Rendezvous's lock, except while the participant
/// owns it according to the protocol in rendezvous.cpp.
struct Participant {
  explicit Participant(int participant_id) : id(participant_id) {}

  const int id;
  std::atomic<bool> in_call = false;
  std::uint64_t next_round = 1;  // the round of its next call
  ErasedValue message;
  ErasedValue reply;
  std::shared_ptr<const Failure> failure;
};

/// The rounds of one registration: a master and the slaves registered with it.
class Rendezvous {
 public:
  explicit Rendezvous(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  /// Throws UsageError for an id that is below 1 or taken, and during run_master.
  std::shared_ptr<Participant> add(const char* operation, int id, std::source_location where);
  ErasedValue run_slave(Participant& participant, ErasedValue message, Timeout timeout,
                        std::source_location where);
  ErasedValue run_master(ErasedValue message, const MasterEnd::Callback& callback, Timeout timeout,
                         std::source_location where);
  /// Ends the participant's next round, if still open, in place of a call.
  void fail(Participant& participant, const std::exception_ptr& error, std::source_location where);
  Participant& master() noexcept { return master_; }
  void leave(Participant& participant, bool by_exception) noexcept;
  /// Ends the open round and all future calls with this failure. Returns false, without effect,
  /// during run_master.
  bool close(Failure failure);

  int n_slaves() const;
  /// A round has begun or every registered slave has left: the next registration starts a new one.
  bool is_used() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  class InCall;
  struct Ticket;

  Ticket arrive(Participant& participant, ErasedValue message, std::source_location where);
  void time_out(const Participant& participant, std::uint64_t round,
                std::chrono::milliseconds limit);
  // All messages, the master's first; empty if the round has ended.
  std::vector<NumberedValue> collect(std::uint64_t round);
  void answer(std::uint64_t round, std::vector<NumberedValue> replies);
  void fail_if_open(std::uint64_t round, Failure failure);

  // These take ownership of the lock and release it before they wake other threads.
  void fail_round(Lock lock, Failure failure);
  void fail_for_departure(Lock lock);
  void end_round(Lock lock);

  // Requires the lock.
  bool has_arrived(const Participant& participant) const { return participant.next_round > round_; }
  bool is_complete() const { return n_arrived_ == slaves_.size() + 1; }
  std::string missing() const;
  Failure failure_of(std::uint64_t round) const;

  struct FailedRound {
    std::uint64_t round;
    std::shared_ptr<const Failure> failure;
  };

  const std::chrono::milliseconds timeout_;

  mutable std::mutex mutex_;                          // guards all down to master_
  std::uint64_t round_ = 1;                           // the open one
  std::size_t n_arrived_ = 0;                         // in the open round
  std::vector<std::shared_ptr<Participant>> slaves_;  // by ascending id
  std::optional<Failure> departure_;                  // of slaves that left before any round began
  std::optional<Failure> closed_;
  std::deque<FailedRound> failed_rounds_;  // the latest, for late callers
  Participant master_{kMasterId};

  SpinTime spin_time_;
  // On separate cache lines: waiting threads read them while others take the lock.
  alignas(64) std::atomic<std::uint32_t> round_word_{1};   // low bits of round_
  alignas(64) std::atomic<std::uint32_t> master_word_{0};  // changes when the master must check
};

}  // namespace lockstep::detail
