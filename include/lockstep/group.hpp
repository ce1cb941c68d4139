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
class Recorder;
class Session;
class WorkHandle;
}  // namespace internal
namespace detail {
class Hold;
}

/// An operation under way on the group's own worker thread.
///
/// The buffers given to it must live until it ended. So the last copy of a Work waits for that when
/// it is destroyed; where an exception unwinds the thread, whose peers may never come to the
/// operation then, it abandons the group first: every rank gets PeerFailed. A failure that nobody
/// waited for is not hidden: the group is dead, and its next call throws.
class Work {
 public:
  Work() = default;  ///< done
  explicit Work(std::shared_ptr<internal::WorkHandle> handle) : handle_(std::move(handle)) {}
  /// Blocks until the operation ended; throws what it threw. May be called again.
  void wait();
  bool done() const;
  /// Lets the operation go on by itself: from then on the caller sees to it that the buffers live
  /// until a later call on the group has returned. No copy of this Work waits any more.
  void detach() noexcept;

 private:
  std::shared_ptr<internal::WorkHandle> handle_;
};

/// Memory that every rank of the group on this host can reach. Collectives whose buffers lie in
/// it move without copies in and out. Copyable handle: the last one frees this rank's share.
class SharedBuffer {
 public:
  SharedBuffer() = default;
  SharedBuffer(std::shared_ptr<SharedMemory> memory, std::size_t n_bytes)
      : memory_(std::move(memory)), n_bytes_(n_bytes) {}
  std::byte* data() const noexcept { return memory_ ? memory_->data() : nullptr; }
  std::size_t size() const noexcept { return n_bytes_; }
  /// The buffer as elements of T; what does not fill one is left off.
  template <Arithmetic T>
  std::span<T> as() const& noexcept {
    return {reinterpret_cast<T*>(data()), n_bytes_ / sizeof(T)};
  }
  template <Arithmetic T>
  std::span<T> as() const&& noexcept {
    static_assert(
        sizeof(T) == 0,
        "lockstep: the memory of a temporary SharedBuffer is gone at the end of the line: "
        "keep the SharedBuffer, and call as() on it");
    return {};
  }

 private:
  std::shared_ptr<SharedMemory> memory_;
  std::size_t n_bytes_ = 0;
};

/// Ranks that talk to each other. Copyable handle over shared state.
///
/// Every operation is collective (send and recv: both ends): all ranks call the same operations in
/// the same order. Buffers hold elements, sizes are counted in elements; dist.hpp has the typed
/// forms.
///
/// Errors, for all operations: UsageError (group stays usable); MismatchError, TimeoutError,
/// PeerLost, PeerFailed, SystemError, EngineError (group is dead: every later call throws the same
/// error). Threads: one call at a time per Group. The *_async forms run on a worker thread that the
/// Group starts when first needed, in the order given; a blocking call first waits for them.
class Group {
 public:
  using Where = std::source_location;

  /// The solo group: rank 0 of 1, where every operation works and moves nothing to anyone.
  Group();
  /// A group over an engine: for engine authors.
  Group(std::unique_ptr<Engine> engine, std::string name, std::chrono::milliseconds timeout,
        std::shared_ptr<internal::Recorder> recorder = nullptr);

  int rank() const noexcept;
  int size() const noexcept;
  std::string_view backend() const noexcept;
  const std::string& name() const noexcept;
  /// Whether a small message costs about a microsecond, so that several are better than one that
  /// everything waits for: ranks of one host, each with a core of its own. The same on all ranks.
  bool has_low_latency() const noexcept;
  /// Limit of one operation where the call gives none.
  std::chrono::milliseconds timeout() const noexcept;

  /// New groups of the ranks that gave the same color (0 or more), ordered by key, then by rank.
  /// Collective.
  Group split(int color, int key = -1, Where where = Where::current()) const;
  /// The same ranks over a channel of their own, so that two threads can communicate at once.
  Group duplicate(Where where = Where::current()) const;
  /// `n_bytes` of zeroed memory on every rank; the same n_bytes everywhere. Collective.
  SharedBuffer allocate(std::size_t n_bytes, Where where = Where::current()) const;

