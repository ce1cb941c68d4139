#include <fmt/format.h>
#include <pthread.h>

#include <exception>
#include <lockstep/error.hpp>
#include <lockstep/world.hpp>
#include <system_error>
#include <thread>
#include <vector>

#include "base/exception.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "group/group_state.hpp"
#include "group/root_cause.hpp"
#include "world/session.hpp"

namespace lockstep {
void run_ranks(int n, const std::function<void(int)>& body, const RunRanksOptions& options,
               std::source_location where) {
  if (n < 1) {
    throw UsageError({.operation = "run_ranks", .where = where},
                     fmt::format("{} ranks requested; expected at least 1", n));
  }
  const auto timeout =
      internal::checked_timeout(options.timeout, {.operation = "run_ranks", .where = where});
  Env env = Env::read();
  env.record_dir.reset();  // its files belong to processes
  const auto segment = shared::make_world(shared::Segment::for_threads(n), env.tune);
  const Call barrier{.op = Op::barrier,
                     .check = env.check,
                     .group = "world",
                     .operation = "run_ranks",
                     .sequence = 1,
                     .timeout = timeout,
                     .where = where};
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(n));

  const auto run_one = [&](int rank) {
    auto& error = errors[static_cast<std::size_t>(rank)];
    try {
      // The thread names itself first, because a trace records the name.
      ::pthread_setname_np(::pthread_self(), fmt::format("lockstep-{}", rank).c_str());
      auto engine = shared::join_world(segment, rank, barrier);
      auto recorder = engine->recorder();
      engines::JoinedEngine joined{.engine = std::move(engine), .recorder = std::move(recorder)};
      internal::join_thread(
          std::make_unique<internal::Session>(internal::World{.launcher = Launcher::none,
                                                              .rank = rank,
                                                              .size = n,
                                                              .local_rank = rank,
                                                              .local_size = n,
                                                              .segment = std::nullopt,
                                                              .job = {},
                                                              .env = env},
                                              std::move(joined), timeout, where));
      body(rank);
    } catch (...) {
      error = std::current_exception();
      if (internal::thread_session() != nullptr)
        internal::thread_session()->leave(base::text_of(error));
    }
    internal::take_thread_session();
  };

  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(n));
  std::exception_ptr no_thread;
  for (int rank = 0; rank < n && !no_thread; ++rank) {
    try {
      threads.emplace_back(run_one, rank);
    } catch (const std::system_error& error) {
      no_thread = std::make_exception_ptr(SystemError(
          {.operation = "run_ranks", .where = where}, error.code().value(),
          fmt::format("cannot start thread {} of {}; raise the limit of processes (ulimit -u) or "
                      "free memory",
                      rank + 1, n)));
      // The running ranks wait for all ranks: notify them that the rest will not join.
      for (int r = rank; r < n; ++r) shared::declare_failed(*segment, r, base::text_of(no_thread));
    }
  }
  for (std::thread& thread : threads) thread.join();

  if (no_thread) std::rethrow_exception(no_thread);
  const std::size_t cause = internal::root_cause_of(errors);
  if (cause < errors.size()) std::rethrow_exception(errors[cause]);
}

}  // namespace lockstep
