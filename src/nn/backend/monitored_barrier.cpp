#include "nn/backend/monitored_barrier.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "nn/gloo_engine/c10d_error.hpp"

namespace lockstep::backend {
namespace {

using BarrierClock = lockstep::detail::JobClock;
using std::chrono::milliseconds;

// How long rank 0 waits at most until the others have read what came of it.
constexpr milliseconds kTelling{2000};

}  // namespace

/// One call. Each other rank sets its key. When rank 0 has seen all keys, one of the ranks has
/// ended, or the time is over, it sets `outcome`, for which the others wait: kPassed, or what was
/// wrong. They delete their keys when they have read it. Rank 0 waits for that, because the store
/// is often in its process, which may end after the call.
class MonitoredBarrier::Round {
 public:
  Round(c10d::Store& store, const Membership& membership, std::uint64_t number,
        const ErrorContext& context)
      : store_(store),
        membership_(membership),
        context_(context),
        prefix_(fmt::format("{}/monitored_barrier/{}/", membership.job, number)) {}

  void lead(const Limits& limits) {
    std::vector<int> missing, lost;
    for (int rank = 1; rank < membership_.size(); ++rank) missing.push_back(rank);
    nn::detail::poll_until(BarrierClock::now() + limits.of_rank_0, [&] {
      std::erase_if(missing, [&](int rank) { return store_.check({key(rank)}); });
      std::ranges::copy_if(missing, std::back_inserter(lost),
                           [&](int rank) { return membership_.has_ended(rank); });
      return missing.empty() || !lost.empty();
    });
    if (missing.empty()) {
      if (tell(std::string(kPassed), missing)) store_.deleteKey(outcome());
      return;
    }
    std::string text = failed(lost.empty() ? missing : lost, limits);
    text += lost.empty() ? fmt::format(" in {} ms", limits.of_rank_0.count()) : ": it has ended";
    if (lost.empty() && limits.of_rank_0 <= milliseconds::zero()) {
      text = fmt::format("Rank 0 timed out in monitoredBarrier: the timeout is {} ms",
                         limits.of_rank_0.count());
    }
    (void)tell((lost.empty() ? kLate : kLost) + text, missing);  // late ranks read it too
    fail(!lost.empty(), text);
  }

  void follow(const Limits& limits) {
    store_.set(key(context_.rank), std::string("here"));
    bool is_gone = false, has_outcome = false;
    nn::detail::poll_until(BarrierClock::now() + limits.of_others, [&] {
      is_gone = membership_.has_ended(0);
      has_outcome = store_.check({outcome()});
      return is_gone || has_outcome;
    });
    if (has_outcome) {
      const std::string text = store_.get_to_str(outcome());
      acknowledge();
      if (text != kPassed) fail(text.front() == kLost, reached(text.substr(1)));
    } else {
      fail(is_gone, reached(is_gone ? "it has ended"
                                    : fmt::format("it did not answer within {} ms",
                                                  limits.of_others.count())));
    }
  }

  std::string reached(std::string_view what) const {
    return fmt::format(
        "Rank {} successfully reached monitoredBarrier, but received errors while waiting for "
        "send/recv from rank 0: {}",
        context_.rank, what);
  }

 private:
  /// To the ranks that are not `missing`; whether all of them have read it, or ended.
  bool tell(const std::string& text, const std::vector<int>& missing) {
    store_.set(outcome(), text);
    std::vector<int> told;
    for (int rank = 1; rank < membership_.size(); ++rank) {
      if (std::ranges::find(missing, rank) == missing.end()) told.push_back(rank);
    }
    nn::detail::poll_until(BarrierClock::now() + kTelling, [&] {
      std::erase_if(told, [&](int rank) {
        return !store_.check({key(rank)}) || membership_.has_ended(rank);
      });
      return told.empty();
    });
    return told.empty();
  }
  void acknowledge() const {
    try {
      store_.deleteKey(key(context_.rank));
    } catch (const std::exception&) {  // rank 0 and the store have ended: the outcome stands
    }
  }

  static constexpr std::string_view kPassed = "passed";
  static constexpr char kLate = 'T', kLost = 'L';  // before the text

  [[noreturn]] void fail(bool is_lost, std::string text) const {
    using Kind = nn::detail::C10dError::Kind;
    nn::detail::throw_error(is_lost ? Kind::peer_lost : Kind::timeout, context_, std::move(text));
  }
  std::string key(int rank) const { return fmt::format("{}{}", prefix_, rank); }
  std::string outcome() const { return prefix_ + "outcome"; }

  static std::string failed(std::vector<int> ranks, const Limits& limits) {
    if (!limits.names_all_late_ranks) ranks.resize(1);
    return fmt::format("Rank{} {} failed to pass monitoredBarrier",
                       limits.names_all_late_ranks ? "s" : "", fmt::join(ranks, ", "));
  }

  c10d::Store& store_;
  const Membership& membership_;
  const ErrorContext& context_;
  std::string prefix_;
};

void MonitoredBarrier::wait(const ErrorContext& context, const Limits& limits) {
  Round round(*store_, membership_, ++n_calls_, context);
  try {
    if (context.rank == 0) {
      round.lead(limits);
    } else {
      round.follow(limits);
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    // The store is often in rank 0.
    if (membership_.has_ended(0)) throw PeerLost(context, round.reached("it has ended"));
    nn::detail::throw_store_error(context, error);
  }
}

}  // namespace lockstep::backend
