#include "faults/campaign_judge.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <regex>
#include <sstream>
#include <vector>

#include "support/levels.hpp"

namespace lockstep::test {
namespace {

/// As faulty_rank's deadline.
constexpr double kDeadlineSeconds = 2.0;
const std::regex kLate(R"(waited [0-9.]+ s for ranks? ([0-9, ]+) of )");
const std::regex kKilled(R"(rank (\d+) (is gone: |died \(|was killed by signal 9))");

struct Report {
  std::string error;
  long long at_ns = 0;
  std::string text;
};

std::optional<Report> read_report(const std::string& path) {
  const std::string text = contents_of(path);
  const std::size_t first = text.find('\n');
  if (first == std::string::npos) return std::nullopt;
  const std::size_t second = text.find('\n', first + 1);
  return Report{text.substr(0, first), std::atoll(text.c_str() + first + 1),
                text.substr(second + 1)};
}

/// What a rank of a training has printed: the class of its error only by the words of the text.
std::optional<Report> read_printed(const std::string& folder, int rank, long long fault_ns) {
  namespace fs = std::filesystem;
  const std::string path = fmt::format("{}/error-{}", folder, rank);
  const std::string text = contents_of(path);
  if (text.empty()) return std::nullopt;
  const bool is_late = std::regex_search(text, kLate);
  const bool is_lost = std::regex_search(text, kKilled);
  Report report{is_late ? "TimeoutError" : is_lost ? "PeerLost" : "another error", 0, text};
  if (fault_ns == 0) return report;
  const std::chrono::nanoseconds since_fault =
      fs::last_write_time(path) - fs::last_write_time(folder + "/fault");
  report.at_ns = fault_ns + since_fault.count();
  return report;
}

std::vector<int> ranks_in(const std::string& list) {
  std::vector<int> ranks;
  std::istringstream numbers(list);
  for (std::string number; std::getline(numbers, number, ',');) ranks.push_back(std::stoi(number));
  return ranks;
}

/// Whether the text blames ranks of the other machine, and no other rank.
bool blames_other_machine(const Trial& trial, int rank, const std::string& text) {
  const LevelWords words = innermost_level(text, trial.n_ranks);
  std::smatch match;
  if (!std::regex_search(words.text, match, kLate)) return false;
  return std::ranges::all_of(ranks_in(match[1].str()), [&](int shown) {
    const auto i = static_cast<std::size_t>(shown);
    return i < words.ranks.size() && words.ranks[i] / 2 != rank / 2;
  });
}

/// Whether the text blames the victim, and no other rank.
bool blames_victim(const Trial& trial, const std::string& text) {
  const LevelWords words = innermost_level(text, trial.n_ranks);
  std::smatch match;
  // A training prints more than the error.
  const std::regex gone = trial.engine.trains() ? kKilled : std::regex(R"(rank (\d+) )");
  const bool is_late = std::regex_search(words.text, match, kLate);
  if (!is_late && !std::regex_search(words.text, match, gone)) return false;
  std::vector<int> blamed;
  for (const int shown : ranks_in(match[1].str())) {
    const auto rank = static_cast<std::size_t>(shown);
    if (rank >= words.ranks.size()) return false;
    blamed.push_back(words.ranks[rank]);
  }
  // Engines that pass messages make a large call in steps: a rank that stops in the middle keeps
  // others from theirs, and ranks that wait for those too name them as well.
  const bool is_inside = trial.place == "in" || trial.place.starts_with("step-");
  const bool is_by_steps = trial.engine.trains() || (trial.engine.backend != "shared" && is_inside);
  return is_by_steps ? std::find(blamed.begin(), blamed.end(), trial.victim) != blamed.end()
                     : blamed == std::vector{trial.victim};
}

/// The table's row of a rank.
std::string row_of(int rank, const std::string& table) {
  std::smatch match;
  const std::regex row(fmt::format(R"(\n  {}  +([^\n]*))", rank));
  return std::regex_search(table, match, row) ? match[1].str() : "";
}

/// Empty, or what is wrong with the table of a mismatch.
std::string check_table(const Trial& trial, const std::string& text) {
  const bool is_large = trial.place == "in";
  const std::map<std::string, std::string> wrong = {
      {"op", "broadcast"},    {"count", is_large ? "262143" : "f64   3 "},
      {"type", "i64"},        {"root", "  1  "},
      {"missing", "barrier"}, {"refuse", "refused broadcast #"}};
  const std::string operation = trial.wrong_operation();
  const std::string fragment = operation.empty() ? wrong.at(trial.fault) : operation + " ";
  const LevelWords words = innermost_level(text, trial.n_ranks);
  const auto at = std::find(words.ranks.begin(), words.ranks.end(), trial.victim);
  const int shown = static_cast<int>(at - words.ranks.begin());
  const std::string row = row_of(shown, words.text);
  if (row.find(fragment) == std::string::npos) {
    return fmt::format("row of rank {} lacks '{}': '{}'", shown, fragment, row);
  }
  if (row.find("faulty_rank.cpp:") == std::string::npos) return "no source line in the table";
  return {};
}

/// Whether a rank may have got this where an allocation of the victim failed, or none did. Behind
/// the last message of a call the others go on, and the victim calls barrier, or leaves.
bool check_memory(const Trial& trial, int rank, const Report& report) {
  if (report.error == "none" || rank == trial.victim) return true;
  if (report.error == "PeerFailed" || report.error == "SystemError" || report.error == "PeerLost") {
    return blames_victim(trial, report.text);
  }
  const std::string row = row_of(trial.victim, report.text);
  return report.error == "MismatchError" && (contains(row, "refused ") || contains(row, "barrier"));
}

/// Empty, or what is wrong with what `rank` got.
std::string check(const Trial& trial, int rank, const Report& report) {
  const auto is = [&](const char* error) { return report.error == error; };
  const std::string got = fmt::format("rank {} got {}: {}", rank, report.error, report.text);
  if (trial.fault == "alike") return is("none") ? "" : got;
  if (trial.is_any({"op", "count", "type", "root", "missing", "refuse"}) ||
      !trial.wrong_operation().empty()) {
    if (!is("MismatchError")) return got;
    const std::string complaint = check_table(trial, report.text);
    return complaint.empty() ? "" : complaint + "; " + got;
  }
  if (trial.fault == "join") {
    const bool names = contains(report.text, fmt::format("/proc/rank-{}", trial.victim));
    return names && (rank == trial.victim || is("PeerFailed")) ? "" : got;
  }
  if (trial.is_memory()) return check_memory(trial, rank, report) ? "" : got;
  if (trial.fault == "cut") {
    if (!blames_other_machine(trial, rank, report.text)) return "names another: " + got;
    return is("TimeoutError") ? "" : got;
  }
  if (trial.fault == "container") {
    // Over messages the first rank to fail ends the call before of a rank that comes later.
    const bool is_told = trial.engine.backend != "shared" && is("PeerFailed");
    const bool names = contains(report.text, "the container's memory");
    return (is("SystemError") || is_told) && names ? "" : got;
  }
  if (trial.fault == "limit") {
    const bool names = contains(report.text, fmt::format("rank {} ", trial.victim));
    return (is("SystemError") || is("PeerFailed")) && (names || rank == trial.victim) ? "" : got;
  }
  if (!blames_victim(trial, report.text)) return "names another: " + got;
  if (trial.is_any({"stop", "slow"})) return is("TimeoutError") ? "" : got;
  if (trial.fault == "exception") {
    // The peers are notified of a pending asynchronous call before anything can catch the
    // exception.
    const bool has_text =
        contains(report.text, "no more sheets") ||
        (trial.place == "in" && contains(report.text, "because of an exception while an async"));
    return (is("PeerFailed") && has_text) || is("PeerLost") ? "" : got;
  }
  return is("PeerLost") ? "" : got;
}

}  // namespace

Outcome judge(const Trial& trial, const std::string& folder, const Ended& ended) {
  Outcome outcome;
  const long long fault_ns = std::atoll(contents_of(folder + "/fault").c_str());
  const auto report_of = [&](int rank) {
    return trial.engine.trains() ? read_printed(folder, rank, fault_ns)
                                 : read_report(fmt::format("{}/{}", folder, rank));
  };
  if (fault_ns == 0) {
    outcome.complaint = "the fault never came: " + ended.out + ended.err;
    for (int rank = 0; rank < trial.n_ranks; ++rank) {
      const auto report = report_of(rank);
      if (!report) continue;
      outcome.complaint += fmt::format("rank {}: {}: {}\n", rank, report->error, report->text);
    }
    const std::regex too_late("waited [0-9.]+ s for rank|did not join");
    if (trial.engine.trains() && std::regex_search(outcome.complaint, too_late)) {
      return {.complaint = {}, .was_late = true};
    }
    return outcome;
  }
  if (trial.engine.trains() && ended.exit_code == 0) return {.complaint = "the job succeeds"};
  const double deadline_s = trial.timeout_s != 0 ? trial.timeout_s : kDeadlineSeconds;
  const bool is_death = trial.is_any({"kill", "exit", "exception"});
  std::map<bool, int> n_with_error;
  for (int rank = 0; rank < trial.n_ranks; ++rank) {
    if (rank == trial.victim && (is_death || trial.fault == "stop")) continue;
    const auto report = report_of(rank);
    if (!report) {
      // mpirun ends the whole job when a process dies: docs/mpi.md.
      if (trial.engine.is_launched_by_mpi && is_death) {
        outcome.was_aborted = true;
        continue;
      }
      return {.complaint = fmt::format("rank {} says nothing: {}{}", rank, ended.out, ended.err)};
    }
    const std::string complaint = check(trial, rank, *report);
    if (!complaint.empty()) return {.complaint = complaint};
    ++n_with_error[report->error != "none"];
    const double latency = static_cast<double>(report->at_ns - fault_ns) * 1e-9 -
                           (trial.is_any({"stop", "slow", "cut"}) ? deadline_s : 0);
    outcome.latency_s = std::max(outcome.latency_s, latency);
  }
  // If an allocation of the victim failed, all ranks get an error; if none failed, no rank does.
  if (trial.is_memory() && n_with_error[true] != 0 && n_with_error[false] != 0) {
    outcome.complaint = fmt::format("{} ranks got an error and {} none: {}{}", n_with_error[true],
                                    n_with_error[false], ended.out, ended.err);
  }
  return outcome;
}

}  // namespace lockstep::test
