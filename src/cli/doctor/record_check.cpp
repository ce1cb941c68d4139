#include "cli/doctor/record_check.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <lockstep/error.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/number.hpp"
#include "base/plural.hpp"
#include "cli/files.hpp"
#include "cli/subcommands.hpp"
#include "record/flight_file.hpp"
#include "record/flight_record.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Operation {
  std::uint64_t number;
  std::uint64_t collective;  ///< 0: send, recv
  std::string group;
  std::string call;  ///< the signature, as text
  std::string where;
  std::string state;  ///< "finished", "failed", "under way"
  int peer;           ///< of send, recv
  std::string name;
  std::int64_t start_ns;
};

struct Record {
  int rank;
  int world_size;
  std::string job;
  std::optional<std::uint32_t> generation;  ///< of an elastic world
  std::string host;
  std::string reason;
  std::map<std::string, int> groups;  ///< by name: this rank's number there
  std::vector<Operation> operations;  ///< oldest first
};

/// The signature, which must be equal on all ranks of a collective.
std::string call_of(const json& operation) {
  const std::string name = operation.at("operation");
  std::string text = name;
  if (operation.contains("type")) {
    const bool may_differ = name == "all_gather" || name == "gather";
    text += may_differ ? fmt::format(" of {}", operation.at("type").get<std::string>())
                       : fmt::format(" of {} {}", operation.at("count").get<std::uint64_t>(),
                                     operation.at("type").get<std::string>());
  }
  if (operation.contains("reduction")) {
    text += fmt::format(", {}", operation.at("reduction").get<std::string>());
  }
  if (operation.contains("root")) text += fmt::format(", root {}", operation.at("root").get<int>());
  return text;
}

Record parse(const json& file) {
  Record record{.rank = file.at("rank"),
                .world_size = file.at("world_size"),
                .job = file.at("job"),
                .generation = {},
                .host = file.at("host"),
                .reason = file.at("reason"),
                .groups = {},
                .operations = {}};
  if (file.contains("generation")) record.generation = file.at("generation").get<std::uint32_t>();
  for (const json& group : file.at("groups")) {
    record.groups[group.at("name")] = group.at("rank");
  }
  for (const json& operation : file.at("operations")) {
    record.operations.push_back({.number = operation.at("number"),
                                 .collective = operation.value("collective", std::uint64_t{0}),
                                 .group = operation.at("group"),
                                 .call = call_of(operation),
                                 .where = operation.at("where"),
                                 .state = operation.at("state"),
                                 .peer = operation.value("root", -1),
                                 .name = operation.at("operation"),
                                 .start_ns = operation.at("start_ns")});
  }
  return record;
}

/// Prints text that may be untrusted.
template <class... Arguments>
void print(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  const std::string text = fmt::format(format, std::forward<Arguments>(arguments)...);
  fmt::print("{}", printable(text));
}

Record record_in(const std::string& text, const fs::path& path, int rank) {
  json file;
  try {
    file = json::parse(text, check_depth);
  } catch (const json::exception& error) {
    reject(
        "lockstep doctor",
        fmt::format("'{}' ({} bytes) is truncated or damaged: {}. Remove it to see the other ranks",
                    path.string(), text.size(), error.what()));
  }
  if (!file.is_object() || !file.contains("lockstep_record")) {
    reject("lockstep doctor", fmt::format("'{}' is not a flight record of lockstep; give the "
                                          "folder that LOCKSTEP_RECORD_DIR named",
                                          path.string()));
  }
  if (file.at("lockstep_record") != 1) {
    reject("lockstep doctor",
           fmt::format("'{}' has format {}, this command reads 1; use the `lockstep` of the "
                       "version that wrote it",
                       path.string(), file.at("lockstep_record").dump()));
  }
  try {
    Record record = parse(file);
    if (record.rank < 0 || record.rank >= record.world_size) {
      reject("lockstep doctor", fmt::format("'{}' is damaged: it is of rank {} of {}",
                                            path.string(), record.rank, record.world_size));
    }
    if (record.rank == rank) return record;
    reject("lockstep doctor", fmt::format("'{}' is the record of rank {}: it was renamed",
                                          path.string(), record.rank));
  } catch (const json::exception& error) {
    reject("lockstep doctor", fmt::format("'{}' is damaged: {}", path.string(), error.what()));
  }
}

