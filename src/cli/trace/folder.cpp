#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <lockstep/error.hpp>
#include <map>
#include <memory>
#include <span>
#include <tuple>

#include "base/fd.hpp"
#include "base/text.hpp"
#include "base/ticks.hpp"
#include "cli/subcommands.hpp"
#include "cli/trace/trace_data.hpp"
#include "record/mapped_file.hpp"
#include "record/signature.hpp"
#include "record/trace_file.hpp"

namespace lockstep::cli::tracing {
namespace {

namespace fs = std::filesystem;
using internal::TraceEvent;
using internal::TraceFile;

/// Text in a file header, whose content is not trusted.
std::string text_of(std::span<const char> array) { return std::string(base::text_in(array)); }

using Mapping = std::shared_ptr<const TraceFile>;

/// Null if the rank died before its file had a header.
Mapping map(const fs::path& path) {
  const base::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) {
    throw SystemError({.operation = "lockstep trace"}, errno,
                      fmt::format("cannot read '{}'", path.string()));
  }
  if (status.st_size != sizeof(TraceFile)) return nullptr;
  Mapping file = internal::map_file<const TraceFile>(fd.get(), PROT_READ);
  if (!file) {
    throw SystemError({.operation = "lockstep trace"}, errno,
                      fmt::format("cannot map '{}'", path.string()));
  }
  const bool is_complete =
      std::equal(TraceFile::kMagic.begin(), TraceFile::kMagic.end(), file->magic.begin());
  return is_complete ? file : nullptr;
}

struct Found {
  Mapping file;
  int world;
};

/// By world, then by rank.
std::vector<Found> files_in(const std::string& dir, const std::string& clock) {
  std::error_code error;
  std::vector<Mapping> files;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    if (!entry.path().filename().string().starts_with("rank-")) continue;
    if (const Mapping file = map(entry.path())) files.push_back(file);
  }
  if (error)
    reject("lockstep trace", fmt::format("cannot read the folder '{}': {}", dir, error.message()));
  std::sort(files.begin(), files.end(),
            [](const Mapping& a, const Mapping& b) { return a->anchor_ns < b->anchor_ns; });

  // Over some engines a job has no number: there the n-th trace of each rank belongs to one world.
  std::map<std::tuple<int, std::uint32_t, int>, int> worlds;
  std::map<std::tuple<int, int>, int> n_unnumbered;
  std::vector<Found> found;
  for (const Mapping& file : files) {
    if (text_of(file->clock) != clock) {
      reject("lockstep trace",
             fmt::format("rank {} in '{}' was traced on another system, '{}', or before this one "
                         "was booted: run lockstep trace merge there, then merge its output",
                         file->rank, dir, text_of(file->host)));
    }
    const int n_before = file->job == 0 ? n_unnumbered[{file->n_restarts, file->rank}]++ : 0;
    const int world =
        worlds.try_emplace({file->n_restarts, file->job, n_before}, static_cast<int>(worlds.size()))
            .first->second;
    found.push_back({file, world});
  }
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return std::tuple(a.world, a.file->rank) < std::tuple(b.world, b.file->rank);
  });
  return found;
}

std::uint64_t n_kept(const TraceFile& file) {
  return std::min({file.n_events.load(std::memory_order_acquire),
                   file.n_room.load(std::memory_order_acquire),
                   std::uint64_t{TraceFile::kMaxEvents}});
}

Row row_of(const TraceFile& file, int world) {
  // Ranks are at most kWorldPids: rows of different worlds have different pids.
  constexpr int kWorldPids = 1'000'000;
  Row row{.pid = world * kWorldPids + file.rank,
          .rank = file.rank,
          .world = world,
          .n_restarts = file.n_restarts,
          .system_pid = file.pid,
          .host = text_of(file.host)};
  row.n_lost = file.n_events.load(std::memory_order_relaxed) - n_kept(file);
  if (row.n_lost == 0) return row;
  const int error_number = file.error_number.load(std::memory_order_relaxed);
  row.why_lost = error_number != 0 ? std::strerror(error_number)
                                   : fmt::format("a rank's trace holds {}", TraceFile::kMaxEvents);
  return row;
}

Event event_of(const TraceFile& file, const TraceEvent& raw, std::uint32_t row,
               const base::TickScale& scale, Texts& texts) {
  const std::uint64_t end = raw.end.load(std::memory_order_acquire);
  Event event{.start_ns = scale.to_ns(raw.start),
              .end_ns = end != 0 ? scale.to_ns(end) : 0,
              .row = row,
              .thread = raw.thread,
              .name = 0,
              .kind = Event::Kind::region,
              .state = end == 0                ? Event::State::under_way
                       : raw.has_failed.load() ? Event::State::failed
                                               : Event::State::finished};
  if (raw.kind.load(std::memory_order_relaxed) == TraceEvent::Kind::region) {
    event.name = texts.number(text_of(raw.text));
    return event;
  }
  const TraceEvent::CallPart& call = raw.call;
  const Op op = internal::op_of(call.signature);
  const auto& group = file.groups[std::min<std::size_t>(call.group, file.groups.size() - 1)];
  const auto& site = file.sites[std::min<std::size_t>(call.site, file.sites.size() - 1)];
  event.kind = call.collective != 0 ? Event::Kind::collective : Event::Kind::message;
  event.name = texts.number(lockstep::name_of(op));
  event.group = texts.number(text_of(group));
  event.where = texts.number(text_of(site));
  event.sequence = call.sequence;
  event.collective = call.collective;
  if (internal::moves_data(op)) {
    const DType dtype = internal::dtype_of(call.signature);
    event.type = texts.number(lockstep::name_of(dtype));
    event.n_bytes = call.count * size_of(dtype);
  }
  if (internal::has_root(op)) event.root = internal::root_of(call.signature);
  return event;
}

}  // namespace

Trace read_folder(const std::string& dir) {
  Trace trace;
  trace.clock = internal::name_of_clock();
  const std::vector<Found> files = files_in(dir, trace.clock);
  const base::TickAnchor now = base::now();
  trace.wall_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                      std::chrono::system_clock::now().time_since_epoch())
                      .count() -
                  now.ns;
  for (const auto& [file, world] : files) {
    const auto row = static_cast<std::uint32_t>(trace.rows.size());
    trace.rows.push_back(row_of(*file, world));
    // One scale for all, which preserves the order of events.
    const TraceFile& first = *files.front().file;
    const base::TickScale scale({first.anchor_ticks, first.anchor_ns}, now);
    for (const TraceEvent& event : std::span(file->events).first(n_kept(*file))) {
      switch (event.kind.load(std::memory_order_acquire)) {
        case TraceEvent::Kind::none: break;  // the thread died while writing it
        case TraceEvent::Kind::thread:
          trace.threads.push_back({row, event.thread, text_of(event.text)});
          break;
        case TraceEvent::Kind::call:
        case TraceEvent::Kind::region:
          trace.events.push_back(event_of(*file, event, row, scale, trace.texts));
          break;
      }
    }
  }
  return trace;
}

}  // namespace lockstep::cli::tracing
