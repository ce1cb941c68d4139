#pragma once

#include <lockstep/error.hpp>
#include <string>

/// What an engine loads at run time, because the core links no library of its own for it: made by
/// lockstep_engine_module of modules.cmake.
namespace lockstep::engines {

/// The file of the engine's module for that library; empty if there is none. Searches beside an
/// installed program, in the run path (find_package(lockstep) sets one for programs that link the
/// library), beside the shared library that contains this code (a Python extension) and in its
/// folder `lockstep` (liblockstep.so), then in the configured install prefix, which a wheel has
/// not.
std::string module_file(const std::string& engine, const std::string& library);

/// Loads a module for as long as the program runs. Returns the address of the symbol, null if it
/// has none. Throws EngineError with the loader's text.
void* load_module(const std::string& file, const char* symbol, const ErrorContext& context);

}  // namespace lockstep::engines
