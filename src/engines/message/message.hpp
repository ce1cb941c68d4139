#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::message {

/// One message to or from a rank of a channel.
struct Message {
  enum class Direction : std::int32_t { send, receive };
  Direction direction;
  std::int32_t peer;
  void* data;
  std::size_t n_bytes;
};

}  // namespace lockstep::message
