// Whatever stands in the variables of the launchers and in our own, reading them returns a world
// that can be, or throws a lockstep::Error.

#include <array>
#include <cstdint>
#include <cstdlib>
#include <lockstep/env.hpp>
#include <lockstep/error.hpp>
#include <string>
#include <string_view>

#include "world/environment.hpp"

namespace {

constexpr std::array kNames = {"LOCKSTEP_SEGMENT",
                               "LOCKSTEP_RESTART",
                               "LOCKSTEP_TIMEOUT",
                               "LOCKSTEP_RECORD_DIR",
                               "LOCKSTEP_SIMD",
                               "LOCKSTEP_MPI",
                               "LOCKSTEP_CHECK",
                               "LOCKSTEP_TUNE",
                               "LOCKSTEP_NETWORK",
                               "RANK",
                               "WORLD_SIZE",
                               "LOCAL_RANK",
                               "LOCAL_WORLD_SIZE",
                               "MASTER_PORT",
                               "TORCHELASTIC_RUN_ID",
                               "SLURM_JOB_ID",
                               "SLURM_STEP_ID",
                               "SLURM_PROCID",
                               "SLURM_LOCALID",
                               "SLURM_NODEID",
                               "SLURM_STEP_NUM_TASKS",
                               "SLURM_STEP_TASKS_PER_NODE",
                               "SLURM_NTASKS",
                               "SLURM_TASKS_PER_NODE",
                               "OMPI_COMM_WORLD_RANK",
                               "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK",
                               "OMPI_COMM_WORLD_LOCAL_SIZE",
                               "PMIX_NAMESPACE",
                               "PMIX_RANK",
                               "PMI_RANK",
                               "PMI_SIZE",
                               "PMI_FD",
                               "MPI_LOCALRANKID",
                               "MPI_LOCALNRANKS"};

void require(bool holds) {
  if (!holds) std::abort();
}

template <class F>
void try_reading(F read) {
  try {
    read();
  } catch (const lockstep::Error&) {
  }
}

void check(const lockstep::internal::World& world) {
  require(world.rank >= 0 && world.rank < world.size);
  require(world.local_rank >= 0 && world.local_rank < world.local_size);
  require(world.local_size <= world.size);
}

}  // namespace

/// Lines: a byte that chooses the variable, and its value.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  for (const char* name : kNames) unsetenv(name);
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    if (line.empty()) continue;
    const auto name = static_cast<unsigned char>(line[0]) % kNames.size();
    setenv(kNames[name], std::string(line.substr(1)).c_str(), 1);
  }
  try_reading([] {
    const lockstep::Env env = lockstep::Env::read();
    require(env.restart >= 0 && (!env.timeout || env.timeout->count() > 0));
  });
  try_reading([] { check(lockstep::internal::read_world(lockstep::infer_launcher())); });
  for (const auto launcher : {lockstep::Launcher::lockstep, lockstep::Launcher::pytorch,
                              lockstep::Launcher::slurm, lockstep::Launcher::mpi}) {
    try_reading([&] { check(lockstep::internal::read_world(launcher)); });
  }
  return 0;
}
