#pragma once

/// @file
/// Deprecated: the former name of `<lockstep/sync_master.hpp>`, for one more minor version.
#include <lockstep/sync_master.hpp>

#pragma message("lockstep/sync.hpp is deprecated: include lockstep/sync_master.hpp")
