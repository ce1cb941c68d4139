#include "sync/rendezvous.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <lockstep/error.hpp>

#include "base/exception.hpp"
#include "base/futex.hpp"

// Protocol.
//
// Rounds are numbered from 1; round_ is the open one. It ends with replies for all or with one
// Failure for all. Every participant counts its own calls (Participant::next_round), which
// classifies a call:
//   next_round <  round_   late: its round failed without it. It gets that failure; no other
//                          participant is affected.
//   next_round == round_   expected. It leaves its message (arrives), next_round becomes round_+1.
//   next_round >  round_   has arrived and is waiting.
// A round is answered only when all have arrived, so a late call can only have missed failures.
//
// The open round:
//
//   gathering --last arrival--> complete --answer--> (round_ + 1, gathering)
//       |                          |
//       +------ any failure -------+--fail_round--> (round_ + 1, gathering)
//
// What each side waits for: slaves wait for round_word_, which changes exactly when a round ends.
// The master waits for master_word_, which changes when its round is complete or has ended. It runs
// the callback without the lock and then checks that the round is still open (a slave whose
// limit passed may have failed it). Both words are read on arrival, under the lock, and change
// only under it: no wake-up is lost, and each call waits for a single change.
//
// One set of participants suffices for all rounds: a participant's outcome (reply, failure) is
// written before round_word_ changes and only if the participant has arrived, and it arrives again
// only after taking the outcome. So once the word has changed, the participant owns the outcome and
// takes it without the lock: a round costs each slave one short lock, on arrival, and wake-ups do
// not contend for it. Wake-ups are sent after the lock is released, for the same reason.

namespace lockstep::detail {
namespace {

// A participant more than this many failed rounds late gets the oldest failure kept.
constexpr std::size_t kFailuresKept = 64;

constexpr const char* kMasterIsWaiting =
    "a run_master is under way; register slaves before it starts or after it returned";

const char* operation_of(const Participant& participant) {
  return participant.id == kMasterId ? "run_master" : "run_slave";
}

ErrorContext context(const Participant& participant, const char* operation, std::uint64_t round,
                     std::source_location where) {
  return {.operation = operation,
          .group = "replicas",
          .rank = participant.id,
          .sequence = round,
          .where = where};
}

std::string name_of(int id) {
  return id == kMasterId ? std::string("the master") : fmt::format("slave {}", id);
}

// Sorts the replies by `ids` (ascending); otherwise returns what is wrong with them.
std::optional<std::string> sort_replies(std::vector<NumberedValue>& replies,
                                        const std::vector<int>& ids) {
  std::ranges::stable_sort(replies, {}, &NumberedValue::id);
  std::vector<int> got;
  for (const NumberedValue& reply : replies) got.push_back(reply.id);
  if (got == ids) return std::nullopt;
  std::vector<int> doubled;
  for (std::size_t i = 1; i < got.size(); ++i) {
    if (got[i] == got[i - 1]) doubled.push_back(got[i]);
  }
  doubled.erase(std::unique(doubled.begin(), doubled.end()), doubled.end());
  got.erase(std::unique(got.begin(), got.end()), got.end());
  std::vector<int> missing;
  std::vector<int> unknown;
  std::ranges::set_difference(ids, got, std::back_inserter(missing));
  std::ranges::set_difference(got, ids, std::back_inserter(unknown));
  std::string text = "the master's callback returned wrong ids:";
  const auto add = [&](const char* what, const std::vector<int>& wrong) {
    if (!wrong.empty()) text += fmt::format(" {} {};", what, fmt::join(wrong, ", "));
  };
  add("no reply for", missing);
  add("several replies for", doubled);
  add("unknown", unknown);
  return text + fmt::format(" return one reply for each of {}", fmt::join(ids, ", "));
}

// After the end of the round: the caller owns the outcome, so no lock is needed.
ErasedValue take_outcome(Participant& participant, std::uint64_t round,
                         std::source_location where) {
  participant.message.reset();
  const auto failure = std::exchange(participant.failure, nullptr);
  if (failure)
    internal::throw_failure(*failure,
                            context(participant, operation_of(participant), round, where));
  return std::exchange(participant.reply, nullptr);
}

}  // namespace

/// An admitted call, with the values of its words at that time.
struct Rendezvous::Ticket {
  std::uint64_t round;
  std::uint32_t master_word;
  std::size_t n_threads;
};

/// Rejects a second thread in the same end.
class Rendezvous::InCall {
 public:
  InCall(Participant& participant, std::source_location where) : participant_(participant) {
    if (participant.in_call.exchange(true, std::memory_order_acquire)) {
      throw UsageError(
          context(participant, operation_of(participant), 0, where),
          fmt::format("another thread is in {} of the same {}, which takes one call at a time",
                      operation_of(participant),
                      participant.id == kMasterId ? "SyncMaster" : "SlavePipe"));
    }
  }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;
  ~InCall() { participant_.in_call.store(false, std::memory_order_release); }

