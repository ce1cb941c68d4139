#include "group/group_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <lockstep/error.hpp>
#include <new>
#include <utility>
#include <vector>

namespace lockstep::internal {
namespace {

/// Replaces the engine when the program exits.
class RetiredEngine final : public Engine {
 public:
  RetiredEngine(std::string name, int rank, int size)
      : name_(std::move(name)), rank_(rank), size_(size) {}
  std::string_view name() const noexcept override { return name_; }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  void run(const Call& call) override { reject(call); }
  std::unique_ptr<Engine> split(const Call& call, int, int) override { reject(call); }
  std::unique_ptr<SharedMemory> allocate(const Call& call) override { reject(call); }
  void abandon(std::string_view) noexcept override {}
  void leave(std::string_view) noexcept override {}

 private:
  [[noreturn]] void reject(const Call& call) const {
    throw UsageError(context_of(call, rank_),
                     "this rank has left the world, because the program is ending (main returned, "
                     "or exit was called); communicate before that");
  }

  std::string name_;
  int rank_;
  int size_;
};

/// What a fork of a rank must not destroy: another process's connections, and threads that it does
/// not have and would wait for.
struct Inherited {
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Worker> worker;
};

void keep_for_ever(Inherited inherited) noexcept try {
  static std::vector<Inherited>& all = *new std::vector<Inherited>;
  all.push_back(std::move(inherited));
} catch (const std::bad_alloc&) {
  std::abort();  // in a fork, which cannot otherwise leave the rank's connections intact
}

}  // namespace

GroupState::GroupState(std::unique_ptr<Engine> engine, std::string name,
                       std::chrono::milliseconds timeout, std::shared_ptr<Recorder> recorder,
                       Check check)
    : engine_(std::move(engine)),
      name_(std::move(name)),
      timeout_(timeout),
      rank_(engine_->rank()),
      size_(engine_->size()),
      check_(check),
      track_(std::move(recorder), name_, rank_, size_, engine_->reports_progress()) {}

GroupState::~GroupState() {
  if (process_.is_copy()) {
    if (size_ > 1 || worker_) keep_for_ever({std::move(engine_), std::move(worker_)});
    return;
  }
  // The worker ends when its calls have. If an exception unwinds this rank, its peers never reach
  // those calls, because they wait for this rank elsewhere: without this, both would deadlock.
  if (!is_idle() && std::uncaught_exceptions() > 0) {
    engine_->abandon("it left because of an exception with asynchronous calls under way");
  }
}

void GroupState::hold(const Call& call) {
  if (process_.is_copy() && size_ > 1) throw_copy(call);
  if (!try_hold()) throw_busy(call);
  try {
    if (!process_.is_copy()) wait_until_idle();
    if (is_dead_.load(std::memory_order_acquire)) throw_death();
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

void GroupState::throw_busy(const Call& call) const {
  if (is_held_.load(std::memory_order_relaxed)) throw_held(call);
  throw UsageError(context_of(call, rank_),
                   "another thread is inside a call on this group; one call at a time: give each "
                   "thread its own group (Group::duplicate)");
}

void GroupState::throw_copy(const Call& call) const {
  throw UsageError(context_of(call, rank_),
                   "this process is a fork of a rank, not a rank itself; communicate in the rank, "
                   "and pass the fork what it needs");
}

bool GroupState::is_idle() const noexcept {
  return !has_worker_.load(std::memory_order_acquire) || worker_->is_idle();
}

void GroupState::wait_until_idle() {
  if (has_worker_.load(std::memory_order_acquire)) worker_->wait_until_idle();
}

void GroupState::retire() noexcept {
  if (is_busy_.exchange(true, std::memory_order_acquire)) return;
  has_worker_.store(false, std::memory_order_relaxed);
  worker_.reset();  // its calls have a timeout
  track_ = Track(nullptr, name_, rank_, size_, /*engine_reports=*/false);
  engine_ = std::make_unique<RetiredEngine>(std::string(engine_->name()), rank_, size_);
  is_busy_.store(false, std::memory_order_release);
}

void GroupState::throw_held(const Call& call) const {
  throw UsageError(context_of(call, rank_),
                   "called inside main_process_first or local_main_process_first, where the other "
                   "ranks wait and cannot participate; call it before or after");
}

std::shared_ptr<WorkState> GroupState::post(const Call& checked, Deadline deadline) {
  Call call = checked;
  call.group = name_;
  call.check = check_;
  call.sequence = sequence_.load(std::memory_order_relaxed) + 1;
  call.timeout = std::min(deadline.or_else(timeout_), Deadline::never().or_else({}));
  if (process_.is_copy()) throw_copy(call);  // it has no worker, for any size
  // Otherwise the worker and a calling thread would use the engine concurrently.
  if (is_busy_.exchange(true, std::memory_order_acquire)) throw_busy(call);
  const Busy busy{is_busy_};
  sequence_.store(call.sequence, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    if (!worker_) {
      async_groups_->add(shared_from_this());
      worker_ = std::make_unique<Worker>();
      has_worker_.store(true, std::memory_order_release);
    }
  }
  return worker_->post([this, call]() mutable {
    if (is_dead_.load(std::memory_order_acquire)) throw_death();
    track_.begin(call);
    try {
      engine_->run(call);
    } catch (...) {
      fail(call);
    }
    track_.end(call);
  });
}

void GroupState::fail(const Call& call) {
  track_.fail(call);
  try {
    throw;
  } catch (const UsageError&) {
    throw;
  } catch (...) {
    die();
    throw;
  }
}

void GroupState::die() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (death_) return;
    death_ = std::current_exception();
    is_dead_.store(true, std::memory_order_release);
  }
  if (!recorder()) return;
  try {
    throw;
  } catch (const std::exception& error) {
    recorder()->died(error.what());
  } catch (...) {
    recorder()->died("an exception that is not a std::exception");
  }
}

void GroupState::throw_death() {
  const std::lock_guard lock(mutex_);
  std::rethrow_exception(death_);
}

std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout, ErrorContext context) {
  if (timeout <= std::chrono::milliseconds::zero()) {
    throw UsageError(std::move(context),
                     fmt::format("the timeout is {} ms; give the limit of one operation, as "
                                 "std::chrono::seconds(30), or std::chrono::milliseconds::max() "
                                 "for none",
                                 timeout.count()));
  }
  return std::min(timeout, Deadline::never().or_else({}));
}

}  // namespace lockstep::internal
