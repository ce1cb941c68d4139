#include "world/session.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <lockstep/error.hpp>
#include <mutex>
#include <utility>

#include "base/exception.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/shared/segment/membership.hpp"
#include "group/group_state.hpp"
#include "group/leave_on_exception.hpp"
#include "record/recorder.hpp"

namespace lockstep::internal {
namespace {

constexpr const char* kWorldName = "world";

/// recorder: the engine's, or null.
std::shared_ptr<Recorder> make_recorder(const World& world, std::shared_ptr<Recorder> recorder) {
  const Env& env = world.env;
  // A world of one has no peers to diagnose, so it records only for a trace.
  if (!recorder && (world.size > 1 || env.trace_dir)) {
    recorder = Recorder::in_process(world.rank, world.size, env.record_dir);
  }
  if (recorder && env.record_dir) recorder->write_to(*env.record_dir);
  if (recorder && env.trace_dir) recorder->trace_to(*env.trace_dir, env.restart);
  return recorder;
}

std::terminate_handler& former_handler() noexcept {
  static std::terminate_handler handler = nullptr;
  return handler;
}

/// Trivial types without destructors, so that they are readable until the program has ended.
constinit thread_local Session* of_thread = nullptr;
constinit thread_local bool is_rank_thread = false;
constinit std::atomic<Session*> of_process{nullptr};
constinit std::atomic<int> n_rank_threads{0};
constinit std::atomic<bool> has_joined{false};

/// Counted until the thread ends: a thread that left by destroy_dist does not join the process's
/// world.
struct RankThread {
  RankThread() noexcept {
    is_rank_thread = true;
    n_rank_threads.fetch_add(1, std::memory_order_release);
    // A fork has only the thread that called fork.
    static const int registered = ::pthread_atfork(nullptr, nullptr, [] {
      n_rank_threads.store(is_rank_thread ? 1 : 0, std::memory_order_relaxed);
    });
    static_cast<void>(registered);
  }
  ~RankThread() {
    is_rank_thread = false;
    n_rank_threads.fetch_sub(1, std::memory_order_release);
  }
};

/// What other threads use of the process's session while one destroys it. Never destroyed: they may
/// ask until the process has ended.
struct SharedParts {
  std::mutex mutex;
  std::shared_ptr<const shared::Elastic> elastic;
  std::shared_ptr<Trace> trace;
  std::atomic<base::ForkGuard> process{};  // read before the mutex, which a fork may inherit locked
};
SharedParts& shared_parts() {
  static auto* const of_all = new SharedParts;
  return *of_all;
}
constinit std::atomic<bool> is_traced{false};

void share_parts(std::shared_ptr<const shared::Elastic> elastic, std::shared_ptr<Trace> trace) {
  SharedParts& mine = shared_parts();
  const std::lock_guard lock(mine.mutex);
  mine.process = base::ForkGuard();
  is_traced = trace != nullptr;
  mine.elastic.swap(elastic);
  mine.trace.swap(trace);
}

void leave_at_exit() noexcept {
  Session* const session = of_process.load(std::memory_order_acquire);
  if (session == nullptr || session->is_forked_child()) return;
  share_parts(session->elastic(), nullptr);
  session->retire();
}

struct LeavesAtExit {
  ~LeavesAtExit() { leave_at_exit(); }
};

[[noreturn]] void notify_peers_and_terminate() noexcept {
  // Without unwinding, no destructor runs: this is the last point at which to notify the peers.
  const std::exception_ptr error = std::current_exception();
  if (Session* const mine = session())
    mine->leave(error ? base::text_of(error) : "std::terminate was called");
  if (former_handler() != nullptr) former_handler()();
  std::abort();
}

}  // namespace

Session::Session(World world, engines::JoinedEngine joined, std::chrono::milliseconds timeout,
                 std::source_location where, int host)
    : world_(std::move(world)),
      engine_(joined.engine.get()),
      recorder_(leave_on_exception(
          *engine_, [&] { return make_recorder(world_, std::move(joined.recorder)); })),
      trace_(recorder_ ? recorder_->trace() : nullptr),
      elastic_(std::move(joined.elastic)),
      world_group_(leave_on_exception(*engine_,
                                      [&] {
                                        return std::make_shared<GroupState>(
                                            std::move(joined.engine), kWorldName, timeout,
                                            recorder_, world_.env.check);
                                      })),
      local_group_(
          world_.local_size == world_.size ? world_group_ : leave_on_exception(*engine_, [&] {
            return world_group_.split(/*color=*/host, /*key=*/world_.rank, where);
          })) {
  membership_of(world_group_)->generation = world_.regrouped.generation;
}

const std::shared_ptr<WorldMembership>& Session::membership_of(const Group& group) noexcept {
  return group.state_->membership();
}

void Session::leave(std::string_view failure) noexcept {
  if (engine_ == nullptr || is_forked_child()) return;
  AsyncGroups& async_groups = membership_of(world_group_)->async_groups;
  if (failure.empty()) async_groups.wait_until_idle();
  depart(failure);
  if (!failure.empty()) async_groups.abandon_pending(failure);
}

void Session::depart(std::string_view failure) noexcept {
  if (engine_ == nullptr) return;
  membership_of(world_group_)->has_ended = true;
  std::exchange(engine_, nullptr)->leave(failure);
  if (world_.host) world_.host->leave(failure);
  if (recorder_ && !failure.empty()) recorder_->write_on_failure(failure);
}

bool Session::has_failed() const noexcept {
  return engine_ == nullptr || (recorder_ && recorder_->has_failed()) ||
         (elastic_ && elastic_->is_over());
}

void Session::retire() noexcept {
  if (is_forked_child()) return;
  // If the peers make the same calls, these complete one after the other; peers that wait for this
  // rank elsewhere should learn soon that it has left.
  constexpr std::chrono::seconds kPatience{1};
  if (engine_ != nullptr) membership_of(world_group_)->async_groups.wait_until_idle(kPatience);
  depart({});
  local_group_.state_->retire();
  world_group_.state_->retire();
  trace_.reset();
  recorder_.reset();
}

void install_terminate_handler() noexcept {
  static std::once_flag once;
  std::call_once(once, [] { former_handler() = std::set_terminate(notify_peers_and_terminate); });
}

Session* session() noexcept {
  if (of_thread != nullptr) return of_thread;
  return has_rank_threads() ? nullptr : of_process.load(std::memory_order_acquire);
}

void throw_left(const Group& group, const WorldMembership& world, ErrorContext context) {
  throw UsageError(
      std::move(context),
      fmt::format("group '{}' is of generation {} of the world, which this rank has left{}",
                  group.name(), world.generation,
                  session() != nullptr
                      ? ": split the world again, and make anew what uses the group"
                      : " without joining another: to go on alone, give it the group of one rank, "
                        "lockstep::Group()"));
}

void check_not_left(const Group& group, ErrorContext context) {
  const WorldMembership& world = *Session::membership_of(group);
  if (world.has_ended) throw_left(group, world, std::move(context));
}

Group follow_world(const Group& given, ErrorContext context) {
  const WorldMembership& world = *Session::membership_of(given);
  if (!world.has_ended) return given;
  const Session* const now = session();
  const bool is_whole = given.name() == kWorldName;
  if (now == nullptr || !is_whole) throw_left(given, world, std::move(context));
  return now->world_group();
}

bool has_rank_threads() noexcept { return n_rank_threads.load(std::memory_order_acquire) > 0; }
bool has_thread_left() noexcept { return is_rank_thread && of_thread == nullptr; }
std::shared_ptr<const shared::Elastic> elastic() noexcept {
  SharedParts& mine = shared_parts();
  const std::lock_guard lock(mine.mutex);
  return mine.elastic;
}

std::shared_ptr<Trace> trace() noexcept {
  if (of_thread != nullptr) return of_thread->is_forked_child() ? nullptr : of_thread->trace();
  if (has_rank_threads() || !is_traced.load(std::memory_order_acquire)) return nullptr;
  SharedParts& mine = shared_parts();
  if (mine.process.load().is_forked_child()) return nullptr;
  const std::lock_guard lock(mine.mutex);
  return mine.trace;
}

std::atomic<bool>& has_failed_regroup() noexcept {
  static constinit std::atomic<bool> has_failed{false};
  return has_failed;
}

bool was_initialised() noexcept { return has_joined.load(std::memory_order_relaxed); }

void join_process(std::unique_ptr<Session> session) {
  // A thread-local of the main thread is destroyed before any global, including those that the
  // engine's libraries create after this call. Other threads may end before the process, so they
  // need a global.
  if (::getpid() == ::gettid()) {
    thread_local const LeavesAtExit leaves_at_exit;
    static_cast<void>(leaves_at_exit);
  }
  static const LeavesAtExit leaves_at_exit;
  static_cast<void>(leaves_at_exit);
  share_parts(session->elastic(), session->trace());
  has_failed_regroup() = false;
  of_process.store(session.release(), std::memory_order_release);
  has_joined.store(true, std::memory_order_relaxed);
}

void join_thread(std::unique_ptr<Session> session) {
  thread_local const RankThread counted;
  static_cast<void>(counted);
  of_thread = session.release();
}

std::unique_ptr<Session> take_process_session() noexcept {
  share_parts(nullptr, nullptr);
  return std::unique_ptr<Session>(of_process.exchange(nullptr, std::memory_order_acq_rel));
}

Session* thread_session() noexcept { return of_thread; }

std::unique_ptr<Session> take_thread_session() noexcept {
  return std::unique_ptr<Session>(std::exchange(of_thread, nullptr));
}

}  // namespace lockstep::internal
