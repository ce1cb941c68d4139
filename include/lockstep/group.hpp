#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <numeric>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <lockstep/detail/arguments.hpp>
#include <lockstep/detail/collective.hpp>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/engine.hpp>
#include <lockstep/types.hpp>

namespace lockstep {

namespace internal {
class GroupState;
struct NativeGroup;
class Session;
class WorkHandle;
}  // namespace internal
namespace detail {
class Hold;

/// Every rank's count, by rank.
std::vector<std::size_t> exchange_counts(std::size_t count, const Group& group, Timeout timeout,
                                         std::source_location where);

/// gather to dst, or all_gather if dst is negative, of data whose sizes differ: one Part per
/// rank.
template <class Part>
std::vector<Part> gather_parts(const ConstElements& data, const Group& group, int dst,
                               Timeout timeout, std::source_location where);
}  // namespace detail

/// An asynchronous operation on the group's worker thread.
///
/// Its buffers must live until it has completed, so the destructor of the last copy of a Work waits
/// for completion. During exception unwinding the peers may never call the operation, so the
/// destructor first abandons the group: every rank gets PeerFailed. A failure is not lost if no one
/// calls wait(): the group is dead, and its next call throws.
class Work {
 public:
  Work() = default;  ///< done
  explicit Work(std::shared_ptr<internal::WorkHandle> handle) : handle_(std::move(handle)) {}
  /// Blocks until the operation has completed; rethrows its error. May be called again.
  void wait();
  bool done() const;  ///< whether wait() would not block
  /// Detaches the operation: no copy of this Work waits for it in its destructor. The caller must
  /// keep the buffers alive until a later call on the group has returned.
  void detach() noexcept;

 private:
  std::shared_ptr<internal::WorkHandle> handle_;
};

/// Memory that every rank of the group on this host can access. Collectives with buffers in it
/// avoid the copies in and out. Copyable handle: the last copy frees this rank's memory.
class SharedBuffer {
 public:
  SharedBuffer() = default;
  SharedBuffer(std::shared_ptr<SharedMemory> memory, std::size_t n_bytes)
      : memory_(std::move(memory)), n_bytes_(n_bytes) {}
  /// The first byte; null if default-constructed.
  std::byte* data() const noexcept { return memory_ ? memory_->data() : nullptr; }
  std::size_t size() const noexcept { return n_bytes_; }  ///< in bytes
  /// The buffer as elements of T: size() / sizeof(T), rounded down.
  template <Arithmetic T>
  std::span<T> as() const& noexcept {
    return {reinterpret_cast<T*>(data()), n_bytes_ / sizeof(T)};
  }
  template <Arithmetic T>
  std::span<T> as() const&& noexcept {
    static_assert(sizeof(T) == 0,
                  "lockstep: the memory of a temporary SharedBuffer is freed at the end of the "
                  "statement: store the SharedBuffer, and call as() on it");
    return {};
  }

 private:
  std::shared_ptr<SharedMemory> memory_;
  std::size_t n_bytes_ = 0;
};

/// A group of communicating ranks (an MPI communicator). Copyable handle over shared state.
///
/// Every operation is collective (send and recv: on both ends): all ranks call the same operations
/// in the same order. Buffer sizes are in elements. dist.hpp has the operations as functions, over
/// the default group if none is given.
///
/// Errors, for all operations: UsageError; MismatchError, TimeoutError, PeerLost, PeerFailed,
/// SystemError, EngineError (group is dead: every later call throws the same error).
///
/// A UsageError is thrown before any data is transferred, and the call counts as refused: if all
/// ranks have refused the same number of calls, the group stays usable; if not, the ranks that made
/// the call, and this rank in its next call, throw a MismatchError that lists the refused calls. So
/// do not catch a UsageError and retry on one rank alone. A refused send or recv ends the group:
/// every other call throws a MismatchError.
/// Threads: one call at a time per Group. The *_async forms run in call order on a worker
/// thread that the Group starts on first use; a blocking call first waits for them.
class Group {
 public:
  using Where = std::source_location;

