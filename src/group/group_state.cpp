#include "group/group_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/error.hpp>
#include <new>
#include <utility>
#include <vector>

#include "group/failure.hpp"
#include "group/native_engine.hpp"
#include "group/root_cause.hpp"
#include "record/signature.hpp"

namespace lockstep::internal {
namespace {

/// What a fork of a rank must not destroy: another process's connections, and threads that it does
/// not have and would wait for.
struct Inherited {
  std::unique_ptr<Engine> engine;
  CallQueue::Owner queue;
};

void leak(Inherited inherited) noexcept try {
  static std::vector<Inherited>& all = *new std::vector<Inherited>;
  all.push_back(std::move(inherited));
} catch (const std::bad_alloc&) {
  std::abort();  // in a fork, which cannot otherwise leave the rank's connections intact
}

}  // namespace

GroupState::GroupState(std::unique_ptr<Engine>&& engine, std::string name,
                       std::chrono::milliseconds timeout, std::shared_ptr<Recorder> recorder,
                       Check check)
    : only_thread_(engine->why_one_thread().empty() ? std::thread::id()
                                                    : std::this_thread::get_id()),
      name_(std::move(name)),
      timeout_(timeout),
      backend_(engine->name()),
      rank_(engine->rank()),
      size_(engine->size()),
      check_(check),
      group_recorder_(std::move(recorder), name_, rank_, size_,
                      internal::reports_progress(*engine)),
      engine_(std::move(engine)) {}

GroupState::~GroupState() {
  if (process_.is_forked_child()) {
    if (size_ > 1 || queue_) leak({std::move(engine_), std::move(queue_)});
    return;
  }
  // The queue ends when its calls have. If an exception unwinds this rank, its peers never reach
  // those calls, because they wait for this rank elsewhere: without this, both would deadlock.
  if (!is_idle() && std::uncaught_exceptions() > 0) {
    engine_->abandon("it left because of an exception while asynchronous calls were pending");
  }
}

void GroupState::abandon(std::string_view reason) noexcept {
  if (process_.is_forked_child()) return;
  const std::lock_guard lock(mutex_);  // any thread abandons, also while the program exits
  if (engine_) engine_->abandon(reason);
}

void GroupState::hold(Call call, Timeout timeout) {
  call.timeout = call.limit = timeout.or_else(timeout_);
  if (process_.is_forked_child() && size_ > 1) throw_forked_child(call);
  if (!try_hold()) throw_busy(call);
  try {
    wait_for_posted(call);
    if (is_dead_.load(std::memory_order_acquire)) rethrow_failure(call);
  } catch (...) {
    release();
    throw;
  }
}

bool GroupState::try_hold() noexcept {
  if (is_busy_.exchange(true, std::memory_order_acquire)) return false;
  is_held_.store(true, std::memory_order_relaxed);
  return true;
}

void GroupState::release() noexcept {
  is_held_.store(false, std::memory_order_relaxed);
  is_busy_.store(false, std::memory_order_release);
}

void GroupState::throw_busy(const Call& call) {
  if (is_held()) throw_held(call);
  constexpr std::string_view kReason =
      "another thread is inside a call on this group; one call at a time: give each thread its own "
      "group (Group::duplicate)";
  refuse(call, name_of(call.op), kReason);
  throw UsageError(context_of(call, rank_), std::string(kReason));
}

void GroupState::throw_forked_child(const Call& call) const {
  throw UsageError(context_of(call, rank_),
                   "this process is a fork of a rank, not a rank itself; communicate in the rank, "
                   "and pass the fork what it needs");
}

void GroupState::throw_other_thread(const Call& call) {
  if (is_dead_.load(std::memory_order_acquire)) rethrow_failure(call);
  const std::string text = "called on another thread; " + std::string(engine_->why_one_thread());
  refuse(call, name_of(call.op), text);
  throw UsageError(context_of(call, rank_), text);
}

GroupState::Calls GroupState::calls() const noexcept {
  const std::uint64_t n_refused = n_refused_.load(std::memory_order_relaxed);
  return {.n_made = sequence_.load(std::memory_order_relaxed) - n_refused, .n_refused = n_refused};
}

void GroupState::refuse(const Call& call, std::string_view operation,
                        std::string_view reason) noexcept {
  if (size_ == 1 || process_.is_forked_child() || is_held() ||
      is_dead_.load(std::memory_order_acquire)) {
    return;
  }
  try {
    std::unique_lock lock(mutex_);
    const std::uint64_t sequence = sequence_.load(std::memory_order_relaxed) + 1;
    std::string text =
        text_of_refusal(fmt::format("{} #{}", operation, sequence), reason, call.where);
    if (is_pair(call.op)) {
      lock.unlock();
      return end_with_refusal(call, text);
    }
    refusals_.push_back(
        {{.where = call.where}, std::string(operation), std::string(reason), std::move(text)});
    refusals_.back().refusal.n_refused = n_refused_.fetch_add(1, std::memory_order_relaxed) + 1;
    sequence_.store(sequence, std::memory_order_relaxed);
    has_refusals_.store(true, std::memory_order_relaxed);
  } catch (const std::exception&) {
    return abandon(reason);  // no memory: the peers cannot be told what was refused
  }
  send_refusals();
}

/// Of a send or recv, which its two ends alone would know of.
void GroupState::end_with_refusal(const Call& call, const std::string& text) {
  ErrorContext context = context_of(call, rank_);
  context.group = name_;
  context.peers = {rank_};
  try {
    throw MismatchError(
        std::move(context),
        fmt::format("rank {} {}; a refused send or recv ends its group", rank_, text));
  } catch (const MismatchError& error) {
    mark_dead();
    const std::lock_guard lock(mutex_);
    if (engine_) engine_->end_with(error);
  }
}

void GroupState::tell(const Refused& refused) noexcept {
  Refusal refusal = refused.refusal;
  refusal.operation = refused.operation;
  refusal.reason = refused.reason;
  refusal.text = refused.text;
  group_recorder_.skip_collective();
  if (engine_) engine_->refuse(refusal);
}

void GroupState::send_refusals() noexcept {
  if (is_busy_.exchange(true, std::memory_order_acquire)) return;
  std::vector<Refused> refusals;
  {
    const std::lock_guard lock(mutex_);
    refusals.swap(refusals_);
    has_refusals_.store(false, std::memory_order_relaxed);
  }
  for (const Refused& refused : refusals) {
    // After the pending calls, which come before it on every rank.
    if (is_idle()) {
      tell(refused);
      continue;
    }
    try {
      queue_->post(
          [this, refused]() -> CallQueue::Completion {
            tell(refused);
            return {};
          },
          {.operation = "refused call", .where = refused.refusal.where});
    } catch (const std::exception&) {  // no memory, or no thread
      abandon(refused.text);
    }
  }
  is_busy_.store(false, std::memory_order_release);
}

bool GroupState::is_idle() const noexcept {
  return !has_queue_.load(std::memory_order_acquire) || queue_->is_idle();
}

void GroupState::wait_until_idle() {
  if (has_queue_.load(std::memory_order_acquire)) queue_->wait_until_idle();
}

void GroupState::wait_for_posted(Call& call) {
  if (is_idle() || process_.is_forked_child()) return;
  detail::TimeLimit limit(call.timeout);
  const std::optional<PostedCall> pending = queue_->wait_until_idle(limit.left());
  if (!pending) {
    call.timeout = limit.of_step();
    return;
  }
  fail_with_timeout(call, pending->waited_for(rank_, call.limit_s()));
}

void GroupState::fail_with_timeout(const Call& call, const std::string& text) {
  try {
    throw TimeoutError(context_of(call, rank_), text);
  } catch (const TimeoutError&) {
    mark_dead();
    abandon(text);  // after mark_dead(): the pending call, which this ends, has another error
    throw;
  }
}

bool GroupState::wait_for_one(std::chrono::nanoseconds at_most) {
  return has_queue_.load(std::memory_order_acquire) && queue_->wait_for_one(at_most);
}

void GroupState::retire() noexcept {
  if (is_busy_.exchange(true, std::memory_order_acquire)) return;
  has_queue_.store(false, std::memory_order_relaxed);
  queue_.reset();  // its calls have a timeout
  group_recorder_ = GroupRecorder(nullptr, name_, rank_, size_, /*engine_reports=*/false);
  is_dead_.store(true, std::memory_order_release);
  std::unique_ptr<Engine> engine;
  {
    const std::lock_guard lock(mutex_);
    engine_.swap(engine);
  }
  engine.reset();
  is_busy_.store(false, std::memory_order_release);
}

void GroupState::throw_held(const Call& call) const {
  throw UsageError(context_of(call, rank_),
                   "called inside main_process_first or local_main_process_first, where the other "
                   "ranks wait and cannot participate; call it before or after");
}

std::shared_ptr<WorkState> GroupState::post(const Call& checked, Timeout timeout) {
  Call call = checked;
  number(call, timeout);
  if (process_.is_forked_child()) throw_forked_child(call);  // it has no queue, for any size
  // Otherwise the queue and a calling thread would use the engine concurrently.
  if (is_busy_.exchange(true, std::memory_order_acquire)) throw_busy(call);
  const Busy busy{*this};
  {
    const std::lock_guard lock(mutex_);
    if (!queue_) {
      membership_->async_groups.add(shared_from_this());
      queue_ = CallQueue::make();
      has_queue_.store(true, std::memory_order_release);
    }
  }
  detail::TimeLimit limit(call.timeout);
  (void)limit.end();  // it begins here
  auto work = std::make_shared<WorkState>();
  CallQueue::Completion finish = [work] {  // made here: the queue's thread may have no memory
    work->finish();
    return CallQueue::Callbacks();
  };
  queue_->post(
      [this, call, limit, state = work.get(), finish = std::move(finish)]() mutable {
        try {
          run_posted(call, limit);
        } catch (...) {
          state->fail(std::current_exception());
        }
        return std::move(finish);
      },
      {.operation = name_of(call.op), .where = call.where});
  sequence_.store(call.sequence, std::memory_order_relaxed);
  return work;
}

void GroupState::run_posted(Call& call, const detail::TimeLimit& limit) {
  if (is_dead_.load(std::memory_order_acquire)) rethrow_failure(call);
  if (limit.is_over() && call.timeout.count() > 0) {
    fail_with_timeout(call, fmt::format("rank {} spent the {:g} s of this call's limit in earlier "
                                        "asynchronous calls",
                                        rank_, call.limit_s()));
  }
  call.timeout = limit.of_step();
  record_and_run(call, RunOnEngine{});
}

void GroupState::fail(const Call& call) {
  // Before mark_dead, which may write the record to a file.
  group_recorder_.fail(call, is_of_peer(std::current_exception()));
  try {
    throw;
  } catch (const UsageError&) {  // the group stays usable
  } catch (const Error&) {       // which the peers get too
    mark_dead();
  } catch (const std::exception& error) {  // which no peer knows of: no memory, for example
    engine_->abandon(error.what());
    mark_dead();
  } catch (...) {
    engine_->abandon("an exception that is not a std::exception");
    mark_dead();
  }
  throw;
}

void GroupState::mark_dead() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::current_exception();
    is_dead_.store(true, std::memory_order_release);
  }
  if (!recorder()) return;
  try {
    throw;
  } catch (const std::exception& error) {
    recorder()->write_on_failure(error.what());
  } catch (...) {
    recorder()->write_on_failure("an exception that is not a std::exception");
  }
}

void GroupState::rethrow_failure(const Call& call) {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  throw UsageError(context_of(call, rank_),
                   "this rank has left the world, because the program is ending (main returned, or "
                   "exit was called); communicate before that");
}

std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout, ErrorContext context) {
  if (timeout <= std::chrono::milliseconds::zero()) {
    throw UsageError(std::move(context),
                     fmt::format("the timeout is {} ms; give the limit of one operation, as "
                                 "std::chrono::seconds(30), or std::chrono::milliseconds::max() "
                                 "for none",
                                 timeout.count()));
  }
  return std::min(timeout, Timeout::never().or_else({}));
}

}  // namespace lockstep::internal
