#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "base/fd.hpp"

namespace lockstep::base {

/// A file replaced atomically: written as `path`.part and renamed, so readers of `path` see the old
/// or the complete new file. Removed unless committed; the next writer replaces a file left by a
/// kill. Does not replace anything but a regular file (a device, a FIFO, a folder). One writer per
/// path at a time. All members throw std::system_error: EFBIG rather than SIGXFSZ.
class WholeFile {
 public:
  WholeFile(std::string path, mode_t mode);
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  int fd() const noexcept { return fd_.get(); }
  void write(std::string_view bytes);
  void commit();
  /// The same; when it returns, the file survives a power failure.
  void commit_to_disk();

 private:
  std::string path_;
  std::string part_;
  UniqueFd fd_;
  std::uint64_t n_bytes_ = 0;
  bool is_committed_ = false;
};

}  // namespace lockstep::base
