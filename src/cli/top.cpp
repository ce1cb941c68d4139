#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <lockstep/error.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/plural.hpp"
#include "base/ticks.hpp"
#include "cli/files.hpp"
#include "cli/job_state.hpp"
#include "cli/jobs.hpp"
#include "cli/parse.hpp"
#include "cli/subcommands.hpp"
#include "record/signature.hpp"

namespace lockstep::cli {
namespace {

using nlohmann::json;

constexpr const char* kTopFooter =
    R"(JOB is the process number of `lockstep run`, or of any rank. Shows jobs over the shared engine.

Shows, for each rank: its process and state, processor time, memory, operations
and bytes per second, and its activity: the current operation, its source line,
its duration and the ranks that it waits for, or else the last operation. The
job is not disturbed. Ends with the job, or with Ctrl-C.

Exit code: 0. 2: there is no such job, or it is not yours.)";

// --- output -----------------------------------------------------------------------------------

std::string describe(const shared::Segment& segment, const RankSample& row,
                     const internal::Operation& operation) {
  std::string text = fmt::format("{} #{}", name_of(operation.op), operation.sequence);
  const std::string_view group = group_of(segment, row, operation);
  if (group != "world") text += fmt::format(" on {}", group);
  if (internal::moves_data(operation.op)) {
    text += fmt::format(", {} {}", operation.count, name_of(operation.dtype));
  }
  return text + fmt::format(", {}", operation.where);
}

/// Whether a process's timestamps are comparable to ours: each time namespace has its own clock.
bool has_our_clock(pid_t pid) {
  std::error_code error;
  const auto ours = std::filesystem::read_symlink("/proc/self/ns/time", error);
  if (error) return true;  // a kernel without time namespaces
  const auto other = std::filesystem::read_symlink(fmt::format("/proc/{}/ns/time", pid), error);
  return error || ours == other;
}

double seconds_since(std::int64_t ns) {
  return static_cast<double>(std::max<std::int64_t>(base::now().ns - ns, 0)) * 1e-9;
}

std::string duration_text(const RankSample& row, std::int64_t ns) {
  return has_our_clock(row.pid) ? fmt::format(" for {:.1f} s", seconds_since(ns)) : "";
}

std::string activity_text(const shared::Segment& segment, const RankSample& row) {
  if (row.current != nullptr) {
    std::string text = describe(segment, row, *row.current);
    text += duration_text(row, row.current->start_ns);
    if (!row.waits_for.empty()) {
      constexpr std::size_t kShown = 4;
      const std::size_t n = std::min(row.waits_for.size(), kShown);
      text += fmt::format(
          ", waits for {}{}",
          fmt::join(row.waits_for.begin(), row.waits_for.begin() + static_cast<std::ptrdiff_t>(n),
                    ", "),
          row.waits_for.size() > n ? fmt::format(" and {} more", row.waits_for.size() - n) : "");
    }
    return text;
  }
  if (row.operations.empty()) return "no call yet";
  const internal::Operation& last = row.operations.back();
  if (last.state == internal::Operation::State::failed) {  // when is not recorded
    return fmt::format("idle; last: {} (failed)", describe(segment, row, last));
  }
  return fmt::format("idle{}; last: {}", duration_text(row, last.end_ns),
                     describe(segment, row, last));
}

std::string in_units(double bytes) {
  constexpr std::array kUnits = {"B", "kB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  while (bytes >= 1000 && unit + 1 < kUnits.size()) {
    bytes /= 1000;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 1, kUnits[unit]);
}

/// On a narrow terminal without memory and rates, which leave no room for the call.
std::vector<std::string> table(const RunningJob& job, const shared::Segment& segment,
                               const JobSample& sample, std::size_t columns) {
  constexpr std::size_t kWide = 120;
  const bool is_wide = columns >= kWide;
  std::vector<std::string> lines = {
      fmt::format("job {}: {} rank{}{}: {}", job.launcher, segment.n_ranks(),
                  base::plural(segment.n_ranks()),
                  segment.header().is_elastic
                      ? fmt::format(", generation {}", segment.header().generation)
                      : "",
                  job.command),
      fmt::format("{:>4}  {:>7}  {:<8}  {:>5}  {}activity", "rank", "pid", "state", "cpu",
                  is_wide ? "   memory      ops/s        bytes  " : "")};
  for (const RankSample& row : sample.rows) {
    const std::string amounts = is_wide
                                    ? fmt::format("{:>9}  {:>9.0f}  {:>9}/s  ",
                                                  in_units(static_cast<double>(row.memory_bytes)),
                                                  row.calls_per_s, in_units(row.bytes_per_s))
                                    : "";
    lines.push_back(fmt::format("{:>4}  {:>7}  {:<8}  {:>4.0f}%  {}{}", row.rank, row.pid,
                                row.state, row.cpu_percent, amounts, activity_text(segment, row)));
  }
  return lines;
}

json json_of(const shared::Segment& segment, const RankSample& row,
             const internal::Operation& operation) {
  json result = {{"operation", name_of(operation.op)},
                 {"group", group_of(segment, row, operation)},
                 {"sequence", operation.sequence},
                 {"where", operation.where},
                 {"bytes", operation.n_bytes},
                 {"failed", operation.state == internal::Operation::State::failed}};
  const bool is_finished = operation.state == internal::Operation::State::finished;
  result["seconds"] = nullptr;
  if (has_our_clock(row.pid)) {
    result["seconds"] = seconds_since(is_finished ? operation.end_ns : operation.start_ns);
  }
  return result;
}

json json_of(const RunningJob& job, const shared::Segment& segment, const JobSample& sample) {
  json ranks = json::array();
  for (const RankSample& row : sample.rows) {
    json entry = {{"rank", row.rank},
                  {"pid", row.pid},
                  {"state", row.state},
                  {"cpu_percent", row.cpu_percent},
                  {"memory_bytes", row.memory_bytes},
                  {"operations_per_s", row.calls_per_s},
                  {"bytes_per_s", row.bytes_per_s},
                  {"waits_for", row.waits_for},
                  {"current", nullptr},
                  {"last", nullptr}};
    if (row.current != nullptr) {
      entry["current"] = json_of(segment, row, *row.current);
    } else if (!row.operations.empty()) {
      entry["last"] = json_of(segment, row, row.operations.back());
    }
    ranks.push_back(std::move(entry));
  }
  json result = {{"job", job.launcher},
                 {"command", job.command},
                 {"generation", nullptr},
                 {"ranks", std::move(ranks)}};
  if (segment.header().is_elastic) result["generation"] = segment.header().generation;
  return result;
}

struct TerminalSize {
  std::size_t rows;
  std::size_t columns;
};

TerminalSize terminal_size() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0 || size.ws_col == 0) {
    return {.rows = 24, .columns = 80};
  }
  return {.rows = size.ws_row, .columns = size.ws_col};
}

