#pragma once

#include <lockstep/engine.hpp>
#include <memory>
#include <string>

#include "engines/message/channel.hpp"

namespace lockstep::message {

/// The engine of that name, which implements every operation by messages over `channel`.
std::unique_ptr<Engine> make(std::string name, std::unique_ptr<Channel> channel);

}  // namespace lockstep::message