/// N of "rank-N" before the ending.
std::optional<int> rank_of(const std::string& name, std::string_view ending) {
  constexpr std::string_view kBefore = "rank-";
  if (!name.starts_with(kBefore) || !name.ends_with(ending)) return std::nullopt;
  const std::string_view digits(name.data() + kBefore.size(),
                                name.size() - ending.size() - kBefore.size());
  const auto rank = base::parse_number<int>(digits);
  return rank >= 0 ? rank : std::nullopt;
}

std::vector<Record> read_all(const std::string& dir) {
  std::error_code error;
  struct Found {
    fs::path path;
    std::string text;
  };
  std::map<int, Found> found;
  std::map<int, fs::path> unread;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    const fs::path& path = entry.path();
    if (const auto killed = rank_of(path.filename(), ".flight")) {
      if (!fs::is_regular_file(path)) continue;
      if (auto text = internal::read_flight_file(path)) {
        found[*killed] = {path, std::move(*text)};
      } else {
        unread[*killed] = path;
      }
    } else if (const auto writer = rank_of(path.filename(), ".json")) {
      // A killed rank's flight file is newer than the JSON of that rank from an earlier job.
      found.try_emplace(*writer, Found{path, read_regular("lockstep doctor", path)});
    }
  }
  if (error)
    reject("lockstep doctor", fmt::format("cannot read the folder '{}': {}", dir, error.message()));
  for (const auto& [rank, path] : unread) {  // of a rank that has written its record itself: none
    if (found.contains(rank)) continue;
    reject("lockstep doctor",
           fmt::format("'{}' is damaged, or another version of lockstep wrote it; remove it to "
                       "read the others",
                       path.string()));
  }
  if (found.empty()) {
    reject("lockstep doctor",
           fmt::format("'{}' holds no rank-N.json. Records are written when a job fails that was "
                       "started with LOCKSTEP_RECORD_DIR={}",
                       dir, dir));
  }
  std::vector<Record> records;
  for (const auto& [rank, file] : found) {
    records.push_back(record_in(file.text, file.path, rank));
    const Record& first = records.front();
    const Record& last = records.back();
    // Generations of an elastic world may differ in size.
    if (last.job != first.job || last.generation.has_value() != first.generation.has_value() ||
        (last.generation == first.generation && last.world_size != first.world_size)) {
      reject("lockstep doctor",
             fmt::format("'{}' is of another job ({}, {} ranks) than rank {}'s record ({}, {} "
                         "ranks); use a separate folder for each job",
                         file.path.string(), last.job, last.world_size, first.rank, first.job,
                         first.world_size));
    }
  }
  return records;
}

