#pragma once

#include <source_location>
#include <string>

namespace lockstep::python {

/// Frames of files in this folder are not the caller's. Call once, before where().
void set_package_folder(const std::string& folder);

/// The innermost line of Python code outside the package; empty on a thread without one (those of
/// autograd). Needs the GIL. Its text lives as long as the process.
std::source_location where();

}  // namespace lockstep::python
