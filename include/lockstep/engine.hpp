#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <source_location>
#include <span>
#include <string_view>

#include <lockstep/error.hpp>
#include <lockstep/types.hpp>

namespace lockstep {

/// The operations, as an engine gets them.
enum class Op : std::uint8_t {
  barrier,
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  gather,
  scatter,
  reduce_scatter,
  all_to_all,
  send,
  recv,
  split,
  allocate,
};

/// "all_reduce", ... as in errors and records.
std::string_view name_of(Op op);

/// How much of each call ranks compare, see Env::check.
enum class Check : std::uint8_t { off, light, full };

namespace internal {
class Progress;
}

/// One operation as every rank calls it. The Group has validated it before an engine gets it: in
/// and out, or the parts of ins and outs, are not null if bytes move, root is a valid rank, the
/// reduction supports the type.
struct Call {
  Op op = Op::barrier;
  DType dtype = DType::u8;
  ReduceOp reduce = ReduceOp::sum;
  Check check = Check::light;  ///< the group's
  int root = -1;               ///< root of reduce, broadcast, gather, scatter; peer of send, recv
  std::size_t count = 0;       ///< elements, see Engine::run
  const void* in = nullptr;
  void* out = nullptr;
  /// all_gather, gather: elements per rank; empty: all `count`.
  std::span<const std::size_t> counts{};
  /// Of Engine::run_lists: the address of each rank's part of in (scatter, reduce_scatter,
  /// all_to_all) or of out (all_gather, gather, all_to_all), which is then null. Empty: the parts
  /// lie one after the other.
  std::span<const void* const> ins{};
  std::span<void* const> outs{};
  /// How many calls this rank has refused in the group so far. Ranks compare it in collectives, see
  /// Engine::refuse.
  std::uint32_t n_refused = 0;
  std::string_view group{};  ///< name of the group, for errors
  /// The name of the operation in errors, if not that of `op`: "init_dist" for the barrier of
  /// joining ranks.
  std::string_view operation{};
  std::uint64_t sequence = 0;           ///< number of the call in its group, from 1
  std::chrono::milliseconds timeout{};  ///< how long it may wait
  /// The limit that the program gave, for errors, where `timeout` is what steps and the wait for
  /// asynchronous calls have left of it; zero: the same.
  std::chrono::milliseconds limit{};
  std::source_location where;
  /// If an engine issues this call as a step of another: that call, which ranks compare and report.
  const Call* parent_call = nullptr;
  /// Of a step over an engine of some of the group's ranks: their numbers in the group, by which
  /// errors name them. Empty: the engine's ranks are the group's.
  std::span<const int> ranks{};
  /// Where lockstep's own engines report how far the call is; null: nothing to report.
  internal::Progress* progress = nullptr;

  /// The limit in seconds, for errors.
  double limit_s() const {
    return std::chrono::duration<double>(limit.count() > 0 ? limit : timeout).count();
  }
  /// The number of the engine's rank in the group.
  int number_of(int rank) const {
    return ranks.empty() ? rank : ranks[static_cast<std::size_t>(rank)];
  }
};

/// The error context of one call of the engine's rank.
ErrorContext context_of(const Call& call, int rank);

/// A collective that this rank began and refused: an exception left it before its first message.
struct Refusal {
  std::uint32_t n_refused = 0;  ///< with this one, see Call::n_refused
  std::string_view operation{}, reason{};
  std::source_location where{};
  /// All of that, for a MismatchError: "refused all_reduce #2: data is null, at train.cpp:8"
  std::string_view text{};
};

/// Memory of one rank that its peers can access (see Group::allocate).
class SharedMemory {
 public:
  virtual ~SharedMemory() = default;
  virtual std::byte* data() const noexcept = 0;
};

/// Transfers bytes between the ranks of one group: the whole contract of a backend.
///
/// run() performs one call and returns when this rank's part is complete: `out` is filled and `in`
/// may be reused. Meaning of `count` and data movement, with r = rank():
///
///     barrier         nothing
///     all_reduce      out[count] <- reduction of every rank's in[count]; in == out
///     reduce          the same, on root only; out is unchanged elsewhere; in == out on root
///     broadcast       out[count] <- root's in[count]; in == out
///     all_gather      out <- in[counts[0]] of rank 0, in[counts[1]] of rank 1, ...
///     gather          the same, on root only
///     scatter         out[count] <- root's in[r * count ...]
///     reduce_scatter  out[count] <- reduction of every rank's in[r * count ...]
///     all_to_all      out[q * count ...] <- rank q's in[r * count ...]
///     send, recv      in[count] to / out[count] from rank `root`
///
/// in and out do not overlap, except where in == out is stated. Reductions of floats are in
/// the order of the tree over the ranks (ReduceOp); an engine of another order gives other bits.
///
/// Errors: MismatchError, TimeoutError, PeerLost, PeerFailed, SystemError, EngineError. After any
/// of them the Group is dead and makes no more calls. Threads: one call at a time.
class Engine {
 public:
  virtual ~Engine() = default;
  /// As in InitOptions::backend.
  virtual std::string_view name() const noexcept = 0;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// Why all calls must come from the thread that made this engine, and what to do about it; empty:
  /// any thread calls it. Otherwise the Group refuses asynchronous calls, and those of other
  /// threads.
  virtual std::string_view why_one_thread() const noexcept { return {}; }
  virtual void run(const Call& call) = 0;
  /// The same for a call that may have Call::ins and Call::outs. By default it packs the parts into
  /// one buffer for run(), and unpacks the result.
  virtual void run_lists(const Call& call);
  /// A new engine over the ranks that gave the same color, in order of (key, rank). Collective.
  virtual std::unique_ptr<Engine> split(const Call& call, int color, int key) = 0;
  /// `call.count` zeroed bytes on every rank; the engine transfers them without copies if it can.
  /// Collective; the same count on all ranks.
  virtual std::unique_ptr<SharedMemory> allocate(const Call& call) = 0;
  /// This rank has refused a collective after the calls that it has run. Ranks that have refused
  /// the same number of calls still make matching calls. A peer that waits for this rank in a
  /// collective with a smaller Call::n_refused is in the call that this rank refused, or in a later
  /// one: it throws a MismatchError with the text. So does this rank in its next collective, and
  /// every rank whose call is matched with one of another n_refused. Does not wait. Threads: as
  /// run().
  virtual void refuse(const Refusal& /*refusal*/) noexcept {}
  /// This rank cannot do its part of current or future calls: the group is dead for all ranks, with
  /// PeerFailed and this reason. Callable from any thread, also while run() waits on another.
  virtual void abandon(std::string_view reason) noexcept = 0;
  /// The group is dead for all ranks because of an error found elsewhere: with the same type and
  /// text if it is about peers (MismatchError, TimeoutError, PeerLost, PeerFailed), else with
  /// PeerFailed. Callable as abandon().
  virtual void end_with(const Error& error) noexcept { abandon(error.text()); }
  /// This rank leaves the world: peers that wait for it get PeerLost or, if `failure` is not empty,
  /// PeerFailed with that text. Called once, on the world's engine.
  virtual void leave(std::string_view failure) noexcept = 0;
};

}  // namespace lockstep
