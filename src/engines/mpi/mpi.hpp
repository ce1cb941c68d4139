#pragma once

#include <lockstep/engine.hpp>
#include <memory>
#include <string>

#include "group/world.hpp"

namespace lockstep::mpi {

/// The module for the MPI that started this world, or that LOCKSTEP_MPI names.
struct Module {
  std::string path;    ///< empty where there is none
  std::string reason;  ///< why not
};

/// Looks for the file only.
Module find_module();

/// The engine over MPI_COMM_WORLD, which must be this world. The library stays loaded until the
/// program ends, which is when MPI_Finalize is called, unless the program initialised MPI itself.
/// Throws EngineError with MPI's or the loader's own text, UsageError where MPI's world is another.
///
/// A rank that dies without a word is for MPI's launcher to notice: mpirun then ends the whole job.
std::unique_ptr<Engine> join(const internal::World& world, const Call& barrier);

}  // namespace lockstep::mpi
