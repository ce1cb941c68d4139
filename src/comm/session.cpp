#include "comm/session.hpp"

#include <cstdlib>
#include <exception>
#include <mutex>
#include <utility>

#include "base/exception.hpp"
#include "comm/recorder.hpp"

namespace lockstep {
namespace comm {
namespace {

std::shared_ptr<Recorder> make_recorder(const World& world, const Engine& engine) {
  const char* const trace_dir = std::getenv("LOCKSTEP_TRACE");  // as Env::trace_dir
  auto recorder = engine.recorder();
  // Alone there is nobody to wait for, and nothing to tell but to who looks at the times.
  if (!recorder && (world.size > 1 || trace_dir != nullptr)) {
    recorder = Recorder::in_process(world.rank, world.size, world.record_dir);
  }
  if (recorder && world.record_dir) recorder->write_to(*world.record_dir);
  if (recorder && trace_dir != nullptr) recorder->trace_to(trace_dir);
  return recorder;
}

std::terminate_handler& former_handler() noexcept {
  static std::terminate_handler handler = nullptr;
  return handler;
}

[[noreturn]] void tell_peers_and_terminate() noexcept {
  // Without unwinding no destructor runs: this is the last chance.
  const std::exception_ptr error = std::current_exception();
  if (session()) session()->leave(error ? base::text_of(error) : "std::terminate was called");
  if (former_handler() != nullptr) former_handler()();
  std::abort();
}

}  // namespace

Session::Session(World world, std::unique_ptr<Engine> engine, std::chrono::milliseconds timeout,
                 int host)
    : world_(std::move(world)),
      engine_(engine.get()),
      recorder_(make_recorder(world_, *engine)),
      trace_(recorder_ ? recorder_->trace() : nullptr),
      world_group_(std::move(engine), "world", timeout, recorder_),
      local_group_(world_.local_size == world_.size
                       ? world_group_
                       : world_group_.split(/*color=*/host, /*key=*/world_.rank)) {}

void Session::leave(std::string_view failure) noexcept {
  if (engine_ == nullptr) return;
  std::exchange(engine_, nullptr)->leave(failure);
  if (recorder_ && !failure.empty()) recorder_->died(failure);
}

void tell_peers_of_uncaught_exceptions() noexcept {
  static std::once_flag once;
  std::call_once(once, [] { former_handler() = std::set_terminate(tell_peers_and_terminate); });
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