std::string ranks_in_words(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

/// Removes the records of all generations but the newest, whose calls the others did not make.
/// Returns a line for each generation removed.
std::string keep_newest_generation(std::vector<Record>& records) {
  const auto newest = std::ranges::max(records, {}, &Record::generation).generation;
  std::map<std::optional<std::uint32_t>, std::vector<int>> earlier;
  for (const Record& record : records) {
    if (record.generation != newest) earlier[record.generation].push_back(record.rank);
  }
  std::erase_if(records, [&](const Record& record) { return record.generation != newest; });
  std::string text;
  for (const auto& [generation, ranks] : earlier) {
    text += fmt::format("Left out, because they are of generation {}: records of {}\n",
                        generation.value_or(0), ranks_in_words(ranks));
  }
  return text;
}

/// The first call of a group that not all ranks made, or that differs between ranks.
struct Divergence {
  std::string group;
  std::uint64_t collective;
  std::map<int, const Operation*> calls;  ///< by index of the record; null: not reached
  std::vector<std::size_t> culprits;      ///< empty: there is no majority
  bool is_missing;
  bool is_refused;  ///< missing, and the rank has made later calls
  std::int64_t start_ns;
};

std::optional<Divergence> divergence_of(const std::vector<Record>& records,
                                        const std::string& group) {
  struct Member {
    std::size_t index;
    std::map<std::uint64_t, const Operation*> calls;
    std::uint64_t first = 0, last = 0;
  };
  std::vector<Member> members;
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (records[i].groups.count(group) == 0) continue;
    Member member{.index = i, .calls = {}};
    for (const Operation& operation : records[i].operations) {
      if (operation.group != group || operation.collective == 0) continue;
      member.calls[operation.collective] = &operation;
      member.last = std::max(member.last, operation.collective);
    }
    // As long as every block of the recorder has an entry at most, none was overwritten.
    constexpr std::size_t kBlocks =
        internal::FlightRecord::kEntries / internal::FlightRecord::kBlock;
    if (records[i].operations.size() >= kBlocks && !member.calls.empty()) {
      member.first = member.calls.begin()->first;
    }
    members.push_back(std::move(member));
  }
  std::set<std::uint64_t> numbers;
  for (const Member& member : members) {
    for (const auto& [number, call] : member.calls) numbers.insert(number);
  }
  for (const std::uint64_t number : numbers) {
    Divergence divergence{.group = group,
                          .collective = number,
                          .calls = {},
                          .culprits = {},
                          .is_missing = false,
                          .is_refused = false,
                          .start_ns = INT64_MAX};
    std::map<std::string, std::vector<std::size_t>> sides;
    std::vector<std::size_t> missing;
    for (const Member& member : members) {
      const auto found = member.calls.find(number);
      if (found == member.calls.end()) {
        // Calls before a rank's oldest entry were overwritten, if any were; one that it refused has
        // a number and no entry.
        if (number < member.first) continue;
        missing.push_back(member.index);
        divergence.calls[static_cast<int>(member.index)] = nullptr;
        divergence.is_refused |= number < member.last;
        continue;
      }
      sides[found->second->call].push_back(member.index);
      divergence.calls[static_cast<int>(member.index)] = found->second;
      divergence.start_ns = std::min(divergence.start_ns, found->second->start_ns);
    }
    if (sides.size() > 1) {
      const auto largest = std::max_element(sides.begin(), sides.end(), [](auto& a, auto& b) {
        return a.second.size() < b.second.size();
      });
      const auto n_largest = std::count_if(sides.begin(), sides.end(), [&](const auto& side) {
        return side.second.size() == largest->second.size();
      });
      for (const auto& [call, ranks] : sides) {
        if (n_largest > 1 || call == largest->first) continue;
        divergence.culprits.insert(divergence.culprits.end(), ranks.begin(), ranks.end());
      }
      std::sort(divergence.culprits.begin(), divergence.culprits.end());
      return divergence;
    }
    if (!missing.empty()) {
      divergence.is_missing = true;
      divergence.culprits = missing;
      return divergence;
    }
  }
  return std::nullopt;
}

/// Ranks not in `present`, which is ascending.
std::string absent_in_words(const std::vector<int>& present, int world_size) {
  constexpr std::size_t kShown = 16;
  std::vector<int> absent;
  auto next = present.begin();
  for (int rank = 0; rank < world_size && absent.size() < kShown; ++rank) {
    if (next != present.end() && *next == rank) {
      ++next;
    } else {
      absent.push_back(rank);
    }
  }
  const auto n_absent = static_cast<std::size_t>(world_size) - present.size();
  if (n_absent == 0) return {};
  std::string text = ranks_in_words(absent);
  if (n_absent > absent.size()) text += fmt::format(" and {} more", n_absent - absent.size());
  return text;
}

std::string last_of(const Record& record) {
  if (record.operations.empty()) return "none";
  const Operation& last = record.operations.back();
  return fmt::format("{} at {} on group '{}' ({})", last.call, last.where, last.group, last.state);
}

