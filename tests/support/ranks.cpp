#include "support/ranks.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <lockstep/lockstep.hpp>
#include <optional>
#include <string_view>
#include <thread>

#include "engines/catalog.hpp"
#include "engines/hierarchical/hierarchical.hpp"
#include "engines/message/message_engine.hpp"
#include "engines/shared/bootstrap/job.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "support/free_port.hpp"
#include "support/message_network.hpp"
#include "support/waiting.hpp"
#include "world/environment.hpp"
#include "world/session.hpp"

namespace lockstep::test {

std::string name_of(const Setting& setting) {
  switch (setting.form) {
    case Form::solo: return "solo";
    case Form::threads: return fmt::format("threads_{}", setting.n_ranks);
    case Form::processes: return fmt::format("processes_{}", setting.n_ranks);
    case Form::hosts: return fmt::format("hosts_{}", setting.n_ranks);
    case Form::messages: return fmt::format("messages_{}", setting.n_ranks);
    case Form::gloo: return fmt::format("gloo_{}", setting.n_ranks);
    case Form::gloo_hosts: return fmt::format("gloo_hosts_{}", setting.n_ranks);
    case Form::launched: return "launched";
  }
  return {};
}

std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  return out << name_of(setting);
}

std::vector<int> hosts_of(int n_ranks) {
  std::vector<int> hosts;
  const int n_on_host = n_ranks > 4 ? 3 : 2;
  for (int r = 0; r < n_ranks; ++r) hosts.push_back(n_ranks == 4 ? r % 2 : r - r % n_on_host);
  return hosts;
}

namespace {

constexpr std::string_view kGlooHosts = "hosts over gloo";

std::vector<int>& current_hosts() {
  static std::vector<int> hosts;
  return hosts;
}

Call joining(std::chrono::milliseconds timeout) {
  return {.op = Op::barrier,
          .group = "world",
          .sequence = 1,
          .timeout = timeout,
          .where = std::source_location::current()};
}

/// Like init_dist, but with given hosts.
std::unique_ptr<internal::Session> join_hosts(internal::World world, std::unique_ptr<Engine> outer,
                                              const Call& barrier) {
  const std::vector<int> hosts = hosts_of(world.size);
  const int host = hosts[static_cast<std::size_t>(world.rank)];
  world.local_size = static_cast<int>(std::ranges::count(hosts, host));
  return std::make_unique<internal::Session>(
      world, engines::JoinedEngine{hierarchical::make(std::move(outer), hosts, barrier), nullptr},
      barrier.timeout, barrier.where, host);
}

void init_hosts(const std::string& outer, std::chrono::milliseconds timeout) {
  const Call barrier = joining(timeout);
  internal::World world = internal::read_world(infer_launcher());
  current_hosts() = hosts_of(world.size);
  internal::join_process(join_hosts(world, engines::join(outer, world, barrier).engine, barrier));
}

/// Runs body as n ranks that are threads. join(world, barrier): the session of one.
void run_threads(int n, const std::function<void()>& body, std::chrono::milliseconds timeout,
                 const std::function<std::unique_ptr<internal::Session>(
                     internal::World world, const Call& barrier)>& join) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      const Call barrier = joining(timeout);
      try {
        internal::World world;
        world.rank = rank;
        world.size = n;
        internal::join_thread(join(world, barrier));
        body();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
      destroy_dist();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void run_host_threads(int n, const std::function<void()>& body, std::chrono::milliseconds timeout) {
  const auto segment = shared::make_world(shared::Segment::for_threads(n));
  run_threads(n, body, timeout, [&](const internal::World& world, const Call& barrier) {
    return join_hosts(world, shared::join_world(segment, world.rank, barrier), barrier);
  });
}

void run_message_threads(int n, const std::function<void()>& body,
                         std::chrono::milliseconds timeout) {
  MessageNetwork network(n);
  run_threads(n, body, timeout, [&](internal::World world, const Call& barrier) {
    world.local_size = n;
    auto engine = message::make("network", network.transport(world.rank));
    engine->run(barrier);
    return std::make_unique<internal::Session>(
        world, engines::JoinedEngine{std::move(engine), nullptr}, barrier.timeout, barrier.where,
        /*host=*/0);
  });
}

[[noreturn]] void be_rank(int rank, int n, const std::string& backend, const std::string& segment,
                          const std::function<void()>& body) {
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("WORLD_SIZE", std::to_string(n).c_str(), 1);
  ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  ::setenv("LOCAL_WORLD_SIZE", std::to_string(n).c_str(), 1);
  ::setenv("LOCKSTEP_SEGMENT", segment.c_str(), 1);
  int code = 0;
  try {
    if (backend == kGlooHosts) {
      init_hosts("gloo", std::chrono::minutes(5));
    } else {
      init_dist({.backend = backend});
    }
    body();
    destroy_dist();
  } catch (const std::exception& error) {
    fmt::print(stderr, "rank {}: {}\n", rank, error.what());
    code = 3;
  }
  if (::testing::Test::HasFailure()) code = 4;
  std::fflush(nullptr);
  ::_exit(code);
}

}  // namespace

const std::vector<int>& hosts() { return current_hosts(); }

std::vector<int> run_processes(int n, const std::function<void()>& body,
                               std::chrono::seconds watchdog,
                               const std::function<void(std::span<const pid_t>)>& started,
                               const std::string& backend) {
  const char* const tune = ::getenv("LOCKSTEP_TUNE");  // as `lockstep run` takes it
  shared::Job job(n, tune != nullptr ? std::optional<std::string>(tune) : std::nullopt);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  const FreePort port;
  ::setenv("MASTER_PORT", std::to_string(port.number()).c_str(), 1);
  std::fflush(nullptr);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < n; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) be_rank(rank, n, backend, job.environment(), body);
    pids.push_back(pid);
  }
  if (started) started(pids);

  std::vector<int> statuses(pids.size(), -1);
  std::size_t n_left = pids.size();
  const auto have_all_ended = [&] {
    for (std::size_t i = 0; i < pids.size(); ++i) {
      int status = 0;
      if (pids[i] == 0 || ::waitpid(pids[i], &status, WNOHANG) != pids[i]) continue;
      job.rank_ended(static_cast<int>(i), status);
      statuses[i] = status;
      pids[i] = 0;
      --n_left;
    }
    return n_left == 0;
  };
  if (!wait_until(have_all_ended, watchdog)) {
    ADD_FAILURE() << "ranks hang: killed after " << watchdog.count() << " s";
    for (const pid_t pid : pids) {
      if (pid != 0) ::kill(pid, SIGKILL);
    }
    wait_until(have_all_ended);
  }
  return statuses;
}

