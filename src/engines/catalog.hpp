#pragma once

#include <lockstep/engine.hpp>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "group/world.hpp"
#include "record/recorder.hpp"

namespace lockstep::shared {
class Elastic;
}

namespace lockstep::engines {

/// Whether an engine can serve a world, or why not.
struct Availability {
  bool is_available;
  std::string reason;
};

/// The engine of a world that this rank has joined.
struct JoinedEngine {
  std::unique_ptr<Engine> engine;
  /// Of the memory that the engine provides for the rank's flight record; null: it provides none.
  std::shared_ptr<internal::Recorder> recorder = nullptr;
  /// Of a generation of an elastic world, which the launcher ends; otherwise null.
  std::shared_ptr<const shared::Elastic> elastic = nullptr;
};

/// One line of the table of engines.
struct Entry {
  std::string_view name;
  Availability (*available)(const internal::World& world);
  /// Joins the world as its rank; `barrier` has the timeout and the caller's source line. Sets what
  /// the launcher tells of the world meanwhile: rank and size of a later one.
  JoinedEngine (*join)(internal::World& world, const Call& barrier);
  /// Whether it sends ordinary memory between hosts, so that hierarchical may use it there.
  bool is_between_hosts = false;
  /// Whether it serves the generations of an elastic world, which `lockstep run` tells of.
  bool serves_generations = false;
};

/// All engines, in the order in which `auto` tries them.
const std::vector<Entry>& catalog();

/// Joins with the engine of that name, or for "auto" with the first available one. Throws
/// UsageError for an unknown name, EngineError with every reason if none is available.
JoinedEngine join(std::string_view backend, internal::World& world, const Call& barrier);

/// The lowest rank on this rank's host. Collective. Throws what all_gather throws.
int find_host(Engine& engine, const internal::World& world, const Call& barrier);

}  // namespace lockstep::engines

/// Appends the engines of the libtorch layer. Weak: absent in programs that do not link
/// lockstep::nn, because the core must not depend on its engines.
extern "C" __attribute__((weak)) void lockstep_nn_engines(
    std::vector<lockstep::engines::Entry>& entries);
