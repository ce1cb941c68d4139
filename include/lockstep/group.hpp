#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <source_location>
#include <span>
#include <string>
#include <string_view>

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
class Collective;
class Hold;
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
/// in the same order. Buffer sizes are in elements; dist.hpp has the typed forms.
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

  /// Whether both are handles of the same group, not merely groups of the same ranks.
  friend bool operator==(const Group&, const Group&) = default;

 private:
  friend class internal::Session;
  friend struct internal::NativeGroup;
  friend class detail::Collective;
  friend class detail::Hold;
  std::shared_ptr<internal::GroupState> state_;
};

}  // namespace lockstep
