#include <fmt/format.h>

#include <lockstep/error.hpp>
#include <lockstep/world.hpp>
#include <utility>

#include "world/environment.hpp"
#include "world/session.hpp"

namespace lockstep {
namespace {

/// The group of the innermost GroupScope on this thread.
constinit thread_local const Group* scoped = nullptr;

[[noreturn]] void reject(const char* operation, const std::string& text,
                         std::source_location where) {
  throw UsageError({.operation = operation, .where = where}, text);
}

/// Only a program of one process may use the solo group. A rank of several that has not called
/// init_dist would silently compute something else.
void check_alone(const char* operation, std::source_location where) {
  if (internal::has_failed_regroup()) {
    reject(operation,
           "an earlier regroup() failed: this process is in no world; call destroy_dist to "
           "go on alone",
           where);
  }
  if (internal::was_initialised() || internal::has_thread_left()) return;
  const std::string world = internal::describe_world();
  if (world.empty()) return;
  reject(operation,
         fmt::format("this process never called init_dist, but its environment describes a world: "
                     "{}. Call init_dist first; if this process is to run alone, call "
                     "init_dist with the launcher none",
                     world),
         where);
}

/// One per thread, because a group allows one call at a time.
const Group& solo_group(const char* operation, std::source_location where) {
  constinit thread_local static bool is_gone = false;
  struct OfThread {
    Group group;
    OfThread(const char* name, std::source_location place) { check_alone(name, place); }
    ~OfThread() { is_gone = true; }
  };
  if (is_gone) {  // called by a global's destructor, after the main thread's group is destroyed
    static const Group* const at_exit = new Group;
    return *at_exit;
  }
  thread_local const OfThread mine(operation, where);
  return mine.group;
}

}  // namespace

namespace {

/// On a thread that is not a rank of run_ranks, but may work for one.
bool is_unbound_thread() noexcept {
  return internal::has_rank_threads() && !internal::has_thread_left();
}

}  // namespace

bool is_distributed() { return internal::session() != nullptr || is_unbound_thread(); }

const Group& default_group(std::source_location where) {
  if (scoped != nullptr) return *scoped;
  if (const auto* session = internal::session()) return session->world_group();
  if (is_unbound_thread()) {
    reject("default_group",
           "this thread is not a rank of run_ranks, and the rank it works for is unknown; pass it "
           "the rank's group, with GroupScope scope(group) at the start of this thread or as the "
           "last argument of each call",
           where);
  }
  return solo_group("default_group", where);
}

const Group& local_group(std::source_location where) {
  if (const auto* session = internal::session()) return session->local_group();
  if (is_unbound_thread()) {
    reject("local_group",
           "this thread is not a rank of run_ranks, and the rank it works for is unknown; copy "
           "local_group() on the rank's own thread and pass this thread the copy",
           where);
  }
  return solo_group("local_group", where);
}

GroupScope::GroupScope(Group group)
    : group_(std::move(group)), before_(std::exchange(scoped, &group_)) {}
GroupScope::~GroupScope() { scoped = before_; }

int get_rank(const Group& group) { return group.rank(); }
int get_world_size(const Group& group) { return group.size(); }
DistInfo get_dist_info(const Group& group) {
  return {.rank = group.rank(), .world_size = group.size()};
}
int get_local_rank(std::source_location where) { return local_group(where).rank(); }
int get_local_size(std::source_location where) { return local_group(where).size(); }
bool is_main_process(const Group& group) { return group.rank() == 0; }

std::optional<std::string> get_backend(const Group& group) {
  if (!is_distributed()) return std::nullopt;
  return std::string(group.backend());
}

}  // namespace lockstep
