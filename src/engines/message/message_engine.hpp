#pragma once

#include <lockstep/engine.hpp>
#include <memory>
#include <string>

#include "engines/message/transport.hpp"

namespace lockstep::message {

/// The engine of that name, which implements every operation by messages over `transport`.
std::unique_ptr<Engine> make(std::string name, std::unique_ptr<Transport> transport);

}  // namespace lockstep::message
