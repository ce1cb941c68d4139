#pragma once

/// @file
/// Deprecated: the former name of `<lockstep/main_process.hpp>`, for one more minor version.
#include <lockstep/main_process.hpp>

#pragma message("lockstep/control.hpp is deprecated: include lockstep/main_process.hpp")
