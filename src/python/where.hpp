#pragma once

#include <source_location>
#include <string>

namespace lockstep::python {

/// Frames of files in this folder are not the caller's. Needs the GIL. Call before where().
void add_library_folder(const std::string& folder);

/// The innermost line of Python code outside those folders; empty on a thread without one (those of
/// autograd). Needs the GIL. Its text lives as long as the process.
std::source_location where();

}  // namespace lockstep::python
