#pragma once

#include <algorithm>
#include <lockstep/engine.hpp>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engines/shared/algorithms/host_engine.hpp"
#include "engines/shared/protocol/channel.hpp"
#include "engines/shared/protocol/tagged_messages.hpp"

namespace lockstep::shared {

/// The live buffers of one channel's `allocate`, with the same numbers on all ranks.
class BufferTable {
 public:
  struct BufferRef {
    std::uint64_t buffer = 0;  ///< number of the buffer, from 1; 0: other memory
    std::uint64_t offset = 0;
    friend bool operator==(const BufferRef&, const BufferRef&) = default;
  };
  struct Entry {
    std::uint64_t buffer = 0;
    std::byte* parts = nullptr;    ///< every rank's part, contiguous in rank order
    std::size_t n_part_bytes = 0;  ///< distance between parts
    std::byte* mine = nullptr;
    std::shared_ptr<const Range> range = nullptr;  ///< which has them
  };
  /// Keeps the buffer's memory alive: another thread may destroy the handle during a call.
  struct Found {
    BufferRef place;
    Entry entry;
  };

  void add(const Entry& entry);
  void remove(std::uint64_t buffer);
  /// The buffer with this memory; BufferRef::buffer is 0 if there is none.
  Found find(const void* data, std::size_t n_bytes) const;

 private:
  mutable std::mutex mutex_;  // any thread may destroy a handle
  std::vector<Entry> entries_;
};

/// Collectives over one channel. collectives.cpp has one function per operation, through slots;
/// in_place.cpp has those that access the ranks' memory itself.
class SharedEngine final : public HostEngine {
 public:
  /// Attaches to the world's channel as `membership` and waits for all ranks of the world.
  static std::unique_ptr<HostEngine> join(std::shared_ptr<Membership> membership,
                                          const Call& barrier);

  /// The same where all ranks have joined already.
  static std::unique_ptr<HostEngine> of_world(std::shared_ptr<Membership> membership);

  SharedEngine(std::shared_ptr<Membership> membership, std::uint64_t offset, int rank, int n_ranks);
  /// Of the world's channel.
  explicit SharedEngine(std::shared_ptr<Membership> membership);

  std::string_view name() const noexcept override { return "shared"; }
  int rank() const noexcept override { return channel_.rank(); }
  int size() const noexcept override { return channel_.size(); }
  bool has_low_latency() const noexcept override { return !channel_.waiter().is_oversubscribed(); }
  bool reports_progress() const noexcept override { return true; }
  void run_lists(const Call& call) override { run(call); }
  void run(const Call& call) override;
  std::unique_ptr<HostEngine> split_host(const Call& call, int color, int key) override;
  std::vector<std::unique_ptr<HostEngine>> divide_host(const Call& call,
                                                       std::span<const int> counts) override;
  std::unique_ptr<SharedMemory> allocate(const Call& call) override;
  void refuse(const Refusal& refusal) noexcept override { channel_.refuse(refusal); }
  void abandon(std::string_view reason) noexcept override { channel_.abandon(reason); }
  void end_with(const Error& error) noexcept override { channel_.end_with(error); }
  void leave(std::string_view failure) noexcept override { channel_.membership()->leave(failure); }
  std::shared_ptr<internal::Recorder> recorder() const noexcept override {
    return channel_.membership()->recorder();
  }
  void extend_deadline(std::chrono::nanoseconds at_most) noexcept override {
    channel_.extend_deadline(at_most);
  }
  void begin_between_hosts(const Call& call) override { channel_.begin_between_hosts(call); }
  void end_between_hosts() noexcept override { channel_.end(); }
  std::shared_ptr<TaggedMessages> make_messages(const Call& call) override;

 private:
  /// After all ranks of the world have joined.
  void look_at_peers();
  void all_reduce(const Call& call);
  void reduce(const Call& call, bool wants_result);
  void reduce_flat(const Call& call, bool wants_result);
  void reduce_sliced(const Call& call, bool wants_result);
  void broadcast(const Call& call);
  void gather(const Call& call, bool wants_result);
  void scatter(const Call& call);
  void reduce_scatter(const Call& call);
  void all_to_all(const Call& call);

  template <class Put, class Take>
  void exchange(const Call& call, std::size_t n_chunks, Put put, Take take);
  /// The longest piece if a slot holds one for each peer; and the bytes of all of them.
  std::size_t piece_bytes() const;
  std::size_t pieces_bytes(std::size_t n_bytes) const {
    return n_bytes * static_cast<std::size_t>(size() - 1);
  }
  template <class Parts>
  void put_pieces(const Call& call, const Parts& part, std::size_t i);
  template <class Parts>
  const std::byte* piece_of(const Call& call, const Parts& part, std::size_t i, int r);

  // in_place.cpp
  bool is_same_place_on_all(const Call& call, const BufferTable::BufferRef& place);
  void all_reduce_in_place(const Call& call, const BufferTable::Found& found);
  /// The same on all ranks: they compare what it depends on in the first phase.
  bool runs_between_threads(const Call& call) const noexcept {
    std::size_t count = call.count;
    for (const std::size_t each : call.counts) count = std::max(count, each);
    return count * size_of(call.dtype) >= between_threads_bytes_ && !internal::is_pair(call.op);
  }
  void run_between_threads(const Call& call);
  void move_between_threads(const Call& call) noexcept;
  void reduce_slice(const Call& call, std::span<std::byte*> outs);

  Channel channel_;
  std::size_t between_threads_bytes_;  ///< see run_between_threads; SIZE_MAX between processes
  std::vector<const void*> inputs_;    ///< one per rank, for kernels::reduce
  // Of a call in place: every rank's input and output.
  std::vector<const std::byte*> ins_;
  std::vector<std::byte*> outs_;
  std::shared_ptr<BufferTable> buffers_ = std::make_shared<BufferTable>();
  std::uint64_t n_allocated_ = 0;
};

}  // namespace lockstep::shared
