#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <lockstep/engine.hpp>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork_guard.hpp"
#include "group/call_queue.hpp"
#include "group/work_state.hpp"
#include "group/world_membership.hpp"
#include "record/recorder.hpp"

namespace lockstep::internal {

/// What a call does with its engine, if it is an operation of Group.
struct RunOnEngine {
  void operator()(Engine& engine, const Call& call) const {
    if (call.ins.empty() && call.outs.empty()) return engine.run(call);
    engine.run_lists(call);
  }
};

/// The state shared by all handles of a group: its engine, and the path of every call to it.
class GroupState : public std::enable_shared_from_this<GroupState> {
 public:
  /// recorder: this rank's; null: nothing is recorded.
  /// engine: left to the caller if the constructor throws.
  GroupState(std::unique_ptr<Engine>&& engine, std::string name, std::chrono::milliseconds timeout,
             std::shared_ptr<Recorder> recorder, Check check);
  ~GroupState();
  GroupState(const GroupState&) = delete;
  GroupState& operator=(const GroupState&) = delete;

  /// Null after retire().
  const Engine* engine() const noexcept { return engine_.get(); }
  const std::string& backend() const noexcept { return backend_; }
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  const std::string& name() const noexcept { return name_; }
  std::chrono::milliseconds timeout() const noexcept { return timeout_; }
  Check check() const noexcept { return check_; }
  const std::shared_ptr<Recorder>& recorder() const noexcept { return group_recorder_.recorder(); }

  /// Runs a checked call on the calling thread. use(engine, call), if given, is called instead of
  /// Engine::run. Any exception but UsageError makes the group dead; the peers are notified of an
  /// exception that is not an Error, because their engines cannot detect it.
  template <class Use = RunOnEngine>
  void run(Call&& call, Timeout timeout, const Use& use = {});
  /// The same on the queue's thread.
  std::shared_ptr<WorkState> post(const Call& checked, Timeout timeout);

  /// Until release(), calls on this group throw UsageError: this rank runs the function that was
  /// given to main_process_first, for whose end the other ranks wait. Waits for pending calls and
  /// throws as a call would.
  void hold(Call call, Timeout timeout);
  /// The same if no call is in progress on the group; otherwise returns false without effect.
  bool try_hold() noexcept;
  void release() noexcept;
  bool is_held() const noexcept { return is_held_.load(std::memory_order_relaxed); }

  /// How many calls this rank has begun on the group.
  struct Calls {
    std::uint64_t n_made = 0;     ///< run or posted
    std::uint64_t n_refused = 0;  ///< see refuse()
    friend bool operator==(const Calls&, const Calls&) = default;
  };
  Calls calls() const noexcept;
  /// Counts a call that throws before its first message (see Engine::refuse), under the name
  /// `operation`, and notifies the peers, after the pending calls. For an operation of several
  /// messages, `call` is that of the first. A send or recv ends the group: every rank throws a
  /// MismatchError. Does not wait. Not counted: in a group of one or that is dead, in a fork of the
  /// rank, and while it is held. Threads: any.
  void refuse(const Call& call, std::string_view operation, std::string_view reason) noexcept;

  /// See Group::abandon.
  void abandon(std::string_view reason) noexcept;
  const std::shared_ptr<WorldMembership>& membership() const noexcept { return membership_; }
  /// For a group split from `parent`.
  void share_membership(const GroupState& parent) { membership_ = parent.membership_; }
  /// Whether all posted calls have ended.
  bool is_idle() const noexcept;
  void wait_until_idle();
  /// As long as `call` may take; its timeout becomes what is left of it. If a posted call has not
  /// ended by then, the group ends on all ranks, and this throws a TimeoutError that names it.
  void wait_for_posted(Call& call);
  /// Ends the group on all ranks, here by a TimeoutError.
  [[noreturn]] void fail_with_timeout(const Call& call, const std::string& text);
  /// See CallQueue::wait_for_one.
  bool wait_for_one(std::chrono::nanoseconds at_most);
  /// See Session::retire. Does nothing if a thread is inside a call.
  void retire() noexcept;

  /// Counts the groups split off; the number is part of their names.
  int count_child() noexcept { return ++n_children_; }

