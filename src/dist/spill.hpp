#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.hpp"

namespace lockstep::detail {

/// A file on one rank's way to another. Throws lockstep::SystemError.
class SpillFile {
 public:
  /// A new file, which must not exist, readable by this user only.
  static SpillFile create(const std::filesystem::path& path);
  static SpillFile open(const std::filesystem::path& path);

  void write(const void* data, std::size_t n_bytes);
  /// Throws std::runtime_error where the file ends before.
  void read(void* data, std::size_t n_bytes);

 private:
  SpillFile(base::UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  base::UniqueFd fd_;
  std::string path_;
};

/// Removes the files of all ranks, those of ranks that were killed too.
class Removal {
 public:
  explicit Removal(std::vector<std::filesystem::path> paths) : paths_(std::move(paths)) {}
  Removal(const Removal&) = delete;
  Removal& operator=(const Removal&) = delete;
  ~Removal() { now(); }
  void now() noexcept {
    std::error_code ignored;
    for (const auto& path : paths_) std::filesystem::remove(path, ignored);
    paths_.clear();
  }

 private:
  std::vector<std::filesystem::path> paths_;
};

}  // namespace lockstep::detail
