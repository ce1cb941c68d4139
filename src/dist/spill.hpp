#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.hpp"

namespace lockstep::detail {

/// A file written by one rank for another. Throws lockstep::SystemError.
class SpillFile {
 public:
  /// Creates a file, which must not exist, readable by this user only.
  static SpillFile create(const std::filesystem::path& path);
  static SpillFile open(const std::filesystem::path& path);

  void write(const void* data, std::size_t n_bytes);
  /// False if the file is too short.
  [[nodiscard]] bool read(void* data, std::size_t n_bytes);

 private:
  SpillFile(base::UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  base::UniqueFd fd_;
  std::string path_;
};

/// Removes the files of all ranks, including those of killed ranks.
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
