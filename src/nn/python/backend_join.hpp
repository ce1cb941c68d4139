#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string_view>

#include "nn/python/backend.hpp"
#include "nn/python/meeting.hpp"

namespace lockstep::python {

/// The name of torch's default group.
inline constexpr std::string_view kWorld = "world";

/// A group of the ranks that have met, over shared memory and, between hosts, over `between`, which
/// may be null on one host. Collective.
Backend::Joined join(const Meeting& meeting, c10::intrusive_ptr<c10d::ProcessGroup> between,
                     std::source_location where);

}  // namespace lockstep::python
