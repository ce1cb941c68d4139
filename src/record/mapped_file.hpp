#pragma once

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <memory>

#include "base/file_limit.hpp"

/// Files that a rank maps, so that their contents outlive it.
namespace lockstep::internal {

/// Maps a file that consists of a File; null, with errno, if that fails.
template <class File>
std::shared_ptr<File> map_file(int fd, int protection) {
  void* const memory =
      ::mmap(nullptr, sizeof(File), protection, MAP_SHARED | MAP_NORESERVE, fd, /*offset=*/0);
  if (memory == MAP_FAILED) return nullptr;
  return {static_cast<File*>(memory), [memory](File*) { ::munmap(memory, sizeof(File)); }};
}

/// Reserves a part of the file before its use, so that a full disk causes no SIGBUS. Returns an
/// errno value.
inline int reserve_file(int fd, std::size_t offset, std::size_t n_bytes) noexcept {
  if (base::exceeds_file_limit(offset + n_bytes)) return EFBIG;
  int error_number = 0;
  do {
    error_number = ::posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(n_bytes));
  } while (error_number == EINTR);
  return error_number;
}

}  // namespace lockstep::internal
