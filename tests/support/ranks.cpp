#include "support/ranks.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <lockstep/lockstep.hpp>
#include <thread>

#include "engines/shared/job.hpp"

namespace lockstep::test {

std::string name_of(const Setting& setting) {
  switch (setting.form) {
    case Form::solo: return "solo";
    case Form::threads: return fmt::format("threads_{}", setting.n_ranks);
    case Form::processes: return fmt::format("processes_{}", setting.n_ranks);
    case Form::gloo: return fmt::format("gloo_{}", setting.n_ranks);
    case Form::launched: return "launched";
  }
  return {};
}

std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  return out << name_of(setting);
}

namespace {

[[noreturn]] void be_rank(int rank, int n, const std::string& backend, const std::string& segment,
                          const std::function<void()>& body) {
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("WORLD_SIZE", std::to_string(n).c_str(), 1);
  ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  ::setenv("LOCAL_WORLD_SIZE", std::to_string(n).c_str(), 1);
  ::setenv("LOCKSTEP_SEGMENT", segment.c_str(), 1);
  int code = 0;
  try {
    init_dist({.backend = backend});
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

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t n_bytes = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(fd, any, n_bytes), 0);
  EXPECT_EQ(::getsockname(fd, any, &n_bytes), 0);
  ::close(fd);
  return ntohs(address.sin_port);
}

std::vector<int> run_processes(int n, const std::function<void()>& body,
                               std::chrono::seconds watchdog,
                               const std::function<void(std::span<const pid_t>)>& started,
                               const std::string& backend) {
  shared::Job job(n);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", std::to_string(free_port()).c_str(), 1);
  std::fflush(nullptr);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < n; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) be_rank(rank, n, backend, job.environment(), body);
    pids.push_back(pid);
  }
  if (started) started(pids);

  std::vector<int> statuses(pids.size(), -1);
  const auto give_up = std::chrono::steady_clock::now() + watchdog;
  bool is_killed = false;
  for (std::size_t n_left = pids.size(); n_left > 0;) {
    bool is_any = false;
    for (std::size_t i = 0; i < pids.size(); ++i) {
      int status = 0;
      if (pids[i] == 0 || ::waitpid(pids[i], &status, WNOHANG) != pids[i]) continue;
      job.rank_ended(static_cast<int>(i), status);
      statuses[i] = status;
      pids[i] = 0;
      --n_left;
      is_any = true;
    }
    if (is_any || n_left == 0) continue;
    if (!is_killed && std::chrono::steady_clock::now() > give_up) {
      is_killed = true;
      ADD_FAILURE() << "ranks hang: killed after " << watchdog.count() << " s";
      for (const pid_t pid : pids) {
        if (pid != 0) ::kill(pid, SIGKILL);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return statuses;
}

void run_as(const Setting& setting, const std::function<void()>& body,
            std::chrono::seconds watchdog) {
  switch (setting.form) {
    case Form::solo: body(); return;
    case Form::threads:
      run_ranks(setting.n_ranks, [&body] { body(); }, {.timeout = watchdog});
      return;
    case Form::launched:
      init_dist({.backend = std::getenv("LOCKSTEP_TEST_BACKEND"), .timeout = watchdog});
      body();
      destroy_dist();
      return;
    case Form::processes:
    case Form::gloo:
      const auto statuses = run_processes(setting.n_ranks, body, watchdog, /*started=*/{},
                                          setting.form == Form::gloo ? "gloo" : "auto");
      for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
        EXPECT_EQ(statuses[rank], 0) << "rank " << rank;
      }
      return;
  }
}

}  // namespace lockstep::test