/// Redraws over the previous output.
class Screen {
 public:
  void draw(std::vector<std::string> lines) {
    const TerminalSize size = terminal_size();
    const std::size_t most = std::max<std::size_t>(size.rows, 4) - 2;
    if (lines.size() > most) {
      const std::size_t n_hidden = lines.size() - most + 1;
      lines.resize(most - 1);
      lines.push_back(fmt::format("... and {} more", n_hidden));
    }
    std::string text = n_drawn_ > 0 ? fmt::format("\x1b[{}A", n_drawn_) : "";
    for (const std::string& line : lines) {
      text += printable(line).substr(0, size.columns - 1);
      text += "\x1b[K\n";
    }
    text += "\x1b[J";
    fmt::print("{}", text);
    std::fflush(stdout);
    n_drawn_ = lines.size();
  }

 private:
  std::size_t n_drawn_ = 0;
};

// --- the subcommand ---------------------------------------------------------------------------

std::optional<RunningJob> choose(const std::vector<RunningJob>& jobs) {
  if (jobs.size() == 1) return jobs.front();
  if (jobs.empty()) {
    fmt::print(stderr,
               "lockstep top: you have no running job over shared memory on this machine\n");
    return std::nullopt;
  }
  fmt::print(stderr, "lockstep top: {} jobs are running; choose one:\n", jobs.size());
  for (const RunningJob& job : jobs) {
    fmt::print(stderr, "  lockstep top {}    {}\n", job.launcher, job.command);
  }
  return std::nullopt;
}

/// The current job, or nullopt after its end. During a restart (--max-restarts) the launcher
/// briefly has no segment open.
std::optional<RunningJob> still_running(const RunningJob& job) {
  for (int i = 0; i < 5; ++i) {
    try {
      return find_job(job.launcher);
    } catch (const UsageError&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  return std::nullopt;
}

}  // namespace

int top(const std::vector<std::string>& arguments) {
  pid_t process = 0;
  double interval_s = 1;
  bool is_once = false;
  bool is_json = false;
  CLI::App app("Shows what each rank of a running job of yours is doing.", "lockstep top");
  app.set_help_flag("-h,--help", "Print this help");
  app.footer(kTopFooter);
  app.add_option("JOB", process, "Job to show; optional if only one is running")
      ->check(number<pid_t>(1, INT32_MAX, "a process number"))
      ->type_name("");
  app.add_flag("--once", is_once, "Print one table and end; the default without a terminal");
  app.add_flag("--json", is_json, "As JSON; implies --once");
  app.add_option("--interval", interval_s, "Time between updates (default 1)")
      ->check(CLI::Range(0.05, 3600.0))
      ->type_name("SECONDS");
  if (const auto exit_code = parse(app, arguments)) return *exit_code;
  is_once = is_once || is_json || ::isatty(STDOUT_FILENO) == 0;

  std::optional<RunningJob> job = process != 0 ? find_job(process) : choose(find_jobs());
  if (!job) return kUsageExitCode;
  auto segment = open_segment(*job);
  std::optional<JobSample> sample = sample_job(*segment, std::nullopt);
  Screen screen;
  while (true) {
    // Rates need two samples.
    constexpr double kFirst = 0.2;
    std::this_thread::sleep_for(
        std::chrono::duration<double>(is_once ? std::min(kFirst, interval_s) : interval_s));
    if (!is_once) {
      const ino_t inode = job->inode;
      const pid_t launcher = job->launcher;
      job = still_running(*job);
      if (!job) {
        fmt::print("job {} has ended\n", launcher);
        return 0;
      }
      if (job->inode != inode) {
        segment = open_segment(*job);
        sample.reset();
      }
    }
    sample = sample_job(*segment, sample);
    if (is_json) {
      fmt::print("{}\n", json_of(*job, *segment, *sample)
                             .dump(/*indent=*/1, ' ', /*ensure_ascii=*/false,
                                   json::error_handler_t::replace));
    } else if (is_once) {
      for (const std::string& line : table(*job, *segment, *sample, std::string::npos)) {
        fmt::print("{}\n", printable(line));
      }
    } else {
      screen.draw(table(*job, *segment, *sample, terminal_size().columns));
    }
    if (is_once) return 0;
  }
}

}  // namespace lockstep::cli