 private:
  /// Clears is_busy_ at the end of its scope.
  struct Busy {
    GroupState& group;
    ~Busy() {
      group.is_busy_.store(false, std::memory_order_release);
      // A refusal by another thread that comes between these two lines reaches the peers with the
      // next call.
      if (group.has_refusals_.load(std::memory_order_relaxed)) group.send_refusals();
    }
  };
  /// A Refusal with its texts.
  struct Refused {
    Refusal refusal;
    std::string operation, reason, text;
  };
  void tell(const Refused& refused) noexcept;
  /// Passes the refusals to the engine, unless another thread is inside a call: then that thread
  /// does.
  void send_refusals() noexcept;

  void end_with_refusal(const Call& call, const std::string& text);

  [[noreturn]] void throw_held(const Call& call) const;
  [[noreturn]] void throw_busy(const Call& call);
  [[noreturn]] void throw_forked_child(const Call& call) const;
  [[noreturn]] void throw_other_thread(const Call& call);
  void run_posted(Call& call, const detail::TimeLimit& limit);
  /// Gives a checked call its number, and what the group knows of it.
  void number(Call& call, Timeout timeout) const noexcept;
  /// Inlined into run(): a call would take 2 % of a small all_reduce.
  template <class Use>
  [[gnu::always_inline]] void record_and_run(Call& call, const Use& use);
  /// In a handler: rethrows what the call threw.
  [[noreturn]] void fail(const Call& call);
  void mark_dead() noexcept;
  [[noreturn]] void rethrow_failure(const Call& call);

  base::ForkGuard process_;
  std::thread::id only_thread_;  ///< that may call; none: any may
  std::string name_;
  std::chrono::milliseconds timeout_;
  std::string backend_;
  int rank_;
  int size_;
  Check check_;
  GroupRecorder group_recorder_;
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<bool> is_busy_{false};
  std::atomic<bool> is_held_{false};  // is_busy_, which every call checks, is set too
  std::atomic<bool> is_dead_{false};
  /// Guards failure_, the refusals, the creation of queue_, and engine_ in abandon and retire.
  mutable std::mutex mutex_;
  std::exception_ptr failure_;  ///< of a group that is dead, unless retire() ended it
  int n_children_ = 0;
  std::atomic<std::uint32_t> n_refused_{0};  ///< calls
  std::atomic<bool> has_refusals_{false};    ///< refusals_ is not empty
  std::vector<Refused> refusals_;            ///< that the engine does not know; guarded by mutex_
  std::shared_ptr<WorldMembership> membership_ = std::make_shared<WorldMembership>();
  std::atomic<bool> has_queue_{false};
  std::unique_ptr<Engine> engine_;  // behind everything whose construction may throw
  CallQueue::Owner queue_;          // last: its thread uses the other members
};

inline void GroupState::number(Call& call, Timeout timeout) const noexcept {
  // A plain load, and a store when the call begins: a locked addition takes as long as the rest.
  // Two threads that call or post at once, which is not allowed, may get the same number.
  call.group = name_;
  call.check = check_;
  call.sequence = sequence_.load(std::memory_order_relaxed) + 1;
  call.n_refused = n_refused_.load(std::memory_order_relaxed);
  // At most never(), a hundred years: longer timeouts overflow nanosecond clocks.
  call.timeout = call.limit = std::min(timeout.or_else(timeout_), Timeout::never().or_else({}));
}

/// Every blocking call, from top to bottom, after the checks of its arguments.
template <class Use>
void GroupState::run(Call&& call, Timeout timeout, const Use& use) {
  number(call, timeout);
  // A fork of a rank is not a rank; in a group of one it is harmless.
  if (process_.is_forked_child() && size_ > 1) throw_forked_child(call);
  if (only_thread_ != std::thread::id() && only_thread_ != std::this_thread::get_id()) {
    throw_other_thread(call);
  }
  // One locked instruction, so that only one of two concurrent callers continues.
  if (is_busy_.exchange(true, std::memory_order_acquire)) throw_busy(call);
  const Busy busy{*this};
  if (has_queue_.load(std::memory_order_acquire)) wait_for_posted(call);
  if (is_dead_.load(std::memory_order_acquire)) rethrow_failure(call);
  sequence_.store(call.sequence, std::memory_order_relaxed);
  record_and_run(call, use);
}

template <class Use>
inline void GroupState::record_and_run(Call& call, const Use& use) {
  try {
    group_recorder_.begin(call);
    use(*engine_, call);
    group_recorder_.end(call);
  } catch (...) {
    fail(call);
  }
}

/// The timeout that a caller gave for one operation, limited to the range of clocks (a hundred
/// years). Throws UsageError if it is zero or negative.
std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout, ErrorContext context);

}  // namespace lockstep::internal