 private:
  Participant& participant_;
};

std::shared_ptr<Participant> Rendezvous::add(const char* operation, int id,
                                             std::source_location where) {
  auto participant = std::make_shared<Participant>(id);
  const auto reject = [&](const std::string& text) {
    throw UsageError(context(*participant, operation, /*round=*/0, where), text);
  };
  if (id == kMasterId) reject("got id 0, which is the master's; slaves have ids above 0");
  if (id < 0) reject(fmt::format("got id {}; slaves have ids above 0", id));
  const Lock lock(mutex_);
  if (has_arrived(master_)) reject(kMasterIsWaiting);
  const auto place =
      std::ranges::find_if(slaves_, [&](const auto& other) { return other->id >= id; });
  if (place != slaves_.end() && (*place)->id == id) {
    reject(
        fmt::format("id {} is registered already; give each slave a unique id, or call "
                    "clear_slaves first and register all again",
                    id));
  }
  slaves_.insert(place, participant);
  return participant;
}

ErasedValue Rendezvous::run_slave(Participant& participant, ErasedValue message, Timeout timeout,
                                  std::source_location where) {
  const InCall in_call(participant, where);
  const auto limit = timeout.or_else(timeout_);
  detail::TimeLimit time_limit(limit);
  const Ticket ticket = arrive(participant, std::move(message), where);
  if (!wait_for_change(round_word_, static_cast<std::uint32_t>(ticket.round), time_limit,
                       spin_time_, ticket.n_threads)) {
    time_out(participant, ticket.round, limit);
  }
  return take_outcome(participant, ticket.round, where);
}

ErasedValue Rendezvous::run_master(ErasedValue message, const MasterEnd::Callback& callback,
                                   Timeout timeout, std::source_location where) {
  const InCall in_call(master_, where);
  const auto limit = timeout.or_else(timeout_);
  detail::TimeLimit time_limit(limit);
  const Ticket ticket = arrive(master_, std::move(message), where);
  if (!wait_for_change(master_word_, ticket.master_word, time_limit, spin_time_,
                       ticket.n_threads)) {
    time_out(master_, ticket.round, limit);
  }
  try {
    std::vector<NumberedValue> messages = collect(ticket.round);
    if (!messages.empty()) {
      std::vector<int> ids;
      for (const NumberedValue& value : messages) ids.push_back(value.id);
      std::vector<NumberedValue> replies = callback(std::move(messages));
      if (auto wrong = sort_replies(replies, ids)) {
        fail_if_open(ticket.round, {.kind = Failure::Kind::usage, .text = *std::move(wrong)});
      } else {
        answer(ticket.round, std::move(replies));
      }
    }
  } catch (...) {
    fail_if_open(ticket.round, {.kind = Failure::Kind::peer_failed,
                                .text = "the master's callback threw: " +
                                        base::text_of(std::current_exception())});
    throw;
  }
  return take_outcome(master_, ticket.round, where);
}

void Rendezvous::fail(Participant& participant, const std::exception_ptr& error,
                      std::source_location where) {
  const InCall in_call(participant, where);
  Failure failure{
      .kind = Failure::Kind::peer_failed,
      .text = fmt::format("{} failed: {}", name_of(participant.id), base::text_of(error))};
  Lock lock(mutex_);
  const bool is_open = participant.next_round++ == round_;
  if (is_open) fail_round(std::move(lock), std::move(failure));
}

void Rendezvous::leave(Participant& participant, bool by_exception) noexcept {
  Lock lock(mutex_);
  std::erase_if(slaves_, [&](const auto& other) { return other.get() == &participant; });
  if (!departure_) departure_ = {.kind = Failure::Kind::peer_lost};
  if (by_exception) departure_->kind = Failure::Kind::peer_failed;
  departure_->text += fmt::format(
      "slave {} left: its SlavePipe was destroyed {}; ", participant.id,
      by_exception ? "while an exception unwound its thread" : "instead of making a call");
  if (n_arrived_ > 0) fail_for_departure(std::move(lock));
}

bool Rendezvous::close(Failure failure) {
  Lock lock(mutex_);
  if (has_arrived(master_)) return false;
  closed_ = failure;
  if (n_arrived_ > 0) fail_round(std::move(lock), std::move(failure));
  return true;
}

int Rendezvous::n_slaves() const {
  const Lock lock(mutex_);
  return static_cast<int>(slaves_.size());
}

bool Rendezvous::is_used() const {
  const Lock lock(mutex_);
  return round_ > 1 || has_arrived(master_) || (departure_ && slaves_.empty());
}

Rendezvous::Ticket Rendezvous::arrive(Participant& participant, ErasedValue message,
                                      std::source_location where) {
  Lock lock(mutex_);
  if (participant.next_round < round_) {
    const std::uint64_t missed = participant.next_round++;
    const Failure failure = failure_of(missed);
    lock.unlock();
    internal::throw_failure(failure,
                            context(participant, operation_of(participant), missed, where));
  }
  if (closed_) {
    const Failure failure = *closed_;
    lock.unlock();
    internal::throw_failure(
        failure, context(participant, operation_of(participant), participant.next_round, where));
  }
  const Ticket ticket{.round = round_,
                      .master_word = master_word_.load(std::memory_order_relaxed),
                      .n_threads = slaves_.size() + 1};
  participant.message = std::move(message);
  participant.failure.reset();  // if fail() left one
  participant.next_round = round_ + 1;
  ++n_arrived_;
  if (departure_) {
    fail_for_departure(std::move(lock));
  } else if (is_complete()) {
    // Relaxed: the master takes the lock before it reads a message.
    master_word_.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    if (participant.id != kMasterId) base::futex_wake_all(master_word_, base::FutexScope::thread);
  }
  return ticket;
}

void Rendezvous::time_out(const Participant& participant, std::uint64_t round,
                          std::chrono::milliseconds limit) {
  Lock lock(mutex_);
  if (round_ != round) return;
  if (is_complete()) {
    if (participant.id == kMasterId) return;
    fail_round(std::move(lock),
               {.kind = Failure::Kind::timeout,
                .text = fmt::format(
                    "all participants have arrived, but the master's callback did not return "
                    "within {} ms of {}'s call; make it faster or give a longer timeout",
                    limit.count(), name_of(participant.id))});
    return;
  }
  std::string text = fmt::format(
      "missing within {} ms of {}'s call: {}; every participant must make the same number of "
      "calls: register the slaves again if there are fewer, or give a longer timeout",
      limit.count(), name_of(participant.id), missing());
  fail_round(std::move(lock), {.kind = Failure::Kind::timeout, .text = std::move(text)});
}

std::vector<NumberedValue> Rendezvous::collect(std::uint64_t round) {
  std::vector<NumberedValue> messages;
  const Lock lock(mutex_);
  if (round_ != round) return messages;
  messages.reserve(slaves_.size() + 1);
  messages.push_back({kMasterId, std::move(master_.message)});
  for (const auto& slave : slaves_) messages.push_back({slave->id, std::move(slave->message)});
  return messages;
}

void Rendezvous::answer(std::uint64_t round, std::vector<NumberedValue> replies) {
  Lock lock(mutex_);
  if (round_ != round) return;
  // Still the participants of collect(): no slave registers now, and one that has arrived cannot
  // leave.
  master_.reply = std::move(replies[0].value);
  for (std::size_t i = 0; i < slaves_.size(); ++i)
    slaves_[i]->reply = std::move(replies[i + 1].value);
  end_round(std::move(lock));
}

void Rendezvous::fail_if_open(std::uint64_t round, Failure failure) {
  Lock lock(mutex_);
  if (round_ == round) fail_round(std::move(lock), std::move(failure));
}

void Rendezvous::fail_for_departure(Lock lock) {
  Failure failure = *std::exchange(departure_, std::nullopt);
  failure.text += "later rounds continue without it";
  fail_round(std::move(lock), std::move(failure));
}

void Rendezvous::fail_round(Lock lock, Failure failure) {
  const auto shared = std::make_shared<const Failure>(std::move(failure));
  failed_rounds_.push_back({round_, shared});
  if (failed_rounds_.size() > kFailuresKept) failed_rounds_.pop_front();
  if (has_arrived(master_)) master_.failure = shared;
  for (const auto& slave : slaves_) {
    if (has_arrived(*slave)) slave->failure = shared;
  }
  master_word_.fetch_add(1, std::memory_order_release);
  end_round(std::move(lock));
  base::futex_wake_all(master_word_, base::FutexScope::thread);
}

void Rendezvous::end_round(Lock lock) {
  ++round_;
  n_arrived_ = 0;
  // Release: a thread that sees the change takes its outcome without the lock.
  round_word_.store(static_cast<std::uint32_t>(round_), std::memory_order_release);
  lock.unlock();
  base::futex_wake_all(round_word_, base::FutexScope::thread);
}

std::string Rendezvous::missing() const {
  std::vector<std::string> names;
  const auto look_at = [&](const Participant& participant) {
    if (has_arrived(participant)) return;
    const std::uint64_t last = participant.next_round - 1;
    names.push_back(name_of(participant.id) +
                    (last == 0 ? std::string(" (has not called yet)")
                               : fmt::format(" (its last call was #{})", last)));
  };
  look_at(master_);
  for (const auto& slave : slaves_) look_at(*slave);
  return fmt::format("{}", fmt::join(names, ", "));
}

Failure Rendezvous::failure_of(std::uint64_t round) const {
  const auto found = std::ranges::find(failed_rounds_, round, &FailedRound::round);
  Failure failure = *(found == failed_rounds_.end() ? failed_rounds_.front() : *found).failure;
  failure.text = "late, this round has ended: " + failure.text;
  return failure;
}

}  // namespace lockstep::detail
