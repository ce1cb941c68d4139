#pragma once

#include <chrono>
#include <concepts>
#include <condition_variable>
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
#include <lockstep/types.hpp>
#include <lockstep/world.hpp>

namespace lockstep {

/// Types that FutureResult, SyncMaster and SlavePipe can transfer: any move-constructible object.
template <class T>
concept Transferable = std::is_object_v<T> && std::move_constructible<T>;

namespace detail {

using ErasedValue = std::shared_ptr<void>;  ///< type-erased message or reply

struct NumberedValue {
  int id = 0;
  ErasedValue value;
};

template <class T>
T unpack(ErasedValue value) {
  return std::move(*static_cast<T*>(value.get()));
}

/// The type-erased half of FutureResult. The value is accessed under the locks that it returns.
class FutureGate {
 public:
  std::unique_lock<std::mutex> begin_put(std::source_location where);
  void end_put(std::unique_lock<std::mutex> lock);
  std::unique_lock<std::mutex> get(Timeout timeout, std::source_location where);
  bool is_full() const noexcept;

 private:
  mutable std::mutex mutex_;
  std::condition_variable filled_;
  bool is_full_ = false;  // guarded by mutex_
};

class Rendezvous;
struct Participant;

/// The type-erased half of SlavePipe.
class SlaveEnd {
 public:
  SlaveEnd() = default;
  SlaveEnd(std::shared_ptr<Rendezvous> rendezvous,
           std::shared_ptr<Participant> participant) noexcept;
  SlaveEnd(SlaveEnd&&) noexcept = default;
  SlaveEnd& operator=(SlaveEnd&& other) noexcept;
  ~SlaveEnd();

  int id() const noexcept;
  ErasedValue run(ErasedValue message, Timeout timeout, std::source_location where);
  void fail(const std::exception_ptr& error, std::source_location where);

 private:
  std::shared_ptr<Rendezvous> rendezvous_;
  std::shared_ptr<Participant> participant_;
};

/// The type-erased half of SyncMaster.
class MasterEnd {
 public:
  using Callback = std::function<std::vector<NumberedValue>(std::vector<NumberedValue>)>;

  MasterEnd(Callback callback, std::chrono::milliseconds timeout, std::source_location where);
  MasterEnd(const MasterEnd&) = delete;
  MasterEnd& operator=(const MasterEnd&) = delete;
  ~MasterEnd();

  SlaveEnd register_slave(const char* operation, int id, std::source_location where);
  void clear_slaves(std::source_location where);
  ErasedValue run(ErasedValue message, Timeout timeout, std::source_location where);
  void fail(const std::exception_ptr& error, std::source_location where);
  int nr_slaves() const;

 private:
  std::shared_ptr<Rendezvous> current() const;
  void start_new_registration(const char* operation,
                              std::source_location where);  // requires mutex_ held

  Callback callback_;
  std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;
  std::shared_ptr<Rendezvous> rendezvous_;  // guarded by mutex_
};

}  // namespace detail

/// Passes a value from one thread to another: one put, then one get; then it can be reused.
/// It must outlive both calls. Threads: any; if several gets wait, one of them gets the value.
template <Transferable T>
class FutureResult {
 public:
  using Where = std::source_location;

  FutureResult() = default;
  FutureResult(const FutureResult&) = delete;
  FutureResult& operator=(const FutureResult&) = delete;

  /// Does not wait for a get. Throws UsageError if the previous value has not been fetched yet.
  void put(T value, Where where = Where::current()) {
    auto lock = gate_.begin_put(where);
    value_.emplace(std::move(value));
    gate_.end_put(std::move(lock));
  }

  /// Called instead of put: get throws `error`.
  void fail(std::exception_ptr error, Where where = Where::current()) {
    auto lock = gate_.begin_put(where);
    error_ = std::move(error);
    gate_.end_put(std::move(lock));
  }

  /// Whether a get would return at once, unless another thread gets first.
  bool ready() const noexcept { return gate_.is_full(); }

  /// Waits for a put and takes its value; without a timeout, waits at most 5 minutes.
  /// Throws TimeoutError, and the exception given to fail.
  T get(Timeout timeout = {}, Where where = Where::current()) {
    const auto lock = gate_.get(timeout, where);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    return *std::exchange(value_, std::nullopt);
  }

 private:
  detail::FutureGate gate_;
  std::optional<T> value_;
  std::exception_ptr error_;
};

/// A slave's end of a SyncMaster. Movable; the slave stays registered during its lifetime.
///
/// Its destruction means that the slave has left: the current round, or else the next one, fails
/// with PeerLost at every other participant (PeerFailed if it is destroyed during exception
/// unwinding), and later rounds run without the slave.
/// Threads: one call at a time per pipe.
template <Transferable Message, Transferable Reply>
class SlavePipe {
 public:
  using Where = std::source_location;

  SlavePipe() = default;  ///< no slave: run_slave throws UsageError
  explicit SlavePipe(detail::SlaveEnd end) noexcept : end_(std::move(end)) {}

