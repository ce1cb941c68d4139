#pragma once

#include <lockstep/lockstep.h>

#include <cstdint>
#include <lockstep/group.hpp>
#include <lockstep/types.hpp>
#include <source_location>
#include <string>
#include <utility>

#include "group/source_place.hpp"

/// The contents of the C interface's handles, and the conversion of its arguments.

struct lockstep_group {
  explicit lockstep_group(lockstep::Group its_group)
      : group(std::move(its_group)), name(group.name()), backend(group.backend()) {}

  lockstep::Group group;
  std::string name;
  std::string backend;
};

struct lockstep_work {
  lockstep::Work work;
};

struct lockstep_buffer {
  lockstep::SharedBuffer buffer;
};

struct lockstep_site {
  std::string file;
  lockstep::internal::SourcePlace place;
};

namespace lockstep::c {

inline std::source_location where_of(const lockstep_site* site) noexcept {
  return site == nullptr ? std::source_location() : internal::location_of(site->place);
}

/// A call on a group: the names and numbers that its arguments are checked with. All throw
/// UsageError.
class Arguments {
 public:
  Arguments(const char* operation, const lockstep_group* group, std::int64_t timeout_ms,
            const lockstep_site* site);

  const Group& group() const noexcept { return group_->group; }
  std::size_t size() const noexcept { return static_cast<std::size_t>(group().size()); }
  Timeout timeout() const noexcept { return timeout_; }
  std::source_location where() const noexcept { return where_; }

  /// `count` elements for each rank.
  std::size_t count_of_all(std::size_t count) const;
  DType dtype(int value) const;
  ReduceOp reduction(int value) const;
  /// Throws if a pointer for a result, or another that must be given, is null.
  void check_given(const void* pointer, const char* name) const;
  /// The call counts as refused.
  [[noreturn]] void reject(const std::string& text) const;

 private:
  const char* operation_;
  const lockstep_group* group_;
  std::source_location where_;
  Timeout timeout_;
};

}  // namespace lockstep::c
