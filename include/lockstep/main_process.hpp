#pragma once

#include <concepts>
#include <functional>
#include <optional>
#include <source_location>
#include <type_traits>
#include <utility>

#include <lockstep/group.hpp>
#include <lockstep/types.hpp>
#include <lockstep/world.hpp>

/// @file
/// Control flow by rank: code for rank 0 only, and code that rank 0 runs before the others.
namespace lockstep {

namespace detail {

enum class FirstScope { main_process, local_main_process };

/// Rank 0 of the group runs f first, then the other ranks.
void run_first(FirstScope function, const std::function<void()>& f, const Group& group,
               Timeout limit, std::source_location where);

template <std::invocable F>
auto run_first(FirstScope function, F& f, const Group& group, Timeout limit,
               std::source_location where) {
  using Result = std::invoke_result_t<F&>;
  if constexpr (std::is_void_v<Result>) {
    run_first(function, std::function<void()>([&f] { f(); }), group, limit, where);
  } else {
    std::optional<std::remove_cvref_t<Result>> result;
    run_first(function, std::function<void()>([&] { result.emplace(f()); }), group, limit, where);
    return *std::move(result);
  }
}

template <class F>
class MasterOnly {
 public:
  explicit MasterOnly(F f, std::optional<Group> group)
      : f_(std::move(f)), group_(std::move(group)) {}

  template <class... Arguments>
  requires std::invocable<F&, Arguments...>
  auto operator()(Arguments&&... arguments) {
    using Result = std::invoke_result_t<F&, Arguments...>;
    const bool is_main = is_main_process(group_ ? *group_ : default_group());
    if constexpr (std::is_void_v<Result>) {
      if (is_main) std::invoke(f_, std::forward<Arguments>(arguments)...);
    } else {
      std::optional<std::remove_cvref_t<Result>> result;
      if (is_main) result.emplace(std::invoke(f_, std::forward<Arguments>(arguments)...));
      return result;
    }
  }

 private:
  F f_;
  std::optional<Group> group_;
};

}  // namespace detail

/// Returns a callable that runs f on rank 0 and does nothing on other ranks. It returns an optional
/// of f's result, nullopt on other ranks; void if f returns void. Not collective: no rank waits.
/// Without `group`, each call uses the default group at that time.
template <class F>
auto master_only(F f) {
  return detail::MasterOnly<F>(std::move(f), std::nullopt);
}
template <class F>
auto master_only(F f, const Group& group) {
  return detail::MasterOnly<F>(std::move(f), group);
}

/// Rank 0 runs f; then the other ranks run it, concurrently. Returns f's result. For work that the
/// others can reuse: a download, a cache. Collective.
///
/// limit: how long the others wait for rank 0, by default forever: the group's timeout does not
/// apply to f. The engine checks the liveness of rank 0 meanwhile: if its process dies or leaves,
/// the waiting ranks get PeerLost within a second.
/// Errors: if f throws on rank 0, rank 0 rethrows it and every other rank gets PeerFailed with its
/// text and does not run f; the group stays usable. If f throws on another rank, only that rank's
/// call throws. TimeoutError if the limit passes, and what any collective throws (group is dead).
/// Inside f, a collective on the group, the default group or the local group, and another
/// main_process_first, throw UsageError because the ranks that they need are waiting here.
template <std::invocable F>
auto main_process_first(F f, const Group& group = default_group(), Timeout limit = Timeout::never(),
                        std::source_location where = std::source_location::current()) {
  return detail::run_first(detail::FirstScope::main_process, f, group, limit, where);
}

/// The same on each host separately: the first rank on the host, then the other ranks there.
template <std::invocable F>
auto local_main_process_first(F f, Timeout limit = Timeout::never(),
                              std::source_location where = std::source_location::current()) {
  return detail::run_first(detail::FirstScope::local_main_process, f, local_group(), limit, where);
}

}  // namespace lockstep