  int id() const noexcept { return end_.id(); }  ///< -1 without a slave

  /// Contributes the message to the slave's next round and waits for the reply.
  /// Throws the round's error, see SyncMaster; at once if the round has already failed.
  Reply run_slave(Message message, Timeout timeout = {}, Where where = Where::current()) {
    return detail::unpack<Reply>(
        end_.run(std::make_shared<Message>(std::move(message)), timeout, where));
  }

  /// Called instead of run_slave: the round fails with PeerFailed, which carries the error's text,
  /// at every other participant. Does nothing if that round has already ended.
  void fail(const std::exception_ptr& error, Where where = Where::current()) {
    end_.fail(error, where);
  }

 private:
  detail::SlaveEnd end_;
};

/// One participant's message, as passed to the master's callback, which may move from it.
template <class Message>
struct MessageFrom {
  int id;
  Message message;
};

/// The master callback's reply to one participant.
template <class Reply>
struct ReplyTo {
  int id;
  Reply reply;
};

/// Of SyncMaster.
struct SyncMasterOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  ///< of a call without a timeout
};

/// Threads of one process that exchange messages in rounds: one master (id 0) and its slaves.
///
/// A round is one run_master and one run_slave on each registered pipe. When all have been called,
/// the callback runs on the master's thread. It gets the messages of the master and then of the
/// slaves by increasing id, and returns one reply per id, in any order. The n-th call of each
/// participant belongs to the n-th round since registration, so pipes serve any number of rounds.
///
/// A round that fails, fails for all: waiting participants get the error at once, the others from
/// their call for that round, without waiting. Later rounds are not affected.
/// - TimeoutError: a call's time ran out; names the missing ids
/// - PeerLost: a pipe or the SyncMaster was destroyed, or the slaves were registered again
/// - PeerFailed: a participant failed, or the callback threw (run_master rethrows the original)
/// - UsageError: the callback's replies lack an id, or have a duplicate or unknown one
///
/// Any other UsageError concerns only the caller and not the round. After a failure the
/// participants continue with their next rounds; if they may be out of step (one of them made no
/// call, instead of a late one), register again.
///
/// Registration: ids are any distinct integers above 0, in any order. Register all slaves before
/// the first of them runs. After run_master has been called or a round has ended, the next
/// register_slave or register_worker drops the previous slaves and starts a new registration; so
/// does the first one after all pipes are destroyed. clear_slaves starts a registration without
/// slaves: call it before every batch for which the number of slaves may have changed, even to
/// none.
///
/// Threads: run_master and fail from one thread at a time; the others from any.
template <Transferable Message, Transferable Reply>
class SyncMaster {
 public:
  using Where = std::source_location;
  using MasterCallback =
      std::function<std::vector<ReplyTo<Reply>>(std::span<MessageFrom<Message>>)>;

  /// Throws UsageError if the callback is empty.
  explicit SyncMaster(MasterCallback callback, const SyncMasterOptions& options = {},
                      Where where = Where::current())
      : end_(callback ? erase(std::move(callback)) : nullptr, options.timeout, where) {}

  /// Throws UsageError if id is below 1 or already has a pipe, or while run_master is running.
  SlavePipe<Message, Reply> register_slave(int id, Where where = Where::current()) {
    return SlavePipe<Message, Reply>(end_.register_slave("register_slave", id, where));
  }
  /// The same.
  SlavePipe<Message, Reply> register_worker(int id, Where where = Where::current()) {
    return SlavePipe<Message, Reply>(end_.register_slave("register_worker", id, where));
  }

  /// Drops all slaves: rounds consist of the master only until the next registration.
  /// Throws UsageError while run_master is running.
  void clear_slaves(Where where = Where::current()) { end_.clear_slaves(where); }

  /// Contributes the master's message to its next round, waits for the slaves, runs the callback
  /// and returns the master's reply. The callback itself has no time limit.
  Reply run_master(Message message, Timeout timeout = {}, Where where = Where::current()) {
    return detail::unpack<Reply>(
        end_.run(std::make_shared<Message>(std::move(message)), timeout, where));
  }

  /// Called instead of run_master: the round fails with PeerFailed, which carries the error's text,
  /// at every slave. Does nothing if that round has already ended.
  void fail(const std::exception_ptr& error, Where where = Where::current()) {
    end_.fail(error, where);
  }

  /// The number of slaves with a live pipe.
  int nr_slaves() const { return end_.nr_slaves(); }

 private:
  static detail::MasterEnd::Callback erase(MasterCallback callback) {
    return [callback = std::move(callback)](std::vector<detail::NumberedValue> values) {
      std::vector<MessageFrom<Message>> messages;
      messages.reserve(values.size());
      for (auto& [id, value] : values) {
        messages.push_back({id, detail::unpack<Message>(std::move(value))});
      }
      std::vector<detail::NumberedValue> replies;
      for (auto& [id, reply] : callback(messages)) {
        replies.push_back({id, std::make_shared<Reply>(std::move(reply))});
      }
      return replies;
    };
  }

  detail::MasterEnd end_;
};

}  // namespace lockstep
