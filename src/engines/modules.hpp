#pragma once

#include <cstdint>
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

struct Module {
  std::string path;    ///< empty if there is none
  std::string reason;  ///< why not
};

/// What a module exports: a function of this name that returns the table, whose first member is its
/// version.
struct ModuleSymbol {
  const char* name;
  std::uint32_t version;
  const char* title;  ///< "an MPI module"
};

/// Loads a module for as long as the program runs. Returns the address of the symbol, null if it
/// has none. Throws EngineError with the loader's text.
void* address_in_module(const std::string& file, const char* symbol, const ErrorContext& context);

/// The table of a module. Throws EngineError, also if its version is another.
template <class Table>
const Table& load_module(const std::string& file, const ModuleSymbol& symbol,
                         const ErrorContext& context) {
  const auto table =
      reinterpret_cast<const Table* (*)()>(address_in_module(file, symbol.name, context));
  if (table != nullptr && table()->version == symbol.version) return *table();
  throw EngineError(context, file + " is not " + symbol.title + " of this version of lockstep");
}

}  // namespace lockstep::engines
