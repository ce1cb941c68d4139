// Version, lines of source, and the world.
#include <fmt/format.h>
#include <lockstep/lockstep.h>

#include <chrono>
#include <lockstep/error.hpp>
#include <lockstep/world.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "base/version.hpp"
#include "c/handles.hpp"
#include "c/last_error.hpp"

namespace lockstep::c {
namespace {

/// Every line that lockstep_at was called for.
const lockstep_site* find_site(const char* file, int line) {
  struct Last {
    const char* file = nullptr;
    const lockstep_site* site = nullptr;
  };
  // A thread mostly calls from few lines: the last one is found without a lock.
  thread_local Last last;
  const auto number = static_cast<unsigned>(line);
  if (last.file == file && last.site->place.line == number && last.site->file == file) {
    return last.site;
  }
  // Never destroyed: errors and records point there.
  static auto& mutex = *new std::mutex;
  static auto& sites = *new std::map<std::pair<std::string, unsigned>, lockstep_site>;
  const std::lock_guard lock(mutex);
  lockstep_site& site = sites[{file, number}];
  if (site.place.line != number || site.file != file) {
    site.file = file;
    site.place = {.file = site.file.c_str(), .line = number};
  }
  last = {file, &site};
  return &site;
}

Launcher parse_launcher(const char* name, const ErrorContext& context) {
  const std::string_view text = name == nullptr ? "infer" : name;
  const std::pair<std::string_view, Launcher> known[] = {
      {"infer", Launcher::infer},     {"none", Launcher::none},   {"lockstep", Launcher::lockstep},
      {"pytorch", Launcher::pytorch}, {"slurm", Launcher::slurm}, {"mpi", Launcher::mpi},
  };
  for (const auto& [its_name, launcher] : known) {
    if (its_name == text) return launcher;
  }
  throw UsageError(context, fmt::format("launcher '{}' does not exist; use infer, none, lockstep, "
                                        "pytorch, slurm or mpi",
                                        text));
}

void check_result(const void* result, const char* name, const ErrorContext& context) {
  if (result == nullptr) throw UsageError(context, fmt::format("{} is NULL", name));
}

}  // namespace
}  // namespace lockstep::c

using lockstep::ErrorContext;
using lockstep::UsageError;
using lockstep::c::guarded;
using lockstep::c::where_of;

const char* lockstep_version(void) { return lockstep::base::version().data(); }

int lockstep_version_number(void) {
  return LOCKSTEP_VERSION_MAJOR * 10000 + LOCKSTEP_VERSION_MINOR * 100 + LOCKSTEP_VERSION_PATCH;
}

const lockstep_site* lockstep_at(const char* file, int line) {
  if (file == nullptr || line < 0) return nullptr;
  try {
    return lockstep::c::find_site(file, line);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

int lockstep_init(const char* launcher, const char* backend, int64_t timeout_ms,
                  const lockstep_site* site) {
  return guarded("init_dist", [&] {
    const ErrorContext context{.operation = "init_dist", .where = where_of(site)};
    lockstep::InitOptions options{.launcher = lockstep::c::parse_launcher(launcher, context)};
    if (backend != nullptr) options.backend = backend;
    if (timeout_ms != LOCKSTEP_GROUP_TIMEOUT) {
      if (timeout_ms <= 0) {
        throw UsageError(context, fmt::format("timeout_ms is {}; give the limit of one operation "
                                              "in milliseconds, INT64_MAX for none, or "
                                              "LOCKSTEP_GROUP_TIMEOUT for LOCKSTEP_TIMEOUT of the "
                                              "environment, or else 5 minutes",
                                              timeout_ms));
      }
      options.timeout = std::chrono::milliseconds(timeout_ms);
    }
    lockstep::init_dist(options, where_of(site));
  });
}

int lockstep_destroy(const char* failure, const lockstep_site* site) {
  return guarded("destroy_dist", [&] {
    lockstep::destroy_dist(failure == nullptr ? "" : failure, where_of(site));
  });
}

int lockstep_is_distributed(void) { return lockstep::is_distributed() ? 1 : 0; }

int lockstep_world(lockstep_group** group, const lockstep_site* site) {
  return guarded("world", [&] {
    lockstep::c::check_result(group, "group", {.operation = "world", .where = where_of(site)});
    *group = std::make_unique<lockstep_group>(lockstep::default_group(where_of(site))).release();
  });
}

int lockstep_local_group(lockstep_group** group, const lockstep_site* site) {
  return guarded("local_group", [&] {
    lockstep::c::check_result(group, "group",
                              {.operation = "local_group", .where = where_of(site)});
    *group = std::make_unique<lockstep_group>(lockstep::local_group(where_of(site))).release();
  });
}
