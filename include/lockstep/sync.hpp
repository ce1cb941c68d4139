#pragma once

#include <atomic>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/types.hpp>

namespace lockstep {

/// What FutureResult, SyncMaster and SlavePipe carry: any object that can be moved.
template <class T>
concept Transferable = std::is_object_v<T> && std::move_constructible<T>;

namespace detail {

using Parcel = std::shared_ptr<void>;  ///< a message or reply, its type known to the templates

struct NumberedParcel {
  int id = 0;
  Parcel value;
};

template <class T>
T unpack(Parcel parcel) {
  return std::move(*static_cast<T*>(parcel.get()));
}

/// The untyped half of FutureResult: whose turn it is to touch the value.
class FutureGate {
 public:
  void begin_put(std::source_location where);
  void end_put() noexcept;
  void cancel_put() noexcept;
  void begin_get(Deadline deadline, std::source_location where);
  void end_get() noexcept;
  bool is_full() const noexcept;

 private:
  std::atomic<std::uint32_t> state_{0};
};

class Rendezvous;
struct Seat;

/// The untyped half of SlavePipe.
class SlaveEnd {
 public:
  SlaveEnd() = default;
  SlaveEnd(std::shared_ptr<Rendezvous> rendezvous, std::shared_ptr<Seat> seat) noexcept;
  SlaveEnd(SlaveEnd&&) noexcept = default;
  SlaveEnd& operator=(SlaveEnd&& other) noexcept;
  ~SlaveEnd();

  int id() const noexcept;
  Parcel run(Parcel message, Deadline deadline, std::source_location where);
  void fail(const std::exception_ptr& error, std::source_location where);

 private:
  std::shared_ptr<Rendezvous> rendezvous_;
  std::shared_ptr<Seat> seat_;
};

/// The untyped half of SyncMaster.
class MasterEnd {
 public:
  using Callback = std::function<std::vector<NumberedParcel>(std::vector<NumberedParcel>)>;

  MasterEnd(Callback callback, std::chrono::milliseconds timeout, std::source_location where);
  MasterEnd(const MasterEnd&) = delete;
  MasterEnd& operator=(const MasterEnd&) = delete;
  ~MasterEnd();

  SlaveEnd register_slave(int id, std::source_location where);
  void clear_slaves(std::source_location where);
  Parcel run(Parcel message, Deadline deadline, std::source_location where);
  void fail(const std::exception_ptr& error, std::source_location where);
  int nr_slaves() const;

 private:
  std::shared_ptr<Rendezvous> current() const;
  void start_anew(const char* operation, std::source_location where);  // mutex_ is held

  Callback callback_;
  std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;
  std::shared_ptr<Rendezvous> rendezvous_;  // guarded by mutex_
};

}  // namespace detail

/// A value on its way from one thread to another: one put, then one get, and it can be used again.
/// It must outlive both calls. Threads: any; of several waiting gets one has the value.
template <Transferable T>
class FutureResult {
 public:
  using Where = std::source_location;

  FutureResult() = default;
  FutureResult(const FutureResult&) = delete;
  FutureResult& operator=(const FutureResult&) = delete;

  /// Never waits. Throws UsageError where the value put before is not fetched yet.
  void put(T value, Where where = Where::current()) {
    gate_.begin_put(where);
    try {
      value_.emplace(std::move(value));
    } catch (...) {
      gate_.cancel_put();
      throw;
    }
    gate_.end_put();
  }

  /// Instead of put: the get throws `error`.
  void fail(std::exception_ptr error, Where where = Where::current()) {
    gate_.begin_put(where);
    error_ = std::move(error);
    gate_.end_put();
  }

  /// Whether a get would return at once, as long as no other thread gets meanwhile. Never waits.
  bool ready() const noexcept { return gate_.is_full(); }

  /// Waits for a put and takes its value; without a deadline at most 5 minutes.
  /// Throws TimeoutError, and what was given to fail.
  T get(Deadline deadline = {}, Where where = Where::current()) {
    gate_.begin_get(deadline, where);
    struct Emptied {
      FutureResult& result;
      ~Emptied() {
        result.value_.reset();
        result.error_ = nullptr;
        result.gate_.end_get();
      }
    } const emptied{*this};
    if (error_) std::rethrow_exception(error_);
    return std::move(*value_);
  }

 private:
  detail::FutureGate gate_;
  std::optional<T> value_;
  std::exception_ptr error_;
};

/// A slave's end of a SyncMaster: movable, and its registration lasts as long as it lives.
///
/// Dropping it says that the slave left: the round under way, or else the next one, fails with
/// PeerLost at every other participant (with PeerFailed where an exception unwinds the thread
/// that drops it), and rounds after that one go on without the slave.
/// Threads: one call at a time per pipe.
template <Transferable Message, Transferable Reply>
class SlavePipe {
 public:
  using Where = std::source_location;

