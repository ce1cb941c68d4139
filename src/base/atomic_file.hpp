#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/fd.hpp"

namespace lockstep::base {

/// A file replaced atomically: written as `path``suffix` and renamed, so readers of `path` see the
/// old or the complete new file. Removed unless committed; the next writer replaces a file left by
/// a kill. A symbolic link is kept: the file that it leads to is replaced. Does not replace
/// anything but a regular file (a device, a FIFO, a folder). One writer per path at a time. All
/// members throw std::system_error: EFBIG rather than SIGXFSZ.
class AtomicFile {
 public:
  AtomicFile(std::string path, mode_t mode, std::string_view suffix = ".part");
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  int fd() const noexcept { return fd_.get(); }
  void write(std::string_view bytes);
  /// Flushes what has been written so far to the disk.
  void flush_to_disk();
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

/// Long files are read, and should be written, in pieces of this size, so that the caller can
/// report progress after each.
inline constexpr std::size_t kIoChunkBytes = std::size_t{16} << 20U;

/// The contents of a regular file. Throws std::system_error, also for anything else (opening a FIFO
/// would wait for its writer). Calls after_piece, if given, after every kIoChunkBytes bytes.
std::string read_regular_file(const std::string& path,
                              const std::function<void()>& after_piece = {});

}  // namespace lockstep::base
