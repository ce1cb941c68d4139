#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engines/message/transport.hpp"
#include "group/failure.hpp"

namespace lockstep::message {

/// The control messages of one channel: keeps what they said, and answers status queries.
///
/// Threads: any. The wait state is that of the thread of the current call.
class Control {
 public:
  explicit Control(std::unique_ptr<Transport> channel) : transport_(std::move(channel)) {}

  Transport& transport() const noexcept { return *transport_; }
  /// Receives what has arrived.
  void poll();

  /// Why the channel is dead: the first failure that was received or set.
  std::optional<internal::Failure> failure() const;
  void set_failure(const internal::Failure& failure);

  // Of the world's channel:
  /// If another rank has left the world, the failure of a call that waits for it.
  std::optional<internal::Failure> departure_of(int rank) const;
  /// Whether this rank has left the world.
  bool has_left() const;
  void set_left();
  /// A number for another channel: unique over all ranks and calls.
  std::int64_t next_number();

  // What this rank does, for ranks that ask:
  WaitState wait_state() const;
  /// In a channel with levels.
  void begin_collective(const Header& header);
  void set_awaited(std::span<const int> ranks);
  /// Forgets earlier answers, and asks: see ControlMessage::Kind::status_query.
  void ask(std::uint64_t number, int to = Transport::kAllRanks);
  std::map<int, WaitState> answers() const;

  /// A call that this or another rank has refused. Of `of` these are used: rank; number, of
  /// collectives before it; in header: n_refused.
  void add_refusal(const WaitState& of, const std::string& text);
  /// visit(of, text) for each, in order by rank.
  template <class Visit>
  void visit_refusals(const Visit& visit) const {
    const std::lock_guard lock(mutex_);
    for (const auto& [of, text] : refusals_) visit(of, text);
  }

 private:
  struct Refused {
    WaitState of;
    std::string text;
  };

  void answer_queries();  // with the lock

  const std::unique_ptr<Transport> transport_;
  mutable std::mutex mutex_;  // guards the following
  bool has_left_ = false;
  std::optional<internal::Failure> failure_;
  std::map<int, internal::Failure> departures_;
  WaitState wait_state_{.rank = transport_->rank()};
  std::vector<WaitState> queries_;
  std::map<int, WaitState> answers_;
  std::int64_t n_numbers_ = 0;
  std::vector<Refused> refusals_;
};

}  // namespace lockstep::message
