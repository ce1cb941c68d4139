#pragma once

#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/error.hpp>
#include <string>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace lockstep::nn::detail {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// How long a rank waits for a store to answer.
inline constexpr std::chrono::milliseconds kPatience{5000};

/// How ranks wait for what a store will hold: its own wait keeps the store from this process's
/// other threads, and only its text tells in some versions a timeout from a lost connection.
/// Calls `done` until it returns true, or the deadline has come.
template <class Done>
void poll_until(lockstep::detail::JobClock::time_point deadline, Done done) {
  using Clock = lockstep::detail::JobClock;
  constexpr std::chrono::milliseconds kFirstPause{1}, kLongestPause{16};
  for (auto pause = kFirstPause; !done(); pause = std::min(2 * pause, kLongestPause)) {
    const auto left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) return;
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, left));
  }
}

/// What the ranks of a group know of each other before they communicate.
struct Membership {
  struct Process {
    pid_t pid = 0;
    std::uint64_t start_time = 0;
  };

  int rank = 0;
  std::string job;            // of the ranks on one host, to find each other
  std::vector<int> hosts{0};  // for each rank the lowest rank on its host
  std::vector<Process> processes = std::vector<Process>(1);  // for each rank, on its host

  int size() const { return static_cast<int>(hosts.size()); }
  bool is_on_one_host() const {
    return std::all_of(hosts.begin(), hosts.end(), [](int host) { return host == 0; });
  }
  /// Whether the rank's process has ended; false if this rank cannot tell.
  bool has_ended(int of_rank) const;
};

/// What a rank tells the others of itself.
std::string own_introduction(const ErrorContext& context);
/// Of the ranks with these introductions.
Membership membership_of(int rank, const std::vector<std::string>& introductions);

/// How the ranks of a group find each other over a store, and agree on whether all have joined:
/// each sets its key and counts itself, the last one or the first whose time ends sets the result,
/// and all wait for that one key. A rank that ends before it joins ends the wait of the others too,
/// if one of them knows its process from an earlier group. The store is often one thread of rank 0,
/// which therefore stays until the others know of a failure.
class Rendezvous {
 public:
  struct Options {
    ErrorContext context;  // with this rank's number
    int size;
    std::chrono::milliseconds timeout;
    std::string keys;    // the beginning of the keys in the store
    std::string action;  // what a late rank did not do, for errors: "join at 127.0.0.1:29500"
    /// A group that the ranks have joined before, and for each rank its rank there; null: none.
    const Membership* earlier = nullptr;
    std::vector<int> earlier_ranks = {};
  };

  Rendezvous(const StorePtr& store, Options options);

  /// Returns when every rank has joined. If one has not when the time of another ends, or has
  /// ended, throws on all that have joined: TimeoutError naming the ranks that have not, or
  /// PeerLost naming those that have ended. Throws std::exception if the store fails.
  void join(lockstep::detail::JobClock::time_point deadline);
  /// Of the ranks that have joined.
  Membership membership() const;

  /// The part of the store that no other rendezvous uses.
  const StorePtr& store() const { return store_; }

 private:
  /// Of those that an earlier group knows.
  std::vector<int> ended() const;
  void conclude(std::string_view result);
  void conclude_if_late_or_lost(lockstep::detail::JobClock::time_point deadline);
  /// Until the others that have joined know the result, too.
  void stay_for_others();
  [[noreturn]] void fail(char kind, const std::string& ranks) const;

  Options options_;
  StorePtr store_;
  lockstep::detail::JobClock::time_point next_check_{};
};

}  // namespace lockstep::nn::detail
