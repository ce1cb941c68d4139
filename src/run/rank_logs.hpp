#pragma once

#include <filesystem>
#include <vector>

#include "base/fd.hpp"

namespace lockstep::run {

struct RankLogs {
  base::UniqueFd stdout_log;
  base::UniqueFd stderr_log;
};

/// Creates the folder if missing, and in it rank-R.out and rank-R.err for each rank, or
/// rank-R.restart-K.out and .err for the K-th restart. Throws UsageError, before it creates any, if
/// one of them exists; SystemError.
std::vector<RankLogs> open_rank_logs(const std::filesystem::path& folder, int first_rank,
                                     int n_ranks, int n_restarts);

/// The same files of one rank again, to which its replacement appends. Throws SystemError.
RankLogs append_to_rank_logs(const std::filesystem::path& folder, int rank, int n_restarts);

}  // namespace lockstep::run