  SlavePipe() = default;  ///< no slave: run_slave throws UsageError
  explicit SlavePipe(detail::SlaveEnd end) noexcept : end_(std::move(end)) {}

  int id() const noexcept { return end_.id(); }  ///< -1 without a slave

  /// Gives the message to the slave's next round and waits for its reply.
  /// Throws what ended the round, see SyncMaster; at once where the round ended without this call.
  Reply run_slave(Message message, Deadline deadline = {}, Where where = Where::current()) {
    return detail::unpack<Reply>(
        end_.run(std::make_shared<Message>(std::move(message)), deadline, where));
  }

  /// Instead of run_slave: the round fails with PeerFailed, which carries the error's text, at
  /// every other participant. Does nothing where that round ended already.
  void fail(const std::exception_ptr& error, Where where = Where::current()) {
    end_.fail(error, where);
  }

 private:
  detail::SlaveEnd end_;
};

/// One participant's message, as the master's callback gets it. The callback may move from it.
template <class Message>
struct MessageFrom {
  int id;
  Message message;
};

/// The reply that the master's callback has for one participant.
template <class Reply>
struct ReplyTo {
  int id;
  Reply reply;
};

struct SyncMasterOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  ///< of a call that gives none
};

/// Threads of one process that exchange messages in rounds: one master (id 0) and its slaves.
///
/// A round is one run_master and one run_slave on each registered pipe. When all have come, the
/// callback runs on the master's thread, over the messages of the master and then of the slaves by
/// rising id; it returns one reply per id, in any order. The n-th call of each participant belongs
/// to the n-th round since registration, so pipes serve any number of rounds.
///
/// A round that fails fails for all. Those who wait get the error at once, those still to come get
/// it from their call of that round, promptly; later rounds are not touched by it.
///   TimeoutError  a deadline passed: names the missing ids
///   PeerLost      a pipe or the SyncMaster was dropped, or the slaves were registered anew
///   PeerFailed    a participant failed, or the callback threw (run_master rethrows the original)
///   UsageError    the callback's replies miss an id, or have one twice, or one that is unknown
/// Other UsageErrors are the caller's alone and no part of a round. After a failure the
/// participants go on with their next rounds; where they may have got out of step (one of them did
/// not call, rather than late), register anew.
///
/// Registration: ids are any distinct integers above 0, in any order. Register all slaves before
/// the first of them runs. Once run_master was called or a round has ended, the next
/// register_slave forgets the slaves of before and begins a new registration; so does the first
/// one after all pipes are gone. clear_slaves begins one that has no slaves yet: call it before
/// every batch whose number of slaves may have changed, even to none.
///
/// Threads: run_master and fail from one thread at a time; the others from any.
template <Transferable Message, Transferable Reply>
class SyncMaster {
 public:
  using Where = std::source_location;
  using MasterCallback =
      std::function<std::vector<ReplyTo<Reply>>(std::span<MessageFrom<Message>>)>;

  /// Throws UsageError where the callback is empty.
  explicit SyncMaster(MasterCallback callback, const SyncMasterOptions& options = {},
                      Where where = Where::current())
      : end_(callback ? erase(std::move(callback)) : nullptr, options.timeout, where) {}

  /// Throws UsageError where id is below 1 or has a pipe already, or a run_master is under way.
  SlavePipe<Message, Reply> register_slave(int id, Where where = Where::current()) {
    return SlavePipe<Message, Reply>(end_.register_slave(id, where));
  }

  /// Forgets all slaves: rounds are the master's alone until the next registration.
  /// Throws UsageError where a run_master is under way.
  void clear_slaves(Where where = Where::current()) { end_.clear_slaves(where); }

  /// Gives the master's message to its next round, waits for the others, runs the callback and
  /// returns the master's reply. The callback's own time is not limited.
  Reply run_master(Message message, Deadline deadline = {}, Where where = Where::current()) {
    return detail::unpack<Reply>(
        end_.run(std::make_shared<Message>(std::move(message)), deadline, where));
  }

  /// Instead of run_master: the round fails with PeerFailed, which carries the error's text, at
  /// every slave. Does nothing where that round ended already.
  void fail(const std::exception_ptr& error, Where where = Where::current()) {
    end_.fail(error, where);
  }

  /// Slaves whose pipe lives.
  int nr_slaves() const { return end_.nr_slaves(); }

 private:
  static detail::MasterEnd::Callback erase(MasterCallback callback) {
    return [callback = std::move(callback)](std::vector<detail::NumberedParcel> parcels) {
      std::vector<MessageFrom<Message>> messages;
      messages.reserve(parcels.size());
      for (auto& [id, value] : parcels) {
        messages.push_back({id, detail::unpack<Message>(std::move(value))});
      }
      std::vector<detail::NumberedParcel> replies;
      for (auto& [id, reply] : callback(messages)) {
        replies.push_back({id, std::make_shared<Reply>(std::move(reply))});
      }
      return replies;
    };
  }

  detail::MasterEnd end_;
};

}  // namespace lockstep
