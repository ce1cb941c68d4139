#pragma once

#include <unistd.h>

#include <string>

namespace lockstep::test {

inline constexpr const char* kNoIntelMpi = "there is no Intel MPI; ./dev setup peers installs it";

/// Its mpiexec with what ranks on one host, more than it has cores, need; empty where it is
/// missing.
inline std::string intel_mpiexec() {
  const std::string program = INTELMPI_FOLDER "/bin/mpiexec.hydra";
  if (::access(program.c_str(), X_OK) != 0) return {};
  return "env I_MPI_FABRICS=shm I_MPI_HYDRA_BOOTSTRAP=fork I_MPI_PIN=0 I_MPI_THREAD_YIELD=3 " +
         program;
}

}  // namespace lockstep::test