void print(const std::vector<Record>& records, const Divergence& divergence) {
  std::vector<int> culprits;
  for (const std::size_t i : divergence.culprits) culprits.push_back(records[i].rank);
  const auto any = std::find_if(divergence.calls.begin(), divergence.calls.end(),
                                [](const auto& call) { return call.second != nullptr; });
  if (divergence.is_missing) {
    print("Culprit: {}, which {} collective {} of group '{}': {}\n", ranks_in_words(culprits),
          divergence.is_refused ? "refused its call of" : "never reached", divergence.collective,
          divergence.group, any->second->call);
  } else if (culprits.empty()) {
    print("The ranks diverge at collective {} of group '{}', without a majority\n",
          divergence.collective, divergence.group);
  } else {
    print("Culprit: {}, which made another call as collective {} of group '{}'\n",
          ranks_in_words(culprits), divergence.collective, divergence.group);
  }
  print("\n  rank  state      where                     call\n");
  for (const auto& [index, call] : divergence.calls) {
    const Record& record = records[static_cast<std::size_t>(index)];
    if (call != nullptr) {
      print("  {:<4}  {:<9}  {:<24}  {}\n", record.rank, call->state, call->where, call->call);
    } else {
      print("  {:<4}  missing    its last: {}\n", record.rank, last_of(record));
    }
  }
}

/// Matching calls from different source lines: correct in a program that branches by rank,
/// otherwise evidence of a rank that is one call ahead.
void print_different_lines(const std::vector<Record>& records, const std::string& group) {
  std::map<std::uint64_t, std::map<std::string, std::vector<int>>> lines;
  for (const Record& record : records) {
    for (const Operation& operation : record.operations) {
      if (operation.group == group && operation.collective != 0) {
        lines[operation.collective][operation.where].push_back(record.rank);
      }
    }
  }
  for (const auto& [number, sides] : lines) {
    if (sides.size() < 2) continue;
    print(
        "\n"
        "The ranks first called from different lines at collective {} of '{}':\n",
        number, group);
    for (const auto& [where, ranks] : sides) print("  {}: {}\n", where, ranks_in_words(ranks));
    return;
  }
}

/// Messages for which one side still waits.
bool print_open_messages(const std::vector<Record>& records) {
  bool is_any = false;
  for (const Record& record : records) {
    for (const Operation& operation : record.operations) {
      if (operation.collective != 0 || operation.state == "finished") continue;
      print("Rank {} waits in {} at {} for rank {} of group '{}', which did not arrive\n",
            record.rank, operation.name, operation.where, operation.peer, operation.group);
      is_any = true;
    }
  }
  return is_any;
}

}  // namespace

int doctor_record(const std::string& dir) {
  std::vector<Record> records = read_all(dir);
  const std::string left_out = keep_newest_generation(records);
  const Record& first = records.front();
  std::vector<int> present;
  std::set<std::string> groups;
  for (const Record& record : records) {
    present.push_back(record.rank);
    for (const auto& [name, rank] : record.groups) groups.insert(name);
  }
  print("Job {} of {} rank{}{} on {}: records of {}\n", first.job, first.world_size,
        base::plural(first.world_size),
        first.generation ? fmt::format(", generation {},", *first.generation) : "", first.host,
        ranks_in_words(present));
  print("{}", left_out);
  const std::string absent = absent_in_words(present, first.world_size);
  if (!absent.empty()) {
    print("No record of {}: still running, or on a host that is gone\n", absent);
  }

  // If several groups diverge, the earliest is the cause and the others are consequences.
  std::optional<Divergence> earliest;
  for (const std::string& group : groups) {
    auto divergence = divergence_of(records, group);
    if (divergence && (!earliest || divergence->start_ns < earliest->start_ns)) {
      earliest = std::move(divergence);
    }
  }
  print("\n");
  if (earliest) {
    print(records, *earliest);
    print_different_lines(records, earliest->group);
  } else if (!print_open_messages(records)) {
    print("The ranks made the same calls, as far as the records go\n");
  }
  print("\nHow each rank ended:\n");
  for (const Record& record : records) {
    print("  rank {}: {}\n          last operation: {}\n", record.rank,
          record.reason.substr(0, record.reason.find('\n')), last_of(record));
  }
  return 0;
}

}  // namespace lockstep::cli
