#include "base/atomic_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <system_error>
#include <utility>

#include "base/file_limit.hpp"

namespace lockstep::base {
namespace {

[[noreturn]] void fail(const char* what, const std::string& path, int error_number = errno) {
  throw std::system_error(error_number, std::generic_category(), std::string(what) + " " + path);
}

/// The system would use the part before the NUL as the path.
void refuse_nul(const std::string& path) {
  const std::size_t nul = path.find('\0');
  if (nul != std::string::npos) {
    fail("expected a path without NUL, got one after", path.substr(0, nul), EINVAL);
  }
}

/// The path that a chain of symbolic links leads to, which need not exist.
std::string follow_links(std::string path) {
  constexpr int kMaxLinks = 40;  // the kernel's own limit
  refuse_nul(path);
  for (int i = 0; i < kMaxLinks; ++i) {
    std::array<char, PATH_MAX> target{};
    const ssize_t n = ::readlink(path.c_str(), target.data(), target.size());
    if (n < 0) return path;  // not a link, or nothing: errors are those of the open
    const std::string to(target.data(), static_cast<std::size_t>(n));
    const std::size_t slash = path.rfind('/');
    const bool is_relative = !to.empty() && to.front() != '/' && slash != std::string::npos;
    path.resize(is_relative ? slash + 1 : 0);
    path += to;
  }
  fail("follow the links of", path, ELOOP);
}

/// Throws if a rename would replace something other than a regular file: for example a FIFO, whose
/// reader would find a file the next time. Also if the system does not let this user follow a link
/// there.
void check_replaceable(const std::string& path) {
  struct stat there {};
  if (::stat(path.c_str(), &there) != 0) {
    if (errno == EACCES || errno == ELOOP) fail("write", path);
    return;
  }
  if (S_ISREG(there.st_mode)) return;
  if (S_ISDIR(there.st_mode)) fail("write", path, EISDIR);
  fail("replace (not a regular file)", path, ENOTSUP);
}

/// The path to write for `path`.
std::string replaceable(std::string path) {
  refuse_nul(path);
  check_replaceable(path);
  return follow_links(std::move(path));
}

/// Never opens an existing file, nor the target of a link.
UniqueFd make(const std::string& part, mode_t mode) {
  ::unlink(part.c_str());
  UniqueFd fd(::open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode));
  if (!fd) fail("open", part);
  return fd;
}

void sync(int fd, const std::string& path) {
  if (::fsync(fd) != 0) fail("fsync", path);
}

}  // namespace

AtomicFile::AtomicFile(std::string path, mode_t mode, std::string_view suffix)
    : path_(replaceable(std::move(path))),
      part_(path_ + std::string(suffix)),
      fd_(make(part_, mode)) {}

AtomicFile::~AtomicFile() {
  if (!is_committed_) ::unlink(part_.c_str());
}

void AtomicFile::write(std::string_view bytes) {
  if (exceeds_file_limit(n_bytes_ + bytes.size())) fail("write", part_, EFBIG);
  n_bytes_ += bytes.size();
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd(), bytes.data(), bytes.size());
    if (n < 0 && errno != EINTR) fail("write", part_);
    if (n > 0) bytes.remove_prefix(static_cast<std::size_t>(n));
  }
}

void AtomicFile::commit() {
  // If two writers violate the contract, the second has replaced this file and is not done.
  struct stat mine {};
  struct stat there {};
  if (::fstat(fd(), &mine) != 0 || ::lstat(part_.c_str(), &there) != 0) fail("stat", part_);
  if (mine.st_ino != there.st_ino) fail("another process is writing", part_, EBUSY);
  check_replaceable(path_);
  if (::rename(part_.c_str(), path_.c_str()) != 0) fail("rename to", path_);
  is_committed_ = true;
}

void AtomicFile::flush_to_disk() { sync(fd(), part_); }

void AtomicFile::commit_to_disk() {
  flush_to_disk();
  commit();
  // The folder records the rename.
  const std::size_t slash = path_.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  const UniqueFd opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened) fail("open", folder);
  sync(opened.get(), folder);
}

std::string read_regular_file(const std::string& path, const std::function<void()>& after_piece) {
  refuse_nul(path);
  // Without O_NONBLOCK, opening a FIFO waits for its writer.
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) fail("open", path);
  if (!S_ISREG(status.st_mode)) fail("read (not a regular file)", path, ENOTSUP);
  std::string bytes(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t n_read = 0;
  while (n_read < bytes.size()) {
    const ssize_t n =
        ::read(fd.get(), bytes.data() + n_read, std::min(bytes.size() - n_read, kIoChunkBytes));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("read", path);
    if (n == 0) break;
    n_read += static_cast<std::size_t>(n);
    if (after_piece) after_piece();
  }
  bytes.resize(n_read);
  return bytes;
}

}  // namespace lockstep::base
