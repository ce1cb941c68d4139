#include "comm/session.hpp"

#include <utility>

namespace lockstep {
namespace comm {

Session::Session(World world, std::unique_ptr<Engine> engine, std::chrono::milliseconds timeout,
                 int host)
    : world_(std::move(world)),
      engine_(engine.get()),
      world_group_(std::move(engine), "world", timeout),
      local_group_(world_.local_size == world_.size
                       ? world_group_
                       : world_group_.split(/*color=*/host, /*key=*/world_.rank)) {}

void Session::leave(std::string_view failure) noexcept {
  if (engine_ != nullptr) std::exchange(engine_, nullptr)->leave(failure);
}

std::unique_ptr<Session>& session() noexcept {
  thread_local std::unique_ptr<Session> session;
  return session;
}

}  // namespace comm

namespace {

const Group& solo_group() {
  thread_local const Group group;
  return group;
}

}  // namespace

bool is_distributed() { return comm::session() != nullptr; }

const Group& default_group() {
  const auto& session = comm::session();
  return session ? session->world_group() : solo_group();
}

const Group& local_group() {
  const auto& session = comm::session();
  return session ? session->local_group() : solo_group();
}

int get_rank(const Group& group) { return group.rank(); }
int get_world_size(const Group& group) { return group.size(); }
DistInfo get_dist_info(const Group& group) {
  return {.rank = group.rank(), .world_size = group.size()};
}
int get_local_rank() { return local_group().rank(); }
int get_local_size() { return local_group().size(); }
bool is_main_process(const Group& group) { return group.rank() == 0; }

std::optional<std::string> get_backend(const Group& group) {
  if (!is_distributed()) return std::nullopt;
  return std::string(group.backend());
}

}  // namespace lockstep
