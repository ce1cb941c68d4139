#pragma once

#include <lockstep/engine.hpp>
#include <memory>
#include <optional>
#include <string>

#include "engines/modules.hpp"
#include "group/world.hpp"

namespace lockstep::ucx {

/// `named`: Env::ucx. Only checks that the file exists.
engines::Module find_module(const std::optional<std::string>& named);

/// The engine over UCX between the ranks of `lockstep run`, which tells each the addresses of the
/// others, and which of them share a host. The rank has joined its host's memory (World::host).
/// Throws EngineError with UCX's or the loader's text, UsageError, TimeoutError naming the ranks
/// that do not join.
///
/// A connection that breaks says nothing about its peer. Whether a rank is lost is known to the
/// launchers: they say so in this host's segment, at which every wait looks.
std::unique_ptr<Engine> join(internal::World& world, const Call& barrier);

}  // namespace lockstep::ucx
