#include <exception>
#include <lockstep/detail/collective.hpp>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <string>

#include "base/exception.hpp"
#include "group/group_state.hpp"
#include "group/root_cause.hpp"

namespace lockstep::detail {

Collective::Collective(std::string_view operation, const Group& group, std::source_location where,
                       Op op) noexcept
    : operation_(operation), group_(group), where_(where), op_(op) {
  const auto calls = group.state_->calls();
  n_made_ = calls.n_made;
  n_refused_ = calls.n_refused;
}

std::string Collective::reason_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return known.text();
  } catch (...) {
    return base::text_of(error);
  }
}

void Collective::refuse(std::string_view reason) const noexcept {
  group_.state_->refuse({.op = op_, .where = where_}, operation_, reason);
}

bool Collective::has_begun() const noexcept {
  const auto now = group_.state_->calls();
  return now.n_made != n_made_ || now.n_refused != n_refused_;
}

void Collective::failed(std::string_view reason, bool is_collective_error) const noexcept {
  const auto now = group_.state_->calls();
  if (now.n_refused != n_refused_) return;  // by a call inside, which has told the peers
  if (now.n_made == n_made_) {
    refuse(reason);
  } else if (!is_collective_error) {
    group_.state_->abandon(reason);
  }
}

void Collective::failed() const noexcept {
  const std::exception_ptr error = std::current_exception();
  try {
    failed(reason_of(error), internal::is_collective_error(error));
  } catch (const std::exception&) {
    group_.state_->abandon("an exception left a call, and no memory was left to say which");
  }
}

}  // namespace lockstep::detail
