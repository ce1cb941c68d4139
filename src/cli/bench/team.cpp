#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <lockstep/error.hpp>
#include <thread>

#include "base/abstract_socket.hpp"
#include "cli/bench/bench.hpp"

namespace lockstep::bench {
namespace {

constexpr std::chrono::seconds kStartLimit{60};
constexpr std::chrono::seconds kBlockLimit{120};

bool is_of_this_user(int socket) { return base::peer_of(socket).uid == ::geteuid(); }

void wait_readable(int fd, std::chrono::seconds limit) {
  pollfd wanted{fd, POLLIN, 0};
  if (::poll(&wanted, 1, static_cast<int>(std::chrono::milliseconds(limit).count())) <= 0) {
    throw std::runtime_error(fmt::format("sent nothing for {} s", limit.count()));
  }
}

}  // namespace

Team::Team(const Entrant& entrant, int n_ranks, const std::vector<int>& cores) : entrant_(entrant) {
  try {
    output_.reset(::memfd_create("lockstep-bench", MFD_CLOEXEC));
    if (!output_) throw SystemError({.operation = "lockstep bench"}, errno, "memfd_create");
    listener_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    // An empty name makes the kernel choose an address.
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socklen_t n_bytes = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (!listener_ || ::bind(listener_.get(), generic, sizeof address.sun_family) != 0 ||
        ::listen(listener_.get(), n_ranks) != 0 ||
        ::getsockname(listener_.get(), generic, &n_bytes) != 0) {
      throw SystemError({.operation = "lockstep bench"}, errno, "listen on a Unix socket");
    }
    std::vector<std::string> words = entrant.command;
    words.emplace_back(&address.sun_path[1], n_bytes - offsetof(sockaddr_un, sun_path) - 1);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t files;
    ::posix_spawn_file_actions_init(&files);
    ::posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_adddup2(&files, output_.get(), 1);
    ::posix_spawn_file_actions_adddup2(&files, output_.get(), 2);
    posix_spawnattr_t attributes;
    ::posix_spawnattr_init(&attributes);
    ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    const int error = ::posix_spawnp(&pid_, argv[0], &files, &attributes, argv.data(), environ);
    ::posix_spawn_file_actions_destroy(&files);
    ::posix_spawnattr_destroy(&attributes);
    if (error != 0) {
      pid_ = -1;
      throw SystemError({.operation = "lockstep bench"}, error, "start " + words.front());
    }
    ranks_.resize(static_cast<std::size_t>(n_ranks));
    const auto limit = std::chrono::steady_clock::now() + kStartLimit;
    for (int i = 0; i < n_ranks;) {
      if (std::chrono::steady_clock::now() > limit) fail("did not start in 60 s");
      pollfd wanted{listener_.get(), POLLIN, 0};
      if (::poll(&wanted, 1, 100) <= 0) {
        int status = 0;
        if (::waitpid(pid_, &status, WNOHANG) == pid_) {
          pid_ = -1;
          fail("ended before all its ranks had connected");
        }
        continue;
      }
      base::UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!fd || !is_of_this_user(fd.get())) continue;
      Hello hello{};
      read_all(fd.get(), &hello, sizeof hello);
      const auto rank = static_cast<std::size_t>(hello.rank);
      if (rank >= ranks_.size() || hello.n_ranks != n_ranks || ranks_[rank]) {
        fail(fmt::format("says rank {} of {}, expected {} ranks", hello.rank, hello.n_ranks,
                         n_ranks));
      }
      const Welcome welcome{cores.empty() ? -1 : cores[rank % cores.size()]};
      write_all(fd.get(), &welcome, sizeof welcome);
      clockid_t clock{};
      // Ranks that are threads have one clock.
      if (::clock_getcpuclockid(base::peer_of(fd.get()).pid, &clock) == 0) clocks_.insert(clock);
      ranks_[rank] = std::move(fd);
      ++i;
    }
  } catch (...) {
    end();
    throw;
  }
}

Team::~Team() { end(); }

std::chrono::nanoseconds Team::cpu_time() const {
  std::chrono::nanoseconds total{0};
  for (const clockid_t clock : clocks_) {
    timespec used{};
    if (::clock_gettime(clock, &used) != 0) continue;  // it has ended
    total += std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
  }
  return total;
}

std::vector<double> Team::run(const Block& block) {
  std::vector<double> times;
  try {
    for (const auto& fd : ranks_) write_all(fd.get(), &block, sizeof block);
    for (const auto& fd : ranks_) {
      Answer answer{};
      wait_readable(fd.get(), kBlockLimit);
      read_all(fd.get(), &answer, sizeof answer);
      if (answer.is_ok == 0) throw std::runtime_error(answer.text.data());
      const std::size_t n = times.size();
      times.resize(n + block.n_samples);
      read_all(fd.get(), &times[n], block.n_samples * sizeof(double));
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
  return times;
}

void Team::fail(const std::string& what) {
  constexpr off_t kMost = 500;
  const off_t end = ::lseek(output_.get(), 0, SEEK_END);
  std::string said(static_cast<std::size_t>(std::clamp<off_t>(end, 0, kMost)), '\0');
  const ssize_t n =
      ::pread(output_.get(), said.data(), said.size(), std::max<off_t>(0, end - kMost));
  said.resize(static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
  throw EngineError(
      {.operation = "lockstep bench"},
      fmt::format("{}: {}{}{}", entrant_.name, what, said.empty() ? "" : "; it wrote:\n", said));
}

void Team::end() noexcept {
  ranks_.clear();
  listener_.reset();
  // Ranks exit when the driver closes the connection; others are killed with their descendants.
  for (int i = 0; pid_ > 0 && i < 50; ++i) {
    if (::waitpid(pid_, nullptr, WNOHANG) == pid_) {
      pid_ = -1;
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }
  if (pid_ > 0) {
    ::kill(-pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
}

}  // namespace lockstep::bench
