#pragma once

#include <chrono>
#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <memory>
#include <string_view>

#include "base/process_tag.hpp"
#include "group/world.hpp"
#include "record/recorder.hpp"

namespace lockstep::internal {

/// A rank's membership in a world, from init_dist or run_ranks to its end. Leaving happens in the
/// destructor. A fork of the rank's process inherits the object, and does nothing with it.
class Session {
 public:
  /// `host`: the lowest rank on this rank's host. Collective where ranks have different ones.
  Session(World world, std::unique_ptr<Engine> engine, std::chrono::milliseconds timeout,
          int host = 0);
  ~Session() { leave({}); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const World& world() const noexcept { return world_; }
  const Group& world_group() const noexcept { return world_group_; }
  const Group& local_group() const noexcept { return local_group_; }
  /// Null where nobody traces.
  const std::shared_ptr<Trace>& trace() const noexcept { return trace_; }
  /// `failure`: text of the exception by which this rank leaves; empty where it just leaves, after
  /// its asynchronous calls under way have ended.
  void leave(std::string_view failure) noexcept;
  /// For a program that ends: leaves at once, and lets go of the engines and records. The groups
  /// still know their rank and size, for destructors of globals that ask; calls on them throw
  /// UsageError.
  void retire() noexcept;
  /// Whether this process is a fork of the rank's.
  bool is_copy() const noexcept { return process_.is_copy(); }

 private:
  void depart(std::string_view failure) noexcept;

  base::ProcessTag process_;
  World world_;
  Engine* engine_;                      // world_group_ owns it
  std::shared_ptr<Recorder> recorder_;  // null in a world of one that nobody traces
  std::shared_ptr<Trace> trace_;
  Group world_group_;
  Group local_group_;
};

/// Makes std::terminate tell the peers of the exception that nobody caught.
void tell_peers_of_uncaught_exceptions() noexcept;

/// The session of the calling thread's rank: of run_ranks where the thread is one of its ranks,
/// else of init_dist, on every thread of the process. Null where there is none, and on the other
/// threads of a process in which run_ranks is at work: whose rank they help is not known.
Session* session() noexcept;
/// Whether threads of this process are ranks of run_ranks now, or were until destroy_dist.
bool has_rank_threads() noexcept;
/// Whether the calling thread was a rank of run_ranks until destroy_dist: it is alone since.
bool has_thread_left() noexcept;
/// Whether this process ever joined a world by init_dist.
bool was_initialised() noexcept;

/// Makes `session` that of the process, until take_process_session() or the end of the program,
/// where the rank leaves: before the destructors of globals where the main thread calls this, else
/// between them.
void join_process(std::unique_ptr<Session> session);
/// Null where there is none.
std::unique_ptr<Session> take_process_session() noexcept;

/// Makes `session` that of the calling thread alone, until take_thread_session().
void join_thread(std::unique_ptr<Session> session);
Session* thread_session() noexcept;
/// Null where there is none.
std::unique_ptr<Session> take_thread_session() noexcept;

}  // namespace lockstep::internal
