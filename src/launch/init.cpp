#include <exception>
#include <lockstep/env.hpp>
#include <lockstep/error.hpp>
#include <lockstep/launch.hpp>

#include "comm/session.hpp"
#include "engines/catalog.hpp"
#include "launch/environment.hpp"

namespace lockstep {

void init_dist(const InitOptions& options, std::source_location where) {
  if (is_distributed()) {
    throw UsageError({.operation = "init_dist", .where = where},
                     "this thread belongs to a world already; call destroy_dist first");
  }
  const Env env = Env::read();
  const Launcher launcher =
      options.launcher == Launcher::infer ? infer_launcher() : options.launcher;
  comm::World world = launch::read_world(launcher);
  world.record_dir = env.record_dir;
  const auto timeout = env.timeout.value_or(options.timeout);
  const Call barrier{
      .op = Op::barrier, .group = "world", .sequence = 1, .timeout = timeout, .where = where};
  auto engine = engines::join(options.backend, world, barrier);
  const int host = engines::find_host(*engine, world, barrier);
  comm::session() =
      std::make_unique<comm::Session>(std::move(world), std::move(engine), timeout, host);
  comm::tell_peers_of_uncaught_exceptions();
}

void destroy_dist(std::string_view failure) {
  auto& session = comm::session();
  if (!session) return;
  if (failure.empty() && std::uncaught_exceptions() > 0) {
    failure = "an exception (destroy_dist was called while it unwound the stack)";
  }
  session->leave(failure);
  session.reset();
}

}  // namespace lockstep