  /// The solo group: rank 0 of 1. Every operation works and communicates with no one.
  Group();
  /// A group over an engine: for authors of engines.
  Group(std::unique_ptr<Engine> engine, std::string name, std::chrono::milliseconds timeout,
        Check check = Check::light);
  explicit Group(std::shared_ptr<internal::GroupState> state) : state_(std::move(state)) {}

  int rank() const noexcept;                  ///< this rank, from 0
  int size() const noexcept;                  ///< the number of ranks
  std::string_view backend() const noexcept;  ///< "shared", "mpi", ...
  const std::string& name() const noexcept;   ///< "world", "world/0.1", ...: for errors
  /// Default limit of one operation, if the call gives none.
  std::chrono::milliseconds timeout() const noexcept;
  /// How much ranks compare of each call.
  Check check() const noexcept;

  /// A new group of the ranks that gave the same color (0 or more), ordered by key, then by rank.
  /// Collective.
  Group split(int color, int key = -1, Where where = Where::current()) const;
  /// The same ranks over a separate channel, for concurrent use by a second thread. Collective.
  Group duplicate(Where where = Where::current()) const;
  /// Allocates `n_bytes` of zeroed memory on every rank; same n_bytes on all ranks. Collective.
  SharedBuffer allocate(std::size_t n_bytes, Where where = Where::current()) const;
  /// This rank cannot do its part of current or future calls: the group is dead on all ranks, with
  /// PeerFailed and this reason. Callable from any thread, also while another waits in a call.
  void abandon(std::string_view reason) const noexcept;

  /// Returns when every rank has called it.
  void barrier(Timeout timeout = {}, Where where = Where::current()) const;
  /// data <- reduction of every rank's data. Same count, type and op on all ranks.
  void all_reduce(const Elements& data, ReduceOp op = ReduceOp::sum, Timeout timeout = {},
                  Where where = Where::current()) const;
  /// On dst: data <- reduction of every rank's data. On other ranks data is unchanged.
  void reduce(const Elements& data, int dst = 0, ReduceOp op = ReduceOp::sum, Timeout timeout = {},
              Where where = Where::current()) const;
  /// data <- src's data.
  void broadcast(const Elements& data, int src = 0, Timeout timeout = {},
                 Where where = Where::current()) const;
  /// out <- every rank's in, in rank order: size() * in.count elements.
  void all_gather(const ConstElements& in, const Elements& out, Timeout timeout = {},
                  Where where = Where::current()) const;
  /// The same with counts[r] elements from rank r; counts has size() entries, same on all ranks.
  void all_gather(const ConstElements& in, const Elements& out, std::span<const std::size_t> counts,
                  Timeout timeout = {}, Where where = Where::current()) const;
  /// As all_gather, but only dst receives; on other ranks out is not used.
  void gather(const ConstElements& in, const Elements& out, int dst = 0, Timeout timeout = {},
              Where where = Where::current()) const;
  void gather(const ConstElements& in, const Elements& out, std::span<const std::size_t> counts,
              int dst = 0, Timeout timeout = {}, Where where = Where::current()) const;
  /// out <- chunk rank() of src's in (size() equal chunks); on other ranks in is not used.
  void scatter(const ConstElements& in, const Elements& out, int src = 0, Timeout timeout = {},
               Where where = Where::current()) const;
  /// out <- reduction over the ranks of chunk rank() of in.
  /// in: size() * out.count elements, rank-major; must not overlap out.
  void reduce_scatter(const ConstElements& in, const Elements& out, ReduceOp op = ReduceOp::sum,
                      Timeout timeout = {}, Where where = Where::current()) const;
  /// Chunk q of out <- chunk rank() of rank q's in. in, out: size() equal chunks, no overlap.
  void all_to_all(const ConstElements& in, const Elements& out, Timeout timeout = {},
                  Where where = Where::current()) const;
  /// Matches a recv of the same count and type on dst, which is another rank. May return before the
  /// recv (eager) or wait for it (rendezvous). Messages between two ranks arrive in order.
  void send(const ConstElements& data, int dst, Timeout timeout = {},
            Where where = Where::current()) const;
  void recv(const Elements& data, int src, Timeout timeout = {},
            Where where = Where::current()) const;

