#pragma once

/// @file
/// Deprecated: the former name of `<lockstep/world.hpp>`, for one more minor version.
#include <lockstep/world.hpp>

#pragma message("lockstep/launch.hpp is deprecated: include lockstep/world.hpp")
