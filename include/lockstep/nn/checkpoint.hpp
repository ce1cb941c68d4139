#pragma once

#include <torch/serialize/archive.h>

#include <functional>
#include <source_location>
#include <string>

#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>

namespace lockstep::nn {

/// Rank 0 saves what `write` puts into the archive (modules, optimizers, samplers: their save) as
/// the file `path`. Whoever opens `path`, after a crash or a power cut too, finds the file of
/// before or the new one, whole: it is written as `path`.part, brought to the disk, then renamed.
/// Collective; returns, on every rank, when the file is on the disk.
/// Throws UsageError on every rank, with rank 0's reason, where write or the file system failed;
/// `path` is as it was and the group stays usable.
void save_checkpoint(const std::string& path,
                     const std::function<void(torch::serialize::OutputArchive&)>& write,
                     const Group& group = default_group(),
                     std::source_location where = std::source_location::current());

/// Every rank gets the archive in `path` for `read`; only rank 0 opens the file. Collective.
/// Throws UsageError on every rank where rank 0 cannot read the file; what `read` throws, after.
void load_checkpoint(const std::string& path,
                     const std::function<void(torch::serialize::InputArchive&)>& read,
                     const Group& group = default_group(),
                     std::source_location where = std::source_location::current());

}  // namespace lockstep::nn