  /// The asynchronous forms: the buffers belong to the operation until the Work has completed.
  [[nodiscard]] Work barrier_async(Timeout timeout = {}, Where where = Where::current()) const;
  [[nodiscard]] Work all_reduce_async(const Elements& data, ReduceOp op = ReduceOp::sum,
                                      Timeout timeout = {}, Where where = Where::current()) const;
  [[nodiscard]] Work reduce_async(const Elements& data, int dst = 0, ReduceOp op = ReduceOp::sum,
                                  Timeout timeout = {}, Where where = Where::current()) const;
  [[nodiscard]] Work broadcast_async(const Elements& data, int src = 0, Timeout timeout = {},
                                     Where where = Where::current()) const;
  [[nodiscard]] Work all_gather_async(const ConstElements& in, const Elements& out,
                                      Timeout timeout = {}, Where where = Where::current()) const;
  [[nodiscard]] Work gather_async(const ConstElements& in, const Elements& out, int dst = 0,
                                  Timeout timeout = {}, Where where = Where::current()) const;
  [[nodiscard]] Work scatter_async(const ConstElements& in, const Elements& out, int src = 0,
                                   Timeout timeout = {}, Where where = Where::current()) const;
  [[nodiscard]] Work reduce_scatter_async(const ConstElements& in, const Elements& out,
                                          ReduceOp op = ReduceOp::sum, Timeout timeout = {},
                                          Where where = Where::current()) const;
  [[nodiscard]] Work all_to_all_async(const ConstElements& in, const Elements& out,
                                      Timeout timeout = {}, Where where = Where::current()) const;
  [[nodiscard]] Work send_async(const ConstElements& data, int dst, Timeout timeout = {},
                                Where where = Where::current()) const;
  [[nodiscard]] Work recv_async(const Elements& data, int src, Timeout timeout = {},
                                Where where = Where::current()) const;

