#pragma once

#include <atomic>
#include <chrono>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <lockstep/world.hpp>
#include <memory>
#include <source_location>
#include <string>
#include <string_view>

#include "base/fork_guard.hpp"
#include "engines/catalog.hpp"
#include "group/world.hpp"
#include "group/world_membership.hpp"

namespace lockstep::internal {

/// A rank's membership in a world, from init_dist or run_ranks to its end. The destructor leaves
/// the world. A fork of the rank's process inherits the object, but does not use it.
class Session {
 public:
  /// `host`: the lowest rank on this rank's host. Collective if hosts differ between ranks.
  /// `where`: the program's line, for errors.
  Session(World world, engines::JoinedEngine joined, std::chrono::milliseconds timeout,
          std::source_location where, int host = 0);
  ~Session() { leave({}); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  static const std::shared_ptr<WorldMembership>& membership_of(const Group& group) noexcept;
  const World& world() const noexcept { return world_; }
  const Group& world_group() const noexcept { return world_group_; }
  const Group& local_group() const noexcept { return local_group_; }
  /// Null if tracing is off.
  const std::shared_ptr<Trace>& trace() const noexcept { return trace_; }
  /// `failure`: text of the exception with which this rank leaves, which ends its pending
  /// asynchronous calls; if empty, it leaves normally, after they have ended.
  void leave(std::string_view failure) noexcept;
  /// Leaves an elastic world for its next generation, without waiting for calls under way: they
  /// end with the generation.
  void regroup() noexcept { depart({}); }
  /// Whether any group of this rank is dead, or its generation of an elastic world is over.
  bool has_failed() const noexcept;
  /// Null if the world is not elastic.
  const std::shared_ptr<const shared::Elastic>& elastic() const noexcept { return elastic_; }
  /// At program exit: leaves, after asynchronous calls that end within a second, and releases the
  /// engines and records. The groups keep their
  /// rank and size, for destructors of globals that read them; calls on them throw UsageError.
  void retire() noexcept;
  /// Whether this process is a fork of the rank's.
  bool is_forked_child() const noexcept { return process_.is_forked_child(); }

 private:
  void depart(std::string_view failure) noexcept;

  base::ForkGuard process_;
  World world_;
  Engine* engine_;                      // world_group_ owns it
  std::shared_ptr<Recorder> recorder_;  // null in a world of one without tracing
  std::shared_ptr<Trace> trace_;
  std::shared_ptr<const shared::Elastic> elastic_;
  Group world_group_;
  Group local_group_;
};

/// Joins the world with the engine of that name. `operation`: what joining is called in errors;
/// `timeout`: of the world's operations. In an elastic world it goes on to the next generation as
/// long as ranks are lost while they join.
std::unique_ptr<Session> join_world(World world, std::string_view backend,
                                    const std::string& operation, std::chrono::milliseconds timeout,
                                    std::source_location where);

/// Makes std::terminate notify the peers of the uncaught exception.
void install_terminate_handler() noexcept;

/// The session of the calling thread's rank: from run_ranks if the thread is one of its ranks,
/// otherwise from init_dist, on every thread of the process. Null if there is none, and on other
/// threads while run_ranks is running, because the rank that they work for is unknown.
Session* session() noexcept;
/// What a group that the program has kept stands for: itself, or, if it is the group of a world
/// that this rank has left, that of its world now. Throws UsageError if the rank is in none now,
/// and for another group of the former world.
Group follow_world(const Group& given, ErrorContext context);
/// Whether this rank has left the world of `group`.
inline bool has_left(const Group& group) noexcept {
  return Session::membership_of(group)->has_ended;
}
/// Throws that UsageError. `world`: of `group`, or in which `group` was bound.
[[noreturn]] void throw_left(const Group& group, const WorldMembership& world,
                             ErrorContext context);
/// Throws it if this rank has left the world of `group`.
void check_not_left(const Group& group, ErrorContext context);
/// Whether threads of this process are ranks of run_ranks now, or were until destroy_dist.
bool has_rank_threads() noexcept;
/// Whether the calling thread was a rank of run_ranks until destroy_dist, and is now alone.
bool has_thread_left() noexcept;
/// Whether this process ever joined a world by init_dist.
bool was_initialised() noexcept;

/// Makes `session` that of the process, until take_process_session() or program exit, when the
/// rank leaves: before the destructors of globals if the main thread calls this, otherwise between
/// them.
void join_process(std::unique_ptr<Session> session);
/// Null if there is none.
std::unique_ptr<Session> take_process_session() noexcept;

/// Of the process's world, null if that is not elastic. Threads: any.
std::shared_ptr<const shared::Elastic> elastic() noexcept;
/// Of the calling thread's rank; null if it is not traced. Threads: any, also while another one
/// leaves the world.
std::shared_ptr<Trace> trace() noexcept;
/// shared::Elastic::finish, of the process's world; nothing if that is not elastic.
void finish_elastic() noexcept;
/// shared::Elastic::has_earlier_steps, of the process's world; false if that is not elastic.
bool has_earlier_steps() noexcept;
/// Whether `lockstep run --elastic` has started this rank, and its world is over another engine,
/// which the launcher does not keep running.
bool is_beside_elastic();
/// Whether a regroup() failed, after which this process is in no world and not alone either; until
/// it joins one, or calls destroy_dist.
std::atomic<bool>& has_failed_regroup() noexcept;

/// Makes `session` that of the calling thread alone, until take_thread_session().
void join_thread(std::unique_ptr<Session> session);
Session* thread_session() noexcept;
/// Null if there is none.
std::unique_ptr<Session> take_thread_session() noexcept;

}  // namespace lockstep::internal
