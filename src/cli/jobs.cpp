#include "cli/jobs.hpp"
#include "cli/subcommands.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <lockstep/error.hpp>
#include <map>
#include <optional>
#include <utility>

#include "base/fd.hpp"
#include "base/number.hpp"
#include "base/version.hpp"
#include "engines/shared/segment/layout.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMemory = "/memfd:lockstep (deleted)";

/// A process that holds a segment open.
struct Holder {
  pid_t pid;
  std::string memory;
  ino_t inode;
  std::uint64_t job;         ///< the same in all segments of a job
  std::uint32_t generation;  ///< of an elastic world, which has a segment for each
  bool has_ranks;            ///< see RunningJob
};

/// torch.distributed's ranks meet in memory of their own: in that of `lockstep run` there are none,
/// or those that have left a world of lockstep's before.
bool has_ranks(int fd, int n_ranks) {
  for (int r = 0; r < n_ranks; ++r) {
    auto state = shared::RankState::absent;
    const std::size_t at = sizeof(shared::SegmentHeader) +
                           static_cast<std::size_t>(r) * sizeof(shared::RankBlock) +
                           offsetof(shared::RankBlock, state);
    if (::pread(fd, &state, sizeof state, static_cast<off_t>(at)) == sizeof state &&
        state != shared::RankState::absent && state != shared::RankState::left) {
      return true;
    }
  }
  return false;
}

/// Reads what the segment says of itself, if it is of this version: another one is its own job.
void identify(Holder& holder) {
  const base::UniqueFd fd(::open(holder.memory.c_str(), O_RDONLY | O_CLOEXEC));
  alignas(shared::SegmentHeader) std::array<std::byte, sizeof(shared::SegmentHeader)> bytes;
  if (!fd ||
      ::pread(fd.get(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    return;
  }
  const auto& header = *reinterpret_cast<const shared::SegmentHeader*>(bytes.data());
  if (header.magic != shared::kMagic || header.version != base::layout_version()) return;
  holder.job = header.nonce;
  holder.generation = header.generation;
  holder.has_ranks = has_ranks(fd.get(), header.n_ranks);
}

/// With the newest generation of a job whose segments this process holds open. A replacement that
/// has not joined yet holds the segment of the generation in which it was started.
std::optional<Holder> holder(pid_t pid) {
  std::optional<Holder> newest;
  std::error_code error;
  for (fs::directory_iterator i(fmt::format("/proc/{}/fd", pid), error), end; !error && i != end;
       i.increment(error)) {
    std::error_code gone;
    if (fs::read_symlink(i->path(), gone) != kMemory || gone) continue;
    struct stat status {};
    if (::stat(i->path().c_str(), &status) != 0) continue;
    Holder found{.pid = pid,
                 .memory = i->path().string(),
                 .inode = status.st_ino,
                 .job = status.st_ino,
                 .generation = 0,
                 .has_ranks = true};
    identify(found);
    const bool is_newer =
        newest && found.job == newest->job && found.generation > newest->generation;
    if (!newest || is_newer ||
        (found.job != newest->job && found.has_ranks && !newest->has_ranks)) {
      newest = std::move(found);
    }
  }
  return newest;
}

pid_t parent_of(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t name_end = text.rfind(')');
  int parent = 0;
  if (name_end == std::string::npos ||
      std::sscanf(text.c_str() + name_end + 1, " %*c %d", &parent) != 1) {
    return 0;
  }
  return parent;
}

std::string command_of(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/cmdline", pid), std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  while (!text.empty() && text.back() == '\0') text.pop_back();
  // A command line may contain control characters, which a terminal would interpret.
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return std::iscntrl(c) != 0; }, ' ');
  return text;
}

/// Finds the launcher: the topmost ancestor that has a segment of the same job open, the newest if
/// the world is elastic.
RunningJob job_of(Holder found) {
  while (true) {
    const pid_t parent = parent_of(found.pid);
    const auto above = parent > 1 ? holder(parent) : std::nullopt;
    if (!above || above->job != found.job) break;
    found = *above;
  }
  return RunningJob{.job = found.job,
                    .launcher = found.pid,
                    .command = command_of(found.pid),
                    .memory = found.memory,
                    .inode = found.inode,
                    .has_ranks = found.has_ranks};
}

bool is_ancestor(pid_t ancestor, pid_t pid) {
  while (pid > 1 && pid != ancestor) pid = parent_of(pid);
  return pid == ancestor;
}

/// The job of its ranks, if none of them is in the memory of their launcher.
const RunningJob* job_within(const RunningJob& job, const std::vector<RunningJob>& jobs) {
  const auto found = std::ranges::find_if(jobs, [&](const RunningJob& other) {
    return other.has_ranks && is_ancestor(job.launcher, other.launcher);
  });
  return found == jobs.end() ? nullptr : &*found;
}

}  // namespace

std::vector<RunningJob> find_jobs() {
  // Ranks started without `lockstep run` have no common launcher: the first one represents all.
  std::map<std::uint64_t, RunningJob> jobs;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    const auto pid = base::parse_number<pid_t>(entry.path().filename().string());
    struct stat status {};
    if (!pid || *pid <= 0 || ::stat(entry.path().c_str(), &status) != 0 ||
        status.st_uid != ::geteuid()) {
      continue;
    }
    const auto found = holder(*pid);
    if (!found) continue;
    RunningJob job = job_of(*found);
    const auto known = jobs.find(job.job);
    if (known == jobs.end() || job.launcher < known->second.launcher) {
      jobs.insert_or_assign(job.job, std::move(job));
    }
  }
  std::vector<RunningJob> result;
  for (auto& [number, job] : jobs) result.push_back(std::move(job));
  const std::vector<RunningJob> all = result;
  std::erase_if(result, [&](const RunningJob& job) {
    return !job.has_ranks && job_within(job, all) != nullptr;
  });
  std::sort(result.begin(), result.end(),
            [](const auto& a, const auto& b) { return a.launcher < b.launcher; });
  return result;
}

RunningJob find_job(pid_t process) {
  struct stat status {};
  const std::string folder = fmt::format("/proc/{}", process);
  if (::stat(folder.c_str(), &status) != 0) {
    reject("lockstep top",
           fmt::format("there is no process {}; lockstep top without a number lists the jobs",
                       process));
  }
  if (status.st_uid != ::geteuid()) {
    reject("lockstep top",
           fmt::format("process {} belongs to user {}, you are user {}; a job is shown to its own "
                       "user only",
                       process, status.st_uid, ::geteuid()));
  }
  const auto found = holder(process);
  if (!found) {
    reject("lockstep top",
           fmt::format("process {} belongs to no running job over shared memory; lockstep top "
                       "without a number lists the jobs",
                       process));
  }
  RunningJob job = job_of(*found);
  if (job.has_ranks) return job;
  const std::vector<RunningJob> jobs = find_jobs();
  const RunningJob* const within = job_within(job, jobs);
  return within != nullptr ? *within : job;
}

std::shared_ptr<const shared::Segment> open_segment(const RunningJob& job) {
  base::UniqueFd fd(::open(job.memory.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) {
    reject("lockstep top",
           fmt::format("cannot inspect job {}: {}", job.launcher, std::strerror(errno)));
  }
  return shared::Segment::attach_read_only(std::move(fd));
}

}  // namespace lockstep::cli