  /// The same over typed data, which is an ArithmeticRange: any contiguous range of numbers
  /// (vector, array, span, ...). Output must be neither const nor a temporary that would take the
  /// result with it. The most likely mistakes fail to compile with a message that says what to do.
  template <detail::TypedData R>
  void all_reduce(R&& data, ReduceOp op = ReduceOp::sum, Timeout timeout = {},
                  Where where = Where::current()) const {
    all_reduce(detail::written(std::forward<R>(data)), op, timeout, where);
  }
  template <detail::TypedData R, detail::NoReduceOp Second = detail::AnyOptions, class... Rest>
  void all_reduce(R&&, const Second&, Rest&&...) const {
    detail::explain_op<R, Second>();
  }
  template <detail::TypedData R>
  [[nodiscard]] Work all_reduce_async(R&& data, ReduceOp op = ReduceOp::sum, Timeout timeout = {},
                                      Where where = Where::current()) const {
    return all_reduce_async(detail::written_later(std::forward<R>(data)), op, timeout, where);
  }
  template <detail::TypedData R, detail::NoReduceOp Second = detail::AnyOptions, class... Rest>
  Work all_reduce_async(R&&, const Second&, Rest&&...) const {
    detail::explain_op<R, Second>();
    return {};
  }
  template <detail::TypedData R>
  void reduce(R&& data, int dst = 0, ReduceOp op = ReduceOp::sum, Timeout timeout = {},
              Where where = Where::current()) const {
    reduce(detail::written(std::forward<R>(data)), dst, op, timeout, where);
  }
  template <detail::TypedData R>
  [[nodiscard]] Work reduce_async(R&& data, int dst = 0, ReduceOp op = ReduceOp::sum,
                                  Timeout timeout = {}, Where where = Where::current()) const {
    return reduce_async(detail::written_later(std::forward<R>(data)), dst, op, timeout, where);
  }
  template <detail::TypedData R>
  void broadcast(R&& data, int src = 0, Timeout timeout = {},
                 Where where = Where::current()) const {
    broadcast(detail::written(std::forward<R>(data)), src, timeout, where);
  }
  template <detail::TypedData R>
  [[nodiscard]] Work broadcast_async(R&& data, int src = 0, Timeout timeout = {},
                                     Where where = Where::current()) const {
    return broadcast_async(detail::written_later(std::forward<R>(data)), src, timeout, where);
  }
  template <class In, class Out>
  requires detail::TwoRanges<In, Out>
  void all_gather(const In& data, Out&& all, Timeout timeout = {},
                  Where where = Where::current()) const {
    all_gather(detail::read(data), detail::written(std::forward<Out>(all)), timeout, where);
  }
  template <class In, class Out>
  requires detail::TwoRanges<In, Out>
  [[nodiscard]] Work all_gather_async(In&& data, Out&& all, Timeout timeout = {},
                                      Where where = Where::current()) const {
    return all_gather_async(detail::read_later(std::forward<In>(data)),
                            detail::written_later(std::forward<Out>(all)), timeout, where);
  }
  template <class In, class Out>
  requires detail::TwoRanges<In, Out>
  void scatter(const In& all, Out&& part, int src = 0, Timeout timeout = {},
               Where where = Where::current()) const {
    scatter(detail::read(all), detail::written(std::forward<Out>(part)), src, timeout, where);
  }
  template <class In, class Out>
  requires detail::TwoRanges<In, Out>
  [[nodiscard]] Work scatter_async(In&& all, Out&& part, int src = 0, Timeout timeout = {},
                                   Where where = Where::current()) const {
    return scatter_async(detail::read_later(std::forward<In>(all)),
                         detail::written_later(std::forward<Out>(part)), src, timeout, where);
  }
  template <class In, class Out>
  requires detail::TwoRanges<In, Out>
  void reduce_scatter(const In& all, Out&& part, ReduceOp op = ReduceOp::sum, Timeout timeout = {},
                      Where where = Where::current()) const {
    reduce_scatter(detail::read(all), detail::written(std::forward<Out>(part)), op, timeout, where);
  }
  template <class In, class Out>
  requires detail::TwoRanges<In, Out>
  [[nodiscard]] Work reduce_scatter_async(In&& all, Out&& part, ReduceOp op = ReduceOp::sum,
                                          Timeout timeout = {},
                                          Where where = Where::current()) const {
    return reduce_scatter_async(detail::read_later(std::forward<In>(all)),
                                detail::written_later(std::forward<Out>(part)), op, timeout, where);
  }
  template <class In, class Out>
  requires detail::TwoRanges<In, Out>
  void all_to_all(const In& sent, Out&& received, Timeout timeout = {},
                  Where where = Where::current()) const {
    all_to_all(detail::read(sent), detail::written(std::forward<Out>(received)), timeout, where);
  }
  template <class In, class Out>
  requires detail::TwoRanges<In, Out>
  [[nodiscard]] Work all_to_all_async(In&& sent, Out&& received, Timeout timeout = {},
                                      Where where = Where::current()) const {
    return all_to_all_async(detail::read_later(std::forward<In>(sent)),
                            detail::written_later(std::forward<Out>(received)), timeout, where);
  }
  template <detail::TypedData R>
  void send(const R& data, int dst, Timeout timeout = {}, Where where = Where::current()) const {
    send(detail::read(data), dst, timeout, where);
  }
  template <detail::TypedData R>
  [[nodiscard]] Work send_async(R&& data, int dst, Timeout timeout = {},
                                Where where = Where::current()) const {
    return send_async(detail::read_later(std::forward<R>(data)), dst, timeout, where);
  }
  template <detail::TypedData R>
  void recv(R&& data, int src, Timeout timeout = {}, Where where = Where::current()) const {
    recv(detail::written(std::forward<R>(data)), src, timeout, where);
  }
  template <detail::TypedData R>
  [[nodiscard]] Work recv_async(R&& data, int src, Timeout timeout = {},
                                Where where = Where::current()) const {
    return recv_async(detail::written_later(std::forward<R>(data)), src, timeout, where);
  }
  /// The reduction of every rank's value, on all ranks.
  template <class T>
  T all_reduce_value(T value, ReduceOp op = ReduceOp::sum, Timeout timeout = {},
                     Where where = Where::current()) const {
    if constexpr (Arithmetic<T>) {
      all_reduce(detail::erase(std::span<T>(&value, 1)), op, timeout, where);
    } else {
      static_assert(
          detail::kNever<T>,
          "lockstep: a value is a bool, an integer of 8 to 64 bits, Float16, BFloat16, float "
          "or double: static_cast to one of them; for several use all_reduce, for tensors "
          "lockstep::nn::all_reduce");
    }
    return value;
  }
  template <class T, detail::NoReduceOp Second = detail::AnyOptions, class... Rest>
  T all_reduce_value(T value, const Second&, Rest&&...) const {
    detail::explain_op<T, Second>();
    return value;
  }
  /// Returns every rank's data, indexed by rank: as vectors, or as strings if data is a
  /// std::string. Sizes may differ per rank.
  template <detail::TypedData R>
  detail::Parts<R> all_gather(const R& data, Timeout timeout = {},
                              Where where = Where::current()) const {
    return detail::gather_parts<typename detail::PartOf<R>::Type>(detail::read(data), *this,
                                                                  /*dst=*/-1, timeout, where);
  }
  /// The same on dst; empty elsewhere.
  template <detail::TypedData R>
  detail::Parts<R> gather(const R& data, int dst = 0, Timeout timeout = {},
                          Where where = Where::current()) const {
    return detail::gather_parts<typename detail::PartOf<R>::Type>(detail::read(data), *this, dst,
                                                                  timeout, where);
  }

