#pragma once

#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::comm {

class Trace;

/// Who this rank is, as its launcher says.
struct World {
  Launcher launcher = Launcher::none;
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::optional<std::string> segment;  ///< LOCKSTEP_SEGMENT
  /// What this job's ranks on this host have in common, and no other job of this user has at the
  /// same time; empty where the launcher does not say.
  std::string job;
  std::optional<std::string> record_dir{};  ///< LOCKSTEP_RECORD_DIR
};

/// A thread's membership in a world, from init_dist or run_ranks to its end. Leaving happens in
/// the destructor, so a thread or program that ends leaves too.
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
  /// `failure`: text of the exception by which this rank leaves; empty where it just leaves.
  void leave(std::string_view failure) noexcept;

 private:
  World world_;
  Engine* engine_;                      // world_group_ owns it
  std::shared_ptr<Recorder> recorder_;  // null in a world of one that nobody traces
  std::shared_ptr<Trace> trace_;
  Group world_group_;
  Group local_group_;
};

/// Makes std::terminate tell this thread's peers of the exception that nobody caught.
void tell_peers_of_uncaught_exceptions() noexcept;

/// The calling thread's session: null when not distributed.
std::unique_ptr<Session>& session() noexcept;

}  // namespace lockstep::comm
