#include "run/rank_logs.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <string>
#include <string_view>
#include <system_error>

#include "run/errors.hpp"

namespace lockstep::run {
namespace {

namespace fs = std::filesystem;

fs::path log_path(const fs::path& folder, int rank, int n_restarts, std::string_view extension) {
  const std::string restart = n_restarts == 0 ? "" : fmt::format(".restart-{}", n_restarts);
  return folder / fmt::format("rank-{}{}.{}", rank, restart, extension);
}

base::UniqueFd open_log(const fs::path& path, int flags) {
  base::UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0666));
  if (!fd) throw system_error(fmt::format("--log-dir: cannot make '{}'", path.string()));
  return fd;
}

RankLogs open_logs(const fs::path& folder, int rank, int n_restarts, int flags) {
  return {open_log(log_path(folder, rank, n_restarts, "out"), flags),
          open_log(log_path(folder, rank, n_restarts, "err"), flags)};
}

}  // namespace

std::vector<RankLogs> open_rank_logs(const fs::path& folder, int first_rank, int n_ranks,
                                     int n_restarts) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    errno = error.value();
    throw system_error(fmt::format("--log-dir: cannot make the folder '{}'", folder.string()));
  }
  for (int rank = first_rank; rank < first_rank + n_ranks; ++rank) {
    for (const std::string_view extension : {"out", "err"}) {
      const fs::path path = log_path(folder, rank, n_restarts, extension);
      if (fs::exists(path, error)) {
        throw usage_error(
            fmt::format("--log-dir: '{}' already exists, from an earlier run; name another folder, "
                        "or remove it",
                        path.string()));
      }
    }
  }
  std::vector<RankLogs> logs;
  for (int rank = first_rank; rank < first_rank + n_ranks; ++rank) {
    logs.push_back(open_logs(folder, rank, n_restarts, O_EXCL));
  }
  return logs;
}

RankLogs append_to_rank_logs(const fs::path& folder, int rank, int n_restarts) {
  return open_logs(folder, rank, n_restarts, O_APPEND);
}

}  // namespace lockstep::run
