#include "record/flight_record.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <lockstep/error.hpp>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/atomic_file.hpp"
#include "base/text.hpp"
#include "base/ticks.hpp"
#include "record/signature.hpp"

namespace lockstep::internal {
namespace {

/// Paths and texts of peers may contain any byte; JSON is UTF-8.
constexpr auto kReplace = nlohmann::json::error_handler_t::replace;

nlohmann::json json_of(const FlightRecord& record, const Operation& operation) {
  nlohmann::json json = {{"number", operation.number},
                         {"group", name_of(record.groups[operation.group])},
                         {"sequence", operation.sequence},
                         {"operation", name_of(operation.op)},
                         {"where", operation.where}};
  if (moves_data(operation.op)) {
    json["type"] = name_of(operation.dtype);
    json["count"] = operation.count;
    json["bytes"] = operation.n_bytes;
  }
  if (has_root(operation.op)) json["root"] = operation.root;
  if (has_reduction(operation.op)) json["reduction"] = name_of(operation.reduce);
  if (operation.collective != 0) json["collective"] = operation.collective;
  json["start_ns"] = operation.start_ns;
  json["end_ns"] = nullptr;
  switch (operation.state) {
    case Operation::State::under_way: json["state"] = "under way"; break;
    case Operation::State::failed: json["state"] = "failed"; break;
    case Operation::State::finished:
      json["state"] = "finished";
      json["end_ns"] = operation.end_ns;
      break;
  }
  return json;
}

}  // namespace

std::string_view site_of(const FlightRecord& record, std::uint32_t site) noexcept {
  const auto& text = record.sites[std::min<std::size_t>(site, FlightRecord::kMaxSites - 1)];
  return base::text_in(text);
}

std::string_view name_of(const FlightGroup& group) noexcept { return base::text_in(group.name); }

std::size_t n_groups_of(const FlightRecord& record) noexcept {
  return std::min<std::size_t>(record.n_groups.load(std::memory_order_acquire) + 1,
                               FlightRecord::kMaxGroups);
}

std::vector<Operation> operations_of(const FlightRecord& record) {
  return operations_of(record, {.ticks = record.anchor_ticks, .ns = record.anchor_ns});
}

std::vector<Operation> operations_of(const FlightRecord& record, const base::TickAnchor& anchor) {
  const base::TickScale scale(anchor, base::now());
  std::vector<Operation> operations;
  operations.reserve(FlightRecord::kEntries);
  for (const FlightEntry& entry : record.entries) {
    const std::uint32_t complete = entry.complete.load(std::memory_order_acquire);
    const std::uint64_t signature = entry.signature.load(std::memory_order_acquire);
    const std::uint64_t start = entry.start.load(std::memory_order_acquire);
    const std::uint64_t end = entry.end.load(std::memory_order_acquire);
    const std::uint64_t sequence = entry.sequence.load(std::memory_order_acquire);
    const std::uint64_t collective = entry.collective.load(std::memory_order_acquire);
    const std::uint64_t count = entry.count.load(std::memory_order_acquire);
    const std::uint32_t site = entry.site.load(std::memory_order_acquire);
    const std::uint32_t group = entry.group.load(std::memory_order_acquire);
    const std::uint64_t number = entry.begun.load(std::memory_order_relaxed);
    if (number == 0 || static_cast<std::uint32_t>(number) != complete) continue;
    Operation operation{.number = number,
                        .sequence = sequence,
                        .collective = collective,
                        .op = op_of(signature),
                        .dtype = dtype_of(signature),
                        .reduce = reduce_of(signature),
                        .root = root_of(signature),
                        .count = count,
                        .n_bytes = 0,
                        .state = Operation::State::under_way,
                        .has_peer_ended = end == FlightEntry::kPeerEnded,
                        .start_ns = scale.to_ns(start),
                        .end_ns = 0,
                        .group = std::min<std::size_t>(group, FlightRecord::kMaxGroups - 1),
                        .where = site_of(record, site)};
    if (moves_data(operation.op)) operation.n_bytes = operation.count * size_of(operation.dtype);
    if (end == FlightEntry::kFailed || operation.has_peer_ended) {
      operation.state = Operation::State::failed;
    } else if (end != FlightEntry::kUnderWay) {
      operation.state = Operation::State::finished;
      operation.end_ns = scale.to_ns(end == FlightEntry::kShort ? start : end);
    }
    operations.push_back(operation);
  }
  // Groups take numbers in blocks, so across groups only the clock gives the order.
  std::sort(operations.begin(), operations.end(),
            [](const Operation& a, const Operation& b) { return a.number < b.number; });
  std::stable_sort(operations.begin(), operations.end(),
                   [](const auto& a, const auto& b) { return a.start_ns < b.start_ns; });
  return operations;
}

std::string json_of(const FlightRecord& record, std::string_view reason, std::string_view host) {
  nlohmann::json groups = nlohmann::json::array();
  const std::size_t n_groups = n_groups_of(record);
  for (std::size_t i = 1; i < n_groups; ++i) {
    const FlightGroup& group = record.groups[i];
    groups.push_back({{"name", name_of(group)},
                      {"rank", group.rank},
                      {"size", group.size},
                      {"calls", group.n_calls.load(std::memory_order_relaxed)}});
  }
  nlohmann::json operations = nlohmann::json::array();
  for (const Operation& operation : operations_of(record)) {
    operations.push_back(json_of(record, operation));
  }
  nlohmann::json json = {{"lockstep_record", 1},
                         {"job", fmt::format("{:08x}", record.job)},
                         {"host", host},
                         {"rank", record.rank},
                         {"world_size", record.world_size},
                         {"pid", record.pid},
                         {"reason", reason},
                         {"written_ns", base::now().ns},
                         {"groups", std::move(groups)},
                         {"operations", std::move(operations)}};
  if (record.generation_plus_one > 0) json["generation"] = record.generation_plus_one - 1;
  return json.dump(/*indent=*/1, ' ', /*ensure_ascii=*/false, kReplace) + "\n";
}

std::string record_file(const FlightRecord& record, const std::string& dir) {
  return fmt::format("{}/rank-{}.json", dir, record.rank);
}

void write_record(const FlightRecord& record, std::string_view reason, const std::string& dir) {
  const std::string path = record_file(record, dir);
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  try {
    base::AtomicFile file(path, /*mode=*/0600);
    file.write(json_of(record, reason, host));
    file.commit();
  } catch (const std::system_error& error) {
    throw SystemError({.operation = "flight record"}, error.code().value(),
                      fmt::format("cannot write '{}' (LOCKSTEP_RECORD_DIR)", path));
  }
}

}  // namespace lockstep::internal
