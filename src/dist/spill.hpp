#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

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

/// Removes a file that this rank made.
class Removal {
 public:
  Removal() = default;
  explicit Removal(std::filesystem::path path) : path_(std::move(path)) {}
  Removal(const Removal&) = delete;
  Removal& operator=(const Removal&) = delete;
  ~Removal() { now(); }
  void of(std::filesystem::path path) { path_ = std::move(path); }
  void now() noexcept {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove(path_, ignored);
    path_.clear();
  }

 private:
  std::filesystem::path path_;
};

}  // namespace lockstep::detail
