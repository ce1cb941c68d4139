#pragma once

#include <lockstep/engine.hpp>
#include <memory>
#include <string>

#include "nn/c10d_wire.hpp"

namespace lockstep::nn::detail {

/// The engine of that name over all ranks of the wire.
std::unique_ptr<Engine> make_c10d_engine(std::string name, std::shared_ptr<Wire> wire);

}  // namespace lockstep::nn::detail
