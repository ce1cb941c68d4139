#include <fmt/format.h>

#include <exception>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/main_process.hpp>
#include <string>

#include "base/exception.hpp"
#include "dist/messages.hpp"
#include "group/group_state.hpp"
#include "world/session.hpp"

namespace lockstep {
namespace detail {

namespace {

std::string_view name_of(FirstScope function) {
  switch (function) {
    case FirstScope::main_process: return "main_process_first";
    case FirstScope::local_main_process: return "local_main_process_first";
  }
  return {};
}

ErrorContext context_of(FirstScope function, const Group& group, std::source_location where) {
  return {.operation = std::string(name_of(function)),
          .group = group.name(),
          .rank = group.rank(),
          .where = where};
}

}  // namespace

/// While it exists, calls on the group, and on the groups f could use in its place, are rejected.
/// Keeps them: f may destroy the program's last handle, or leave the world.
class Hold {
 public:
  Hold(FirstScope function, const Group& group, Timeout limit, std::source_location where)
      : group_(group.state_) {
    group_->hold(
        {.op = Op::barrier, .group = group.name(), .operation = name_of(function), .where = where},
        limit);
    if (is_alone(group)) return;
    const internal::Session* const session = internal::session();
    if (session == nullptr) return;
    default_ = also(session->world_group());
    local_ = also(session->local_group());
  }
  ~Hold() {
    if (local_ != nullptr) local_->release();
    if (default_ != nullptr) default_->release();
    group_->release();
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  /// Throws if the calling thread is already inside.
  static void refuse_nesting(FirstScope function, const Group& group, std::source_location where) {
    const internal::Session* const session = is_alone(group) ? nullptr : internal::session();
    if (!group.state_->is_held() &&
        (session == nullptr || (!session->world_group().state_->is_held() &&
                                !session->local_group().state_->is_held()))) {
      return;
    }
    throw UsageError(context_of(function, group, where),
                     "called inside main_process_first or local_main_process_first, where the "
                     "other ranks wait and cannot participate; call one after the other");
  }

 private:
  /// In a group of one no other rank waits, so every collective remains possible inside.
  static bool is_alone(const Group& group) { return group.size() == 1; }
  static std::shared_ptr<internal::GroupState> also(const Group& group) {
    return group.state_->try_hold() ? group.state_ : nullptr;
  }

  std::shared_ptr<internal::GroupState> group_;
  std::shared_ptr<internal::GroupState> default_;
  std::shared_ptr<internal::GroupState> local_;
};

namespace {

/// Sends rank 0's text to all ranks; empty if f succeeded.
std::string share_failure(std::string text, const Group& group, const TimeLimit& limit,
                          std::source_location where) {
  auto n_bytes = static_cast<std::int64_t>(text.size());
  group.broadcast({.data = &n_bytes, .count = 1, .dtype = DType::i64}, /*src=*/0, limit.timeout(),
                  where);
  if (n_bytes == 0) return text;
  text.resize(static_cast<std::size_t>(n_bytes));
  group.broadcast({.data = text.data(), .count = text.size(), .dtype = DType::u8}, /*src=*/0,
                  limit.timeout(), where);
  return text;
}

}  // namespace

void run_first(FirstScope function, const std::function<void()>& f, const Group& group,
               Timeout limit, std::source_location where) {
  // f may change the program's.
  const Group kept = group;  // NOLINT(performance-unnecessary-copy-initialization)
  Hold::refuse_nesting(function, kept, where);
  if (kept.rank() != 0) {
    const std::string failure = share_failure({}, kept, TimeLimit(limit), where);
    if (!failure.empty()) {
      throw PeerFailed(context_of(function, kept, where),
                       fmt::format("rank 0 failed inside:{}. This rank did not run its part; the "
                                   "group stays usable",
                                   failure));
    }
    const Hold hold(function, kept, limit, where);
    return f();
  }
  std::exception_ptr error;
  {
    const Hold hold(function, kept, limit, where);  // its own errors are not failures of f
    try {
      f();
    } catch (...) {
      error = std::current_exception();
    }
  }
  // Rank 0 waits for its peers no longer than in any other collective.
  share_failure(error ? fmt::format(" {}", base::text_of(error)) : "", kept, TimeLimit(), where);
  if (error) std::rethrow_exception(error);
}

}  // namespace detail
}  // namespace lockstep
