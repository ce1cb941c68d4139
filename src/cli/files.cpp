#include "cli/files.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <system_error>

#include "base/atomic_file.hpp"
#include "base/fd.hpp"
#include "cli/subcommands.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

/// 1,024 operations, each with a path and group names, take a hundredth of it.
constexpr std::size_t kMaxBytes = std::size_t{64} << 20U;

constexpr int kMostDepth = 16;

}  // namespace

base::UniqueFd open_regular(std::string_view subcommand, const fs::path& path) {
  // Without O_NONBLOCK, opening a FIFO waits for its writer.
  base::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) {
    reject(subcommand, fmt::format("cannot read '{}': {}", path.string(), std::strerror(errno)));
  }
  if (!S_ISREG(status.st_mode)) {
    reject(subcommand, fmt::format("cannot read '{}': it is not a regular file", path.string()));
  }
  return fd;
}

std::string read_regular(std::string_view subcommand, const fs::path& path) try {
  static_cast<void>(open_regular(subcommand, path));  // says why it cannot
  if (const auto n_bytes = fs::file_size(path); n_bytes > kMaxBytes) {
    reject(subcommand, fmt::format("cannot read '{}': it has {} bytes, expected at most {}",
                                   path.string(), n_bytes, kMaxBytes));
  }
  return base::read_regular_file(path);
} catch (const std::system_error& error) {
  reject(subcommand, fmt::format("cannot read '{}': {}", path.string(), error.code().message()));
}

bool check_depth(int depth, nlohmann::json::parse_event_t /*event*/, nlohmann::json& /*value*/) {
  if (depth <= kMostDepth) return true;
  throw nlohmann::json::other_error::create(
      501, fmt::format("lists and objects are nested more than {} deep", kMostDepth), nullptr);
}

void check_is_replaceable(std::string_view subcommand, const std::string& path) {
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  if (!fs::exists(status) || fs::is_regular_file(status)) return;
  reject(subcommand,
         fs::is_directory(status)
             ? fmt::format("'{}' is a folder; give the name of a file", path)
             : fmt::format(
                   "'{}' is not a regular file, and would be replaced by one; give another name",
                   path));
}

std::string printable(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    // U+0080 to U+009F, which UTF-8 writes as C2 80 to C2 9F, are control characters too.
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0U;
    if (byte == 0xc2 && next >= 0x80 && next <= 0x9f) {
      fmt::format_to(std::back_inserter(result), "\\x{:02x}", next);
      ++i;
    } else if ((byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f) {
      fmt::format_to(std::back_inserter(result), "\\x{:02x}", byte);
    } else {
      result += text[i];
    }
  }
  return result;
}

}  // namespace lockstep::cli
