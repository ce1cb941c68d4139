#include <algorithm>
#include <cstring>

#include "engines/shared/algorithms/shared_engine.hpp"
#include "engines/shared/algorithms/slices.hpp"
#include "kernels/reduce.hpp"

namespace lockstep::shared {
namespace {

/// Splits a message into chunks; a message of 0 bytes is one empty chunk.
struct Chunks {
  std::size_t n_total;
  std::size_t n_each;

  /// A division takes as long as the rest of a small call, so one chunk needs none.
  std::size_t count() const { return n_total <= n_each ? 1 : (n_total + n_each - 1) / n_each; }
  std::size_t begin(std::size_t i) const { return i * n_each; }
  std::size_t length(std::size_t i) const {
    return begin(i) >= n_total ? 0 : std::min(n_each, n_total - begin(i));
  }
};

}  // namespace

void SharedEngine::run(const Call& call) {
  channel_.begin(call);
  if (runs_between_threads(call)) {
    run_between_threads(call);
    channel_.end();
    return;
  }
  switch (call.op) {
    case Op::barrier: channel_.end_phase(call); break;
    case Op::all_reduce: all_reduce(call); break;
    case Op::reduce: reduce(call, /*wants_result=*/call.root == rank()); break;
    case Op::broadcast: broadcast(call); break;
    case Op::all_gather: gather(call, /*wants_result=*/true); break;
    case Op::gather: gather(call, /*wants_result=*/call.root == rank()); break;
    case Op::scatter: scatter(call); break;
    case Op::reduce_scatter: reduce_scatter(call); break;
    case Op::all_to_all: all_to_all(call); break;
    case Op::send: channel_.send(call); break;
    case Op::recv: channel_.receive(call); break;
    case Op::split:
    case Op::allocate: break;  // have separate functions
  }
  channel_.end();
}

/// Chunk i is written in one phase and read in the next, while chunk i + 1 is written.
template <class Put, class Take>
void SharedEngine::exchange(const Call& call, std::size_t n_chunks, Put put, Take take) {
  for (std::size_t i = 0; i <= n_chunks; ++i) {
    if (i < n_chunks) put(i);
    if (i > 0) take(i - 1);
    if (i < n_chunks) channel_.end_phase(call);
  }
}

void SharedEngine::all_reduce(const Call& call) {
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  if (n_bytes <= channel_.inline_bytes()) {
    // The data goes with the flag, in the same cache lines. One phase; every rank reduces it all.
    copy_bytes(channel_.write_slot(call, n_bytes), bytes(call.in), n_bytes);  // model: put
    channel_.end_phase(call);
    for (int r = 0; r < size(); ++r) {  // model: take
      inputs_[static_cast<std::size_t>(r)] =
          r == rank() ? call.in : channel_.read_slot(r, 1, n_bytes);
    }
    kernels::reduce(call.dtype, call.reduce, inputs_.data(), size(), call.out, call.count);
    return;
  }
  if (n_allocated_ > 0 && n_bytes >= channel_.tuning().in_place_bytes) {
    const BufferTable::Found found = buffers_->find(call.out, n_bytes);
    if (is_same_place_on_all(call, found.place)) return all_reduce_in_place(call, found);
  }
  reduce(call, /*wants_result=*/true);
}

void SharedEngine::reduce(const Call& call, bool wants_result) {
  if (call.count * size_of(call.dtype) <= channel_.flat_bytes()) {
    reduce_flat(call, wants_result);
  } else {
    reduce_sliced(call, wants_result);
  }
}

/// Every rank publishes all of its data, and each rank that wants the result reduces all of it.
void SharedEngine::reduce_flat(const Call& call, bool wants_result) {
  const std::size_t element = size_of(call.dtype);
  const std::size_t n_bytes = call.count * element;
  const Chunks chunks{n_bytes, channel_.chunk_bytes(n_bytes)};
  exchange(
      call, chunks.count(),
      [&](std::size_t i) {
        if (call.op == Op::reduce && wants_result) return;  // no other rank reads the root's data
        // model: put
        copy_bytes(channel_.write_slot(call, chunks.length(i)), bytes(call.in) + chunks.begin(i),
                   chunks.length(i));
      },
      [&](std::size_t i) {
        if (!wants_result) return;
        // model: take
        const auto reduce_piece = [&](std::size_t begin, std::size_t length) {
          for (int r = 0; r < size(); ++r) {
            inputs_[static_cast<std::size_t>(r)] =
                begin + (r == rank() ? bytes(call.in) + chunks.begin(i)
                                     : channel_.read_slot(r, 1, chunks.length(i)));
          }
          kernels::reduce(call.dtype, call.reduce, inputs_.data(), size(),
                          bytes(call.out) + chunks.begin(i) + begin, count_of(length, element));
        };
        if (channel_.swaps_slots() && chunks.length(i) > channel_.inline_bytes()) {
          const std::byte* const theirs = channel_.read_slot(1 - rank(), 1, chunks.length(i));
          with_write_prefetch({&theirs, 1}, chunks.length(i), kSlotPiece, reduce_piece);
        } else {
          reduce_piece(0, chunks.length(i));
        }
      });
}

/// A three-stage pipeline: copy in the peers' slices of chunk i, reduce this rank's slice of chunk
/// i - 1 and publish it in the gap this rank left in its slot, copy out the slices of chunk i - 2.
void SharedEngine::reduce_sliced(const Call& call, bool wants_result) {
  const std::size_t element = size_of(call.dtype);
  const std::size_t slot = channel_.slot_bytes();
  const std::size_t n_bytes = call.count * element;
  const Chunks chunks{n_bytes, channel_.chunk_bytes(n_bytes)};
  const std::size_t n_chunks = chunks.count();
  const auto slices_of = [&](std::size_t i) {
    return Slices(count_of(chunks.length(i), element), size(), element);
  };
  for (std::size_t i = 0; i < n_chunks + 2; ++i) {
    if (i < n_chunks) {  // model: put
      const Slices slices = slices_of(i);
      const std::size_t begin = slices.begin(rank()) * element;
      const std::size_t end = slices.begin(rank() + 1) * element;
      const std::byte* data = bytes(call.in) + chunks.begin(i);
      copy_bytes(channel_.write_slot(call, slot), data, begin);
      copy_bytes(channel_.write_slot(call, slot) + end, data + end, chunks.length(i) - end);
    }
    if (i >= 1 && i <= n_chunks) {
      const Slices slices = slices_of(i - 1);
      const std::size_t begin = slices.begin(rank()) * element;
      for (int r = 0; r < size(); ++r) {
        const std::byte* data =
            r == rank() ? bytes(call.in) + chunks.begin(i - 1) : channel_.read_slot(r, 1, slot);
        inputs_[static_cast<std::size_t>(r)] = data + begin;
      }
      std::byte* published = channel_.read_slot(rank(), 1, slot) + begin;
      std::byte* result = wants_result ? bytes(call.out) + chunks.begin(i - 1) + begin : published;
      // model: reduce, publish
      kernels::reduce(call.dtype, call.reduce, inputs_.data(), size(), result,
                      slices.length(rank()));
      if (result != published) copy_bytes(published, result, slices.length(rank()) * element);
    }
    if (i >= 2 && wants_result) {  // model: copy
      const Slices slices = slices_of(i - 2);
      const std::size_t each = slices.n_each * element, length = chunks.length(i - 2);
      std::byte* const out = bytes(call.out) + chunks.begin(i - 2);
      // Runs once per peer and chunk, and slices are short with many ranks: keep this loop minimal.
      for (std::size_t r = 0, begin = 0; begin < length; ++r, begin += each) {
        if (static_cast<int>(r) == rank()) continue;
        std::memcpy(out + begin, channel_.read_slot(static_cast<int>(r), 2, slot) + begin,
                    std::min(each, length - begin));
      }
    }
    if (i <= n_chunks) channel_.end_phase(call);
  }
}

void SharedEngine::broadcast(const Call& call) {
  const Chunks chunks{call.count * size_of(call.dtype), channel_.slot_bytes()};
  const bool is_root = call.root == rank();
  exchange(
      call, chunks.count(),
      [&](std::size_t i) {
        if (!is_root) return;
        copy_bytes(channel_.write_slot(call, chunks.length(i)), bytes(call.in) + chunks.begin(i),
                   chunks.length(i));
      },
      [&](std::size_t i) {
        if (is_root) return;
        copy_bytes(bytes(call.out) + chunks.begin(i),
                   channel_.read_slot(call.root, 1, chunks.length(i)), chunks.length(i));
      });
}

/// all_gather and gather: rank r's part has counts[r] elements, or `count` if counts is empty.
void SharedEngine::gather(const Call& call, bool wants_result) {
  const std::size_t element = size_of(call.dtype);
  const auto chunks_of = [&](int r) {
    const std::size_t n =
        call.counts.empty() ? call.count : call.counts[static_cast<std::size_t>(r)];
    return Chunks{n * element, channel_.slot_bytes()};
  };
  std::size_t n_chunks = 1;
  for (int r = 0; r < size(); ++r) n_chunks = std::max(n_chunks, chunks_of(r).count());
  const Chunks own = chunks_of(rank());
  exchange(
      call, n_chunks,
      [&](std::size_t i) {
        copy_bytes(channel_.write_slot(call, own.length(i)), bytes(call.in) + own.begin(i),
                   own.length(i));
      },
      [&](std::size_t i) {
        if (!wants_result) return;
        std::size_t begin = 0;
        for (int r = 0; r < size(); ++r) {
          const Chunks part = chunks_of(r);
          const std::byte* from = r == rank() ? bytes(call.in) + part.begin(i)
                                              : channel_.read_slot(r, 1, part.length(i));
          if (part.length(i) > 0) {  // else it may be null
            copy_bytes(part_of_output(call, r, begin) + part.begin(i), from, part.length(i));
          }
          begin += part.n_total;
        }
      });
}

// In the next three operations a slot holds one piece for each peer, all of the same length.

namespace {

/// The index of the piece for `peer` in a slot of `owner`.
std::size_t piece_for(int peer, int owner) {
  return static_cast<std::size_t>(peer < owner ? peer : peer - 1);
}

}  // namespace

std::size_t SharedEngine::piece_bytes() const {
  return channel_.slot_bytes() / static_cast<std::size_t>(std::max(size() - 1, 1));
}

template <class Parts>
void SharedEngine::put_pieces(const Call& call, const Parts& part, std::size_t i) {
  std::byte* const slot = channel_.write_slot(call, pieces_bytes(part.length(i)));
  for (int q = 0; q < size(); ++q) {
    if (q == rank()) continue;
    copy_bytes(slot + piece_for(q, rank()) * part.length(i),
               part_of_input(call, q, part.n_total) + part.begin(i), part.length(i));
  }
}

/// This rank's piece of chunk i from rank r, which may be this rank.
template <class Parts>
const std::byte* SharedEngine::piece_of(const Call& call, const Parts& part, std::size_t i, int r) {
  if (r == rank()) return part_of_input(call, r, part.n_total) + part.begin(i);
  return channel_.read_slot(r, 1, pieces_bytes(part.length(i))) +
         piece_for(rank(), r) * part.length(i);
}

void SharedEngine::scatter(const Call& call) {
  const Chunks part{call.count * size_of(call.dtype), piece_bytes()};
  const bool is_root = call.root == rank();
  exchange(
      call, part.count(),
      [&](std::size_t i) {
        if (is_root) put_pieces(call, part, i);
      },
      [&](std::size_t i) {
        copy_bytes(bytes(call.out) + part.begin(i), piece_of(call, part, i, call.root),
                   part.length(i));
      });
}

void SharedEngine::reduce_scatter(const Call& call) {
  const std::size_t element = size_of(call.dtype);
  const Chunks part{call.count * element, piece_bytes() / element * element};
  exchange(
      call, part.count(), [&](std::size_t i) { put_pieces(call, part, i); },
      [&](std::size_t i) {
        for (int r = 0; r < size(); ++r) {
          inputs_[static_cast<std::size_t>(r)] = piece_of(call, part, i, r);
        }
        kernels::reduce(call.dtype, call.reduce, inputs_.data(), size(),
                        bytes(call.out) + part.begin(i), count_of(part.length(i), element));
      });
}

void SharedEngine::all_to_all(const Call& call) {
  const Chunks part{call.count * size_of(call.dtype), piece_bytes()};
  exchange(
      call, part.count(), [&](std::size_t i) { put_pieces(call, part, i); },
      [&](std::size_t i) {
        for (int q = 0; q < size(); ++q) {
          const std::size_t begin = static_cast<std::size_t>(q) * part.n_total;
          copy_bytes(part_of_output(call, q, begin) + part.begin(i), piece_of(call, part, i, q),
                     part.length(i));
        }
      });
}

}  // namespace lockstep::shared
