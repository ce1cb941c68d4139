#include "dist/spill.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <lockstep/error.hpp>

namespace lockstep::detail {
namespace {

[[noreturn]] void fail(const std::string& text) {
  throw SystemError({.operation = "collect_results"}, errno, text);
}

base::UniqueFd open_file(const std::filesystem::path& path, int flags, std::string_view action) {
  base::UniqueFd fd(::open(path.c_str(), flags | O_CLOEXEC, 0600));
  if (!fd) {
    fail(
        fmt::format("cannot {} {}; tmpdir must be a directory that exists, that you may write to "
                    "and that all ranks see",
                    action, path.native()));
  }
  return fd;
}

}  // namespace

SpillFile SpillFile::create(const std::filesystem::path& path) {
  return {open_file(path, O_WRONLY | O_CREAT | O_EXCL, "make"), path.native()};
}

SpillFile SpillFile::open(const std::filesystem::path& path) {
  return {open_file(path, O_RDONLY, "open"), path.native()};
}

void SpillFile::write(const void* data, std::size_t n_bytes) {
  const auto* from = static_cast<const char*>(data);
  while (n_bytes > 0) {
    const ssize_t n = ::write(fd_.get(), from, n_bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      fail(fmt::format("cannot write {}; free space there, or give another tmpdir", path_));
    }
    from += n;
    n_bytes -= static_cast<std::size_t>(n);
  }
}

bool SpillFile::read(void* data, std::size_t n_bytes) {
  auto* to = static_cast<char*>(data);
  while (n_bytes > 0) {
    const ssize_t n = ::read(fd_.get(), to, n_bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(fmt::format("cannot read {}", path_));
    if (n == 0) return false;
    to += n;
    n_bytes -= static_cast<std::size_t>(n);
  }
  return true;
}

}  // namespace lockstep::detail