void run_as(const Setting& setting, const std::function<void()>& body,
            std::chrono::seconds watchdog) {
  const bool is_on_hosts = setting.form == Form::hosts || setting.form == Form::gloo_hosts;
  current_hosts() = is_on_hosts ? hosts_of(setting.n_ranks) : std::vector<int>();
  switch (setting.form) {
    case Form::solo: body(); return;
    case Form::threads:
      run_ranks(setting.n_ranks, [&body] { body(); }, {.timeout = watchdog});
      return;
    case Form::hosts: run_host_threads(setting.n_ranks, body, watchdog); return;
    case Form::messages: run_message_threads(setting.n_ranks, body, watchdog); return;
    case Form::launched: {
      const char* const backend = std::getenv("LOCKSTEP_TEST_BACKEND");
      if (std::getenv("LOCKSTEP_TEST_HOSTS") != nullptr) {
        init_hosts(backend, watchdog);
      } else {
        init_dist({.backend = backend, .timeout = watchdog});
      }
      body();
      destroy_dist();
      return;
    }
    case Form::processes:
    case Form::gloo:
    case Form::gloo_hosts:
      const auto statuses =
          run_processes(setting.n_ranks, body, watchdog, /*started=*/{},
                        setting.form == Form::gloo         ? "gloo"
                        : setting.form == Form::gloo_hosts ? std::string(kGlooHosts)
                                                           : "auto");
      for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
        EXPECT_EQ(statuses[rank], 0) << "rank " << rank;
      }
      return;
  }
}

pid_t start_fork(const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  ::alarm(30);
  try {  // an exception would go on with the parent's tests
    body();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "in a fork: " << error.what();
  }
  std::fflush(nullptr);
  ::_exit(::testing::Test::HasFailure() ? 4 : 0);
}

int in_a_fork(const std::function<void()>& body) {
  const pid_t pid = start_fork(body);
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace lockstep::test
