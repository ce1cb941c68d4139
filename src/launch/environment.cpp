#include "launch/environment.hpp"

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <lockstep/env.hpp>
#include <lockstep/error.hpp>
#include <string>
#include <string_view>

#include "base/process.hpp"

namespace lockstep {
namespace {

std::optional<std::string> get(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) return std::nullopt;
  return value;
}

[[noreturn]] void refuse(const std::string& text) {
  throw UsageError({.operation = "init_dist"}, text);
}

/// A whole number in [low, high] from the first of `names` that is set.
struct Number {
  const char* name;
  int value;
};

Number number(std::string_view launcher, std::initializer_list<const char*> names, int low,
              int high) {
  for (const char* name : names) {
    const auto text = get(name);
    if (!text) continue;
    int value = 0;
    const char* const end = text->data() + text->size();
    const auto parsed = std::from_chars(text->data(), end, value);
    if (parsed.ec != std::errc() || parsed.ptr != end) {
      refuse(fmt::format("{} is '{}', not a whole number", name, *text));
    }
    if (value < low || value > high) {
      refuse(fmt::format("{} is {}; it must be from {} to {}", name, value, low, high));
    }
    return {name, value};
  }
  refuse(
      fmt::format("{} is not set, though the environment is {}'s; set it, or unset the other "
                  "variables of {}",
                  *names.begin(), launcher, launcher));
}

/// What a launcher calls its numbers.
struct Variables {
  std::initializer_list<const char*> rank;
  std::initializer_list<const char*> size;
  std::initializer_list<const char*> local_rank;
  std::initializer_list<const char*> local_size;
};

constexpr int kMost = 1 << 24;

comm::World read(Launcher launcher, const Variables& variables) {
  const std::string_view name = name_of(launcher);
  const Number size = number(name, variables.size, 1, kMost);
  const Number rank = number(name, variables.rank, 0, kMost);
  if (rank.value >= size.value) {
    refuse(fmt::format("{} is {}, but {} is {}: ranks are 0 to {}", rank.name, rank.value,
                       size.name, size.value, size.value - 1));
  }
  const Number local_rank = number(name, variables.local_rank, 0, kMost);
  const Number local_size = number(name, variables.local_size, 1, kMost);
  if (local_rank.value >= local_size.value) {
    refuse(fmt::format("{} is {}, but {} is {}: local ranks are 0 to {}", local_rank.name,
                       local_rank.value, local_size.name, local_size.value, local_size.value - 1));
  }
  return {.launcher = launcher,
          .rank = rank.value,
          .size = size.value,
          .local_rank = local_rank.value,
          .local_size = local_size.value,
          .segment = std::nullopt,
          .job = {}};
}

/// The values of `names`, for those that are set; empty where none is.
std::string values_of(std::initializer_list<const char*> names) {
  std::string values;
  for (const char* name : names) {
    if (const auto value = get(name)) values += fmt::format("{}={} ", name, *value);
  }
  return values;
}

/// The process at the other end of PMI_FD, by which MPICH's ranks talk to their launcher: the same
/// for all ranks of a job on one host, also when a shell stands between. Else this one's parent.
std::string pmi_job() {
  ucred launcher{.pid = ::getppid(), .uid = 0, .gid = 0};
  if (const auto fd = get("PMI_FD")) {
    ucred peer{};
    socklen_t n_bytes = sizeof peer;
    if (::getsockopt(std::atoi(fd->c_str()), SOL_SOCKET, SO_PEERCRED, &peer, &n_bytes) == 0 &&
        peer.pid > 0) {
      launcher = peer;
    }
  }
  return fmt::format("pmi {} {}", launcher.pid, base::process_start_time(launcher.pid));
}

comm::World read_variables(Launcher launcher) {
  switch (launcher) {
    case Launcher::lockstep:
    case Launcher::pytorch: {
      comm::World world =
          read(launcher, {{"RANK"}, {"WORLD_SIZE"}, {"LOCAL_RANK"}, {"LOCAL_WORLD_SIZE"}});
      world.segment = get("LOCKSTEP_SEGMENT");
      return world;
    }
    case Launcher::slurm:
      return read(launcher, {{"SLURM_PROCID"},
                             {"SLURM_NTASKS"},
                             {"SLURM_LOCALID"},
                             {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS"}});
    case Launcher::mpi:
      return read(launcher, {{"OMPI_COMM_WORLD_RANK", "PMI_RANK"},
                             {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"},
                             {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_RANK"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_SIZE"}});
    case Launcher::infer:
    case Launcher::none: break;
  }
  return {};
}

std::string job_of(Launcher launcher) {
  switch (launcher) {
    case Launcher::pytorch:
      if (!get("MASTER_PORT")) return {};
      return values_of(
          {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"});
    case Launcher::slurm:
      if (!get("SLURM_JOB_ID")) return {};
      return values_of({"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"});
    case Launcher::mpi: {
      const std::string job =
          values_of({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"});
      return job.empty() ? pmi_job() : job;
    }
    case Launcher::lockstep:  // its ranks inherit their segment
    case Launcher::infer:
    case Launcher::none: break;
  }
  return {};
}

}  // namespace

Env Env::read() {
  Env env;
  env.segment = get("LOCKSTEP_SEGMENT");
  env.simd = get("LOCKSTEP_SIMD");
  if (env.simd && *env.simd != "scalar" && *env.simd != "avx2" && *env.simd != "avx512") {
    refuse(fmt::format("LOCKSTEP_SIMD is '{}'; it takes scalar, avx2 or avx512", *env.simd));
  }
  if (get("LOCKSTEP_RESTART")) {
    env.restart = number("lockstep run", {"LOCKSTEP_RESTART"}, 0, kMost).value;
  }
  if (const auto text = get("LOCKSTEP_TIMEOUT")) {
    double seconds = 0;
    const char* const end = text->data() + text->size();
    const auto parsed = std::from_chars(text->data(), end, seconds);
    constexpr double kLongest = 3e9;  // a century
    if (parsed.ec != std::errc() || parsed.ptr != end || !std::isfinite(seconds) || seconds <= 0 ||
        seconds > kLongest) {
      refuse(
          fmt::format("LOCKSTEP_TIMEOUT is '{}'; it takes the seconds one operation may last, "
                      "as 30 or 0.5",
                      *text));
    }
    env.timeout = std::chrono::milliseconds(std::llround(seconds * 1000));
  }
  return env;
}

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
  // The innermost first: programs start inside allocations, not the other way round.
  if (get("LOCKSTEP_SEGMENT")) return Launcher::lockstep;
  if (get("OMPI_COMM_WORLD_RANK") || get("PMI_RANK")) return Launcher::mpi;
  if (get("WORLD_SIZE") || get("RANK")) return Launcher::pytorch;
  if (get("SLURM_PROCID")) return Launcher::slurm;
  return Launcher::none;
}

comm::World launch::read_world(Launcher launcher) {
  comm::World world = read_variables(launcher);
  world.job = job_of(launcher);
  return world;
}

}  // namespace lockstep