  /// Returns when every rank has called it.
  void barrier(Deadline deadline = {}, Where where = Where::current()) const;
  /// data <- reduction of every rank's data. Same count, type and op on all ranks.
  void all_reduce(const Elements& data, ReduceOp op = ReduceOp::sum, Deadline deadline = {},
                  Where where = Where::current()) const;
  /// On dst: data <- reduction of every rank's data. Elsewhere data is left as it was.
  void reduce(const Elements& data, int dst = 0, ReduceOp op = ReduceOp::sum,
              Deadline deadline = {}, Where where = Where::current()) const;
  /// data <- src's data.
  void broadcast(const Elements& data, int src = 0, Deadline deadline = {},
                 Where where = Where::current()) const;
  /// out <- every rank's in, in rank order: size() * in.count elements.
  void all_gather(const ConstElements& in, const Elements& out, Deadline deadline = {},
                  Where where = Where::current()) const;
  /// The same with counts[r] elements from rank r; counts has size() entries, equal on all ranks.
  void all_gather(const ConstElements& in, const Elements& out, std::span<const std::size_t> counts,
                  Deadline deadline = {}, Where where = Where::current()) const;
  /// all_gather on dst only; elsewhere out is not used.
  void gather(const ConstElements& in, const Elements& out, int dst = 0, Deadline deadline = {},
              Where where = Where::current()) const;
  void gather(const ConstElements& in, const Elements& out, std::span<const std::size_t> counts,
              int dst = 0, Deadline deadline = {}, Where where = Where::current()) const;
  /// out <- the rank-th of size() equal parts of src's in; elsewhere in is not used.
  void scatter(const ConstElements& in, const Elements& out, int src = 0, Deadline deadline = {},
               Where where = Where::current()) const;
  /// out <- reduction of every rank's part of in that belongs to this rank.
  /// in: size() * out.count elements, rank-major; may not overlap out.
  void reduce_scatter(const ConstElements& in, const Elements& out, ReduceOp op = ReduceOp::sum,
                      Deadline deadline = {}, Where where = Where::current()) const;
  /// Part q of out <- this rank's part of rank q's in. in, out: size() equal parts, no overlap.
  void all_to_all(const ConstElements& in, const Elements& out, Deadline deadline = {},
                  Where where = Where::current()) const;
  /// Matches a recv of the same count and type on dst, another rank. May return before it is
  /// received, or wait for the recv. Messages between two ranks arrive in order.
  void send(const ConstElements& data, int dst, Deadline deadline = {},
            Where where = Where::current()) const;
  void recv(const Elements& data, int src, Deadline deadline = {},
            Where where = Where::current()) const;

  [[nodiscard]] Work barrier_async(Deadline deadline = {}, Where where = Where::current()) const;
  [[nodiscard]] Work all_reduce_async(const Elements& data, ReduceOp op = ReduceOp::sum,
                                      Deadline deadline = {}, Where where = Where::current()) const;
  [[nodiscard]] Work reduce_async(const Elements& data, int dst = 0, ReduceOp op = ReduceOp::sum,
                                  Deadline deadline = {}, Where where = Where::current()) const;
  [[nodiscard]] Work broadcast_async(const Elements& data, int src = 0, Deadline deadline = {},
                                     Where where = Where::current()) const;
  [[nodiscard]] Work all_gather_async(const ConstElements& in, const Elements& out,
                                      Deadline deadline = {}, Where where = Where::current()) const;
  [[nodiscard]] Work gather_async(const ConstElements& in, const Elements& out, int dst = 0,
                                  Deadline deadline = {}, Where where = Where::current()) const;
  [[nodiscard]] Work scatter_async(const ConstElements& in, const Elements& out, int src = 0,
                                   Deadline deadline = {}, Where where = Where::current()) const;
  [[nodiscard]] Work reduce_scatter_async(const ConstElements& in, const Elements& out,
                                          ReduceOp op = ReduceOp::sum, Deadline deadline = {},
                                          Where where = Where::current()) const;
  [[nodiscard]] Work all_to_all_async(const ConstElements& in, const Elements& out,
                                      Deadline deadline = {}, Where where = Where::current()) const;
  [[nodiscard]] Work send_async(const ConstElements& data, int dst, Deadline deadline = {},
                                Where where = Where::current()) const;
  [[nodiscard]] Work recv_async(const Elements& data, int src, Deadline deadline = {},
                                Where where = Where::current()) const;

  /// Same group, not merely same ranks.
  friend bool operator==(const Group&, const Group&) = default;

 private:
  friend class internal::Session;
  friend class detail::Hold;
  std::shared_ptr<internal::GroupState> state_;
};

}  // namespace lockstep
