#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "base/fd.hpp"

namespace lockstep::base {

/// A file that whoever opens `path` finds whole, or as it was: written as `path`.part and renamed.
/// Gone again unless committed; what a kill leaves is in nobody's way, the next one at this path
/// replaces it. What is there and no regular file (a device, a FIFO, a folder) is not replaced. For
/// one writer of a path at a time. All members throw std::system_error: EFBIG rather than SIGXFSZ.
class WholeFile {
 public:
  WholeFile(std::string path, mode_t mode);
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  int fd() const noexcept { return fd_.get(); }
  void write(std::string_view bytes);
  void commit();
  /// The same; when it returns, a power cut changes nothing any more.
  void commit_to_disk();

 private:
  std::string path_;
  std::string part_;
  UniqueFd fd_;
  std::uint64_t n_bytes_ = 0;
  bool is_committed_ = false;
};

}  // namespace lockstep::base
