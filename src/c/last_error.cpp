#include "c/last_error.hpp"

#include <lockstep/lockstep.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <lockstep/error.hpp>
#include <new>
#include <string>
#include <utility>

#include "group/failure.hpp"

namespace lockstep::c {
namespace {

struct LastError {
  int status = LOCKSTEP_OK;
  std::string message;
  std::string text;
  ErrorContext context;
  int error_number = 0;
  bool is_out_of_memory = false;  ///< the strings above are not those of this failure
};

constexpr const char* kNoMemory = "out of memory, also to describe the failure";

LastError& last_error() noexcept {
  thread_local LastError last;
  return last;
}

int status_of(internal::Failure::Kind kind) {
  using enum internal::Failure::Kind;
  switch (kind) {
    case usage: return LOCKSTEP_USAGE_ERROR;
    case mismatch: return LOCKSTEP_MISMATCH_ERROR;
    case timeout: return LOCKSTEP_TIMEOUT_ERROR;
    case peer_lost:
    case peer_left: return LOCKSTEP_PEER_LOST;
    case peer_failed: return LOCKSTEP_PEER_FAILED;
    case system: return LOCKSTEP_SYSTEM_ERROR;
    case engine: return LOCKSTEP_ENGINE_ERROR;
  }
  return LOCKSTEP_OTHER_ERROR;
}

LastError describe(const Error& error) {
  const internal::Failure failure = internal::failure_of(error);
  return {.status = status_of(failure.kind),
          .message = error.what(),
          .text = error.text(),
          .context = error.context(),
          .error_number = failure.error_number};
}

LastError describe_current(const char* operation) {
  try {
    throw;
  } catch (const Error& error) {
    return describe(error);
  } catch (const std::bad_alloc&) {
    return describe(SystemError({.operation = operation}, ENOMEM, "out of memory"));
  } catch (const std::exception& error) {
    LastError other = describe(EngineError({.operation = operation}, error.what()));
    other.status = LOCKSTEP_OTHER_ERROR;
    return other;
  } catch (...) {
    LastError other = describe(EngineError({.operation = operation}, "an unknown exception"));
    other.status = LOCKSTEP_OTHER_ERROR;
    return other;
  }
}

const char* text_or_no_memory(const std::string& text) noexcept {
  return last_error().is_out_of_memory ? kNoMemory : text.c_str();
}

}  // namespace

int keep_exception(const char* operation) noexcept {
  LastError& last = last_error();
  try {
    last = describe_current(operation);
  } catch (...) {
    last.status = LOCKSTEP_SYSTEM_ERROR;
    last.error_number = ENOMEM;
    last.context.rank = -1;
    last.context.sequence = 0;
    last.context.where = {};
    last.context.operation.clear();
    last.context.group.clear();
    last.context.peers.clear();
    last.is_out_of_memory = true;
  }
  return last.status;
}

}  // namespace lockstep::c

using lockstep::c::last_error;

int lockstep_error_status(void) { return last_error().status; }
const char* lockstep_error_message(void) {
  return lockstep::c::text_or_no_memory(last_error().message);
}
const char* lockstep_error_text(void) { return lockstep::c::text_or_no_memory(last_error().text); }
const char* lockstep_error_operation(void) { return last_error().context.operation.c_str(); }
const char* lockstep_error_group(void) { return last_error().context.group.c_str(); }
int lockstep_error_rank(void) { return last_error().context.rank; }
uint64_t lockstep_error_sequence(void) { return last_error().context.sequence; }

int lockstep_error_culprit(void) {
  const auto& peers = last_error().context.peers;
  return peers.size() == 1 ? peers.front() : -1;
}

int lockstep_error_peers(int* peers, int capacity) {
  const auto& all = last_error().context.peers;
  if (peers != nullptr && capacity > 0) {
    std::copy_n(all.begin(), std::min(all.size(), static_cast<std::size_t>(capacity)), peers);
  }
  return static_cast<int>(all.size());
}

const char* lockstep_error_file(void) { return last_error().context.where.file_name(); }
int lockstep_error_line(void) { return static_cast<int>(last_error().context.where.line()); }
int lockstep_error_number(void) { return last_error().error_number; }
