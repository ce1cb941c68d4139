#pragma once

#include <functional>
#include <lockstep/error.hpp>
#include <memory>
#include <string>

#include "base/atomic_file.hpp"

namespace lockstep::shared {
class Elastic;
}

namespace lockstep::internal {

/// A file that a rank replaces for all of them, such as a checkpoint. In an elastic job over
/// several hosts its end names the job and the generation of the world: a host that the others
/// count as lost may not know so yet, and must not replace what they have written since. It looks
/// right before the rename: a process that is paused between the two as part of a virtual machine
/// is not covered.
class ElasticFile : private base::AtomicFile {
 public:
  /// Throws what AtomicFile throws.
  explicit ElasticFile(const std::string& path);

  using base::AtomicFile::flush_to_disk;
  using base::AtomicFile::write;
  /// Throws PeerLost if a later generation has written the file, or the lease of this host has run
  /// out; and what AtomicFile throws.
  void commit_to_disk(const ErrorContext& context);

 private:
  ElasticFile(const std::string& path, std::shared_ptr<const shared::Elastic> elastic);

  std::string path_;
  std::shared_ptr<const shared::Elastic> elastic_;
};

/// What was written to it. See base::read_regular_file.
std::string read_elastic_file(const std::string& path,
                              const std::function<void()>& after_piece = {});

}  // namespace lockstep::internal
