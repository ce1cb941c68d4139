#pragma once

#include <cstddef>

namespace lockstep::base {

/// Bytes the system could give to programs now, without ending others; a large number where it
/// does not say.
std::size_t available_memory() noexcept;

}  // namespace lockstep::base
