#include <algorithm>
#include <cstring>
#include <exception>

#include "engines/shared/algorithms/shared_engine.hpp"
#include "engines/shared/algorithms/slices.hpp"
#include "kernels/reduce.hpp"

/// Collectives that access the memory of other ranks directly: `allocate`d buffers, or any memory
/// of ranks that are threads of one process. A barrier, after which all ranks' memory is ready; the
/// accesses; a barrier, after which no rank accesses it any more.
namespace lockstep::shared {
namespace {

/// Where a rank's data of one call is, for the other threads of its process.
struct CallMemory {
  const void* in;
  void* out;
  const void* const* ins;  ///< Call::ins, or null
};

/// Whether each rank takes its own part of every rank's input.
bool takes_own_part(Op op) {
  return op == Op::scatter || op == Op::reduce_scatter || op == Op::all_to_all;
}

}  // namespace

/// Whether every rank's data is at the same offset of the same shared buffer.
bool SharedEngine::is_same_place_on_all(const Call& call, const BufferTable::BufferRef& place) {
  channel_.announce(place);
  channel_.end_phase(call);
  bool agree = place.buffer != 0;
  for (int r = 0; r < size(); ++r) {
    agree = agree && channel_.announced_by<BufferTable::BufferRef>(r) == place;
  }
  return agree;
}

/// is_same_place_on_all is the barrier before it.
void SharedEngine::all_reduce_in_place(const Call& call, const BufferTable::Found& found) {
  const auto& [place, entry] = found;
  for (std::size_t r = 0; r < ins_.size(); ++r) {
    outs_[r] = entry.parts + r * entry.n_part_bytes + place.offset;
    ins_[r] = outs_[r];
  }
  std::swap(outs_.front(), outs_[static_cast<std::size_t>(rank())]);
  reduce_slice(call, outs_);
  channel_.end_phase(call);
}

/// Reduces this rank's slice of ins_ into the first of `outs`, and copies it to the others.
void SharedEngine::reduce_slice(const Call& call, std::span<std::byte*> outs) {
  const std::size_t element = size_of(call.dtype);
  const Slices slices(call.count, size(), element);
  const std::size_t slice = slices.begin(rank()) * element;
  for (const std::byte*& in : ins_) in += slice;
  for (std::byte*& out : outs) out += slice;
  with_write_prefetch(outs, slices.length(rank()) * element, kMemoryPiece,
                      [&](std::size_t begin, std::size_t length) {
                        for (std::size_t r = 0; r < ins_.size(); ++r) inputs_[r] = ins_[r] + begin;
                        std::byte* const result = outs.front() + begin;
                        kernels::reduce(call.dtype, call.reduce, inputs_.data(), size(), result,
                                        count_of(length, element));
                        for (std::byte* const out : outs.subspan(1)) {
                          std::memcpy(out + begin, result, length);
                        }
                      });
}

void SharedEngine::run_between_threads(const Call& call) {
  channel_.announce(CallMemory{.in = call.in, .out = call.out, .ins = call.ins.data()});
  try {
    channel_.end_phase(call);
    channel_.enter_peers_memory(call);
    move_between_threads(call);
    channel_.leave_peers_memory();
    channel_.end_phase(call);
  } catch (const std::exception& error) {
    channel_.abandon(error.what());  // has no effect if the channel has failed already
    channel_.wait_for_peers_to_leave();
    throw;
  }
}

/// noexcept: between enter_peers_memory and leave_peers_memory nothing may allocate, because peers
/// wait without a limit for this rank to leave.
void SharedEngine::move_between_threads(const Call& call) noexcept {
  const auto me = static_cast<std::size_t>(rank());
  const auto root = static_cast<std::size_t>(call.root);
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  for (int r = 0; r < size(); ++r) {
    const auto memory = channel_.announced_by<CallMemory>(r);
    const std::byte* in = bytes(memory.ins != nullptr ? memory.ins[me] : memory.in);
    if (in != nullptr && memory.ins == nullptr && takes_own_part(call.op)) in += me * n_bytes;
    ins_[static_cast<std::size_t>(r)] = in;
    outs_[static_cast<std::size_t>(r)] = bytes(memory.out);
  }
  std::byte* to = bytes(call.out);
  switch (call.op) {
    case Op::all_reduce:
      std::swap(outs_.front(), outs_[me]);  // write the local memory first
      reduce_slice(call, outs_);
      break;
    case Op::reduce: reduce_slice(call, {&outs_[root], 1}); break;
    case Op::broadcast:
      if (me != root) copy_bytes(to, ins_[root], n_bytes);
      break;
    case Op::gather:
      if (me != root) break;
      [[fallthrough]];
    case Op::all_gather:
      for (std::size_t r = 0, begin = 0; r < ins_.size(); ++r) {
        const std::size_t part =
            call.counts.empty() ? n_bytes : call.counts[r] * size_of(call.dtype);
        copy_bytes(part_of_output(call, static_cast<int>(r), begin), ins_[r], part);
        begin += part;
      }
      break;
    case Op::scatter: copy_bytes(to, ins_[root], n_bytes); break;
    case Op::reduce_scatter:
      std::ranges::copy(ins_, inputs_.begin());
      kernels::reduce(call.dtype, call.reduce, inputs_.data(), size(), to, call.count);
      break;
    case Op::all_to_all:
      for (std::size_t r = 0; r < ins_.size(); ++r) {
        copy_bytes(part_of_output(call, static_cast<int>(r), r * n_bytes), ins_[r], n_bytes);
      }
      break;
    case Op::barrier:
    case Op::send:
    case Op::recv:
    case Op::split:
    case Op::allocate: break;  // runs_between_threads excludes them
  }
}

}  // namespace lockstep::shared
