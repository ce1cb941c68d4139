#include "base/whole_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "base/file_limit.hpp"

namespace lockstep::base {
namespace {

[[noreturn]] void fail(const char* what, const std::string& path, int error_number = errno) {
  throw std::system_error(error_number, std::generic_category(), std::string(what) + " " + path);
}

/// Throws if a rename would replace something other than a regular file: a process reads what is
/// written there, and would find a file the next time. Returns the path.
std::string check_replaceable(std::string path) {
  struct stat there {};
  if (::stat(path.c_str(), &there) != 0 || S_ISREG(there.st_mode)) return path;
  if (S_ISDIR(there.st_mode)) fail("write", path, EISDIR);
  fail("replace what is no regular file:", path, ENOTSUP);
}

/// Never opens an existing file, nor the target of a link.
UniqueFd make(const std::string& part, mode_t mode) {
  ::unlink(part.c_str());
  UniqueFd fd(::open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode));
  if (!fd) fail("open", part);
  return fd;
}

void bring_to_disk(int fd, const std::string& path) {
  if (::fsync(fd) != 0) fail("fsync", path);
}

}  // namespace

WholeFile::WholeFile(std::string path, mode_t mode)
    : path_(check_replaceable(std::move(path))), part_(path_ + ".part"), fd_(make(part_, mode)) {}

WholeFile::~WholeFile() {
  if (!is_committed_) ::unlink(part_.c_str());
}

void WholeFile::write(std::string_view bytes) {
  if (exceeds_file_limit(n_bytes_ + bytes.size())) fail("write", part_, EFBIG);
  n_bytes_ += bytes.size();
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd(), bytes.data(), bytes.size());
    if (n < 0 && errno != EINTR) fail("write", part_);
    if (n > 0) bytes.remove_prefix(static_cast<std::size_t>(n));
  }
}

void WholeFile::commit() {
  // If two writers violate the contract, the second has replaced this file and is not done.
  struct stat mine {};
  struct stat there {};
  if (::fstat(fd(), &mine) != 0 || ::lstat(part_.c_str(), &there) != 0) fail("stat", part_);
  if (mine.st_ino != there.st_ino) fail("another process is writing", part_, EBUSY);
  check_replaceable(path_);
  if (::rename(part_.c_str(), path_.c_str()) != 0) fail("rename to", path_);
  is_committed_ = true;
}

void WholeFile::commit_to_disk() {
  bring_to_disk(fd(), part_);
  commit();
  // The folder records the rename.
  const std::size_t slash = path_.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  const UniqueFd opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened) fail("open", folder);
  bring_to_disk(opened.get(), folder);
}

}  // namespace lockstep::base
