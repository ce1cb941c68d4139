#include "world/environment.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <initializer_list>
#include <lockstep/error.hpp>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "base/abstract_socket.hpp"
#include "base/process.hpp"
#include "world/slurm_tasks.hpp"
#include "world/variables.hpp"

namespace lockstep {
namespace {

using internal::first_set;
using internal::kMaxWorldSize;
using internal::Number;
using internal::number;
using internal::reject;
using internal::variable;

/// The names of a launcher's four variables.
struct Names {
  std::string_view launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;

  bool any_set() const { return first_set({rank, size, local_rank, local_size}) != nullptr; }
};

constexpr Names kTorchrun = {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kOpenMpi = {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                            "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
/// Hydra, the launcher of MPICH, and the launcher of Intel MPI, which is derived from it.
constexpr Names kHydra = {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};

void check_below(const Number& rank, const Number& size, std::string_view what) {
  if (rank.value >= size.value) {
    reject(fmt::format("{} is {}, but {} is {}: {} are 0 to {}", rank.name, rank.value, size.name,
                       size.value, what, size.value - 1));
  }
}

internal::World make_world(const Number& rank, const Number& size, const Number& local_rank,
                           const Number& local_size) {
  check_below(rank, size, "ranks");
  check_below(local_rank, local_size, "local ranks");
  if (local_size.value > size.value) {
    reject(fmt::format("{} is {}, but {} is {}: a host cannot have more ranks than the world",
                       local_size.name, local_size.value, size.name, size.value));
  }
  internal::World world;
  world.rank = rank.value;
  world.size = size.value;
  world.local_rank = local_rank.value;
  world.local_size = local_size.value;
  return world;
}

internal::World read_world(const Names& names) {
  const std::string_view launcher = names.launcher;
  const Number size = number(launcher, {names.size}, 1, kMaxWorldSize);
  const Number rank = number(launcher, {names.rank}, 0, kMaxWorldSize);
  const Number local_rank = number(launcher, {names.local_rank}, 0, kMaxWorldSize);
  const Number local_size = number(launcher, {names.local_size}, 1, kMaxWorldSize);
  return make_world(rank, size, local_rank, local_size);
}

/// The values of those of `names` that are set; empty if none is.
std::string values_of(std::initializer_list<const char*> names) {
  std::string values;
  for (const char* name : names) {
    if (const auto value = variable(name)) {
      values += fmt::format("{}{}={}", values.empty() ? "" : " ", name, *value);
    }
  }
  return values;
}

internal::World read_torchrun() {
  internal::World world = read_world(kTorchrun);
  if (variable("MASTER_PORT")) {
    number("torchrun", {"MASTER_PORT"}, 1, 65535);
    world.job = values_of(
        {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"});
  }
  return world;
}

internal::World read_lockstep() {
  internal::World world = read_world(kTorchrun);
  world.segment = variable("LOCKSTEP_SEGMENT");
  return world;
}

/// Whether this is a task of srun. A batch script also has SLURM_PROCID and the counts of the
/// entire allocation, but it runs once.
bool in_slurm_step() { return first_set({"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"}) != nullptr; }

Number slurm_size() {
  return number("Slurm", {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}, 1, kMaxWorldSize);
}

internal::World read_slurm() {
  const Number size = slurm_size();
  const Number rank = number("Slurm", {"SLURM_PROCID"}, 0, kMaxWorldSize);
  const Number local_rank = number("Slurm", {"SLURM_LOCALID"}, 0, kMaxWorldSize);
  const Number node = number("Slurm", {"SLURM_NODEID"}, 0, kMaxWorldSize);
  const char* const name = first_set({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  if (name == nullptr) {
    reject("SLURM_STEP_TASKS_PER_NODE is not set, though the environment is Slurm's");
  }
  const std::string text = *variable(name);
  const std::vector<int> tasks = internal::slurm_tasks_per_node(name, text);
  const int total = std::accumulate(tasks.begin(), tasks.end(), 0);
  if (total != size.value) {
    reject(fmt::format("{} is {}, which makes {} tasks, but {} is {}", name, text, total, size.name,
                       size.value));
  }
  const int n_nodes = static_cast<int>(tasks.size());
  if (node.value >= n_nodes) {
    reject(fmt::format("SLURM_NODEID is {}, but {} is {}: nodes are 0 to {}", node.value, name,
                       text, n_nodes - 1));
  }
  const std::string here = fmt::format("{}={} at SLURM_NODEID={}", name, text, node.value);
  internal::World world = make_world(rank, size, local_rank,
                                     {here.c_str(), tasks[static_cast<std::size_t>(node.value)]});
  if (variable("SLURM_JOB_ID")) {
    world.job = values_of({"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"});
  }
  return world;
}

std::string pmi_job_of(pid_t launcher) {
  return fmt::format("pmi {} {}", launcher, base::process_start_time(launcher));
}

/// The peer process of PMI_FD, through which MPICH's ranks talk to their launcher: the same for all
/// ranks of a job on one host, even with a shell in between. Otherwise the parent process.
std::string pmi_job() {
  if (const auto fd = variable("PMI_FD")) {
    const ucred peer = base::peer_of(std::atoi(fd->c_str()));
    if (peer.pid > 0) return pmi_job_of(peer.pid);
  }
  return pmi_job_of(::getppid());
}

internal::World read_mpi() {
  if (kOpenMpi.any_set()) {
    internal::World world = read_world(kOpenMpi);
    world.job = values_of({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"});
    if (world.job.empty()) world.job = pmi_job();
    return world;
  }
  if (!kHydra.any_set()) {
    if (const auto rank = variable("PMIX_RANK")) {
      reject(
          fmt::format("PMIX_RANK is {}, but PMIx has no variable for the size of the world: start "
                      "the program by mpirun or srun, or set RANK, WORLD_SIZE, LOCAL_RANK and "
                      "LOCAL_WORLD_SIZE",
                      *rank));
    }
  }
  internal::World world = read_world(kHydra);
  world.job = pmi_job();
  return world;
}

/// Throws if mpirun's and torchrun's variables give different world sizes: variables of an outer
/// launcher, or stale exported ones, cannot be distinguished from those of the inner launcher.
void check_stale_variables_under_mpi(const char* size_name) {
  const auto left = variable("WORLD_SIZE");
  const auto size = variable(size_name);
  if (!left || !size || *left == *size) return;
  reject(
      fmt::format("{} is {}, but WORLD_SIZE is {}: the variables of two launchers, mpirun's and "
                  "torchrun's. Unset those of the one that did not start this rank (RANK, "
                  "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE for torchrun), or choose by "
                  "InitOptions::launcher",
                  size_name, *size, *left));
}

/// A launcher started by each task of srun creates at least one rank per task: if WORLD_SIZE is
/// less, it was exported before srun, and every task would consider itself the entire world.
void check_stale_variables_under_slurm() {
  if (!in_slurm_step() || variable("TORCHELASTIC_RUN_ID") || !variable("WORLD_SIZE")) return;
  const Number size = slurm_size();
  const Number left = number("torchrun", {"WORLD_SIZE"}, 1, kMaxWorldSize);
  if (left.value >= size.value) return;
  reject(
      fmt::format("{} is {}, but WORLD_SIZE is {}: the variables of two launchers, srun's and "
                  "torchrun's. Unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE before "
                  "srun, or choose by InitOptions::launcher",
                  size.name, size.value, left.value));
}

std::string rank_in_job(const internal::World& world, std::string_view job) {
  return fmt::format("{}: rank {} of {}, {}", name_of(world.launcher), world.rank, world.size, job);
}

}  // namespace

void internal::check_not_started_by_rank(const World& world) {
  const auto joined = variable(kJoined);
  if (!joined) return;
  const std::size_t end = joined->find(' ');
  const pid_t process = std::atoi(joined->c_str());
  if (end == std::string::npos || process == ::getpid()) return;
  const std::string of_process = joined->substr(end + 1);
  // A launcher started by a rank gives other values. The parent is the job where PMI_FD is closed.
  if (of_process != rank_in_job(world, world.job) &&
      !(of_process.starts_with(rank_in_job(world, "pmi ")) && world.job == pmi_job_of(process))) {
    return;
  }
  reject(
      fmt::format("rank {} is process {}; each rank joins once, and a program started by a rank "
                  "is not a rank: give it launcher 'none' to be alone",
                  world.rank, process));
}

void internal::mark_joined(const World& world) {
  const std::string value = fmt::format("{} {}", ::getpid(), rank_in_job(world, world.job));
  ::setenv(kJoined, value.c_str(), /*overwrite=*/1);
}

void internal::unmark_joined() noexcept { ::unsetenv(kJoined); }

std::string_view name_of(Launcher launcher) {
  switch (launcher) {
    case Launcher::infer: return "infer";
    case Launcher::none: return "none";
    case Launcher::lockstep: return "lockstep run";
    case Launcher::pytorch: return "torchrun";
    case Launcher::slurm: return "Slurm";
    case Launcher::mpi: return "mpirun";
  }
  return "unknown";
}

Launcher infer_launcher() {
  // The innermost launcher first: programs start inside allocations, not vice versa.
  if (variable("LOCKSTEP_SEGMENT")) return Launcher::lockstep;
  if (kOpenMpi.any_set()) {
    check_stale_variables_under_mpi(kOpenMpi.size);
    return Launcher::mpi;
  }
  // srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE too, but not the local numbers.
  const bool is_of_srun = in_slurm_step() && !first_set({kHydra.local_rank, kHydra.local_size});
  if (kHydra.any_set() && !is_of_srun) {
    check_stale_variables_under_mpi(kHydra.size);
    return Launcher::mpi;
  }
  if (kTorchrun.any_set()) {
    check_stale_variables_under_slurm();
    return Launcher::pytorch;
  }
  if (in_slurm_step()) return Launcher::slurm;
  if (variable("PMIX_RANK")) return Launcher::mpi;
  return Launcher::none;
}

std::string internal::describe_world() {
  const Launcher launcher = infer_launcher();
  const char* rank = kTorchrun.rank;
  const char* size = kTorchrun.size;
  switch (launcher) {
    case Launcher::infer:
    case Launcher::none: return {};
    case Launcher::lockstep:
    case Launcher::pytorch: break;
    case Launcher::slurm:
      rank = "SLURM_PROCID";
      size = first_set({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
      break;
    case Launcher::mpi:
      rank = kOpenMpi.any_set() ? kOpenMpi.rank : kHydra.rank;
      size = kOpenMpi.any_set() ? kOpenMpi.size : kHydra.size;
      break;
  }
  const auto n_ranks = size == nullptr ? std::nullopt : variable(size);
  if (!n_ranks || std::atoi(n_ranks->c_str()) <= 1) return {};
  return fmt::format("{}={}, {}={} ({})", size, *n_ranks, rank, variable(rank).value_or(""),
                     name_of(launcher));
}

std::string internal::find_mpi(Launcher launcher, const Env& env) {
  if (launcher == Launcher::lockstep) return {};
  if (env.mpi && !env.mpi->empty()) return *env.mpi;
  // Ranks of another launcher may inherit variables from an MPI rank that started that launcher.
  if (launcher != Launcher::mpi && launcher != Launcher::slurm) return {};
  if (first_set({kOpenMpi.size, "PMIX_RANK"}) != nullptr) return "openmpi";
  return variable(kHydra.size) ? "mpich" : "";
}

internal::World internal::read_world(Launcher launcher) {
  const Env env = Env::read();
  internal::World world;
  switch (launcher) {
    case Launcher::lockstep: world = read_lockstep(); break;
    case Launcher::pytorch: world = read_torchrun(); break;
    case Launcher::slurm: world = read_slurm(); break;
    case Launcher::mpi: world = read_mpi(); break;
    case Launcher::infer:
    case Launcher::none: break;
  }
  world.launcher = launcher;
  world.mpi = find_mpi(launcher, env);
  world.ucx_transports = variable("UCX_TLS").value_or(world.ucx_transports);
  world.ucx_devices = variable("UCX_NET_DEVICES").value_or(world.ucx_devices);
  world.env = env;
  return world;
}

}  // namespace lockstep