  /// Whether both are handles of the same group, not merely groups of the same ranks.
  friend bool operator==(const Group&, const Group&) = default;

 private:
  friend class internal::Session;
  friend struct internal::NativeGroup;
  friend class detail::Collective;
  friend class detail::Hold;
  std::shared_ptr<internal::GroupState> state_;
};

template <class Part>
std::vector<Part> detail::gather_parts(const ConstElements& data, const Group& group, int dst,
                                       Timeout timeout, std::source_location where) {
  using T = typename Part::value_type;
  const bool wanted = dst < 0 || dst == group.rank();
  std::vector<std::size_t> counts;
  std::unique_ptr<T[]> flat;  // a vector<bool> has no elements to point to
  Collective(name_of(dst < 0 ? Op::all_gather : Op::gather), group, where).run([&] {
    const TimeLimit limit(timeout);
    counts = exchange_counts(data.count, group, limit.timeout(), where);
    const std::size_t n_all = wanted ? std::reduce(counts.begin(), counts.end()) : 0;
    flat = std::make_unique<T[]>(n_all);
    const std::span<T> all(flat.get(), n_all);
    if (dst < 0) {
      group.all_gather(data, erase(all), counts, limit.timeout(), where);
    } else {
      group.gather(data, erase(all), counts, dst, limit.timeout(), where);
    }
  });
  std::vector<Part> parts;
  if (!wanted) return parts;
  parts.reserve(counts.size());
  const T* next = flat.get();
  for (const std::size_t count : counts) {
    parts.emplace_back(next, next + count);
    next += count;
  }
  return parts;
}

}  // namespace lockstep
