#pragma once

#include <lockstep/engine.hpp>
#include <memory>
#include <string>

#include "engines/modules.hpp"
#include "group/world.hpp"

namespace lockstep::mpi {

/// The module for the MPI that started this world, or that LOCKSTEP_MPI names. `mpi`: see
/// World::mpi. Only checks that the file exists.
engines::Module find_module(const std::string& mpi);

/// The engine over MPI_COMM_WORLD, which must be this world. The library stays loaded until the
/// program ends, when MPI_Finalize is called unless the program initialized MPI itself.
/// Throws EngineError with MPI's or the loader's text, UsageError if MPI's world differs.
///
/// MPI's launcher must detect a rank that dies without notice: mpirun then ends the entire job.
std::unique_ptr<Engine> join(internal::World& world, const Call& barrier);

}  // namespace lockstep::mpi
