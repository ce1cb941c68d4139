#pragma once

#include <lockstep/engine.hpp>
#include <memory>

namespace lockstep::solo {

/// The engine of one rank: what it gathers, scatters or reduces is its own data.
std::unique_ptr<Engine> make();

}  // namespace lockstep::solo
