#include <algorithm>
#include <bit>
#include <cstring>
#include <span>

#include "base/memory.hpp"
#include "engines/shared/algorithms/shared_engine.hpp"
#include "kernels/reduce.hpp"

namespace lockstep::shared {
namespace {

const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }
std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }

void copy_bytes(std::byte* to, const std::byte* from, std::size_t n) {
  if (n > 0 && to != from) std::memcpy(to, from, n);
}

/// Measured best piece sizes of with_write_prefetch: for slots, and for peers' memory, which is
/// also written.
constexpr std::size_t kSlotPiece = 1024, kMemoryPiece = 2048;

/// Calls use(begin, length) for pieces of the n_bytes at each of `data`, prefetched for write (RFO)
/// because this rank writes there, now or in a later phase: each line moves between cores once,
/// not twice.
template <class Use>
void with_write_prefetch(std::span<const std::byte* const> data, std::size_t n_bytes,
                         std::size_t piece, Use use) {
  constexpr std::size_t kLineBytes = 64;
  const auto fetch = [&](std::size_t begin) {
    const std::size_t end = std::min(begin + piece, n_bytes);
    for (; begin < end; begin += kLineBytes) {
      for (const std::byte* peers : data) base::prefetch_to_write(peers + begin);
    }
  };
  fetch(0);
  for (std::size_t begin = 0; begin < n_bytes; begin += piece) {
    fetch(begin + piece);
    use(begin, std::min(piece, n_bytes - begin));
  }
}

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

/// The number of elements, without a division: element sizes are powers of two.
std::size_t count_of(std::size_t n_bytes, std::size_t element_bytes) {
  return n_bytes >> static_cast<unsigned>(std::countr_zero(element_bytes));
}

/// Splits `n` elements into one slice per rank, aligned to cache lines.
struct Slices {
  std::size_t n_each;
  std::size_t n_total;

  Slices(std::size_t n, int n_ranks, std::size_t element_bytes) : n_total(n) {
    const std::size_t line = count_of(64, element_bytes);
    const std::size_t share =
        (n + static_cast<std::size_t>(n_ranks) - 1) / static_cast<std::size_t>(n_ranks);
    n_each = (share + line - 1) / line * line;
  }
  std::size_t begin(int rank) const {
    return std::min(n_total, static_cast<std::size_t>(rank) * n_each);
  }
  std::size_t length(int rank) const { return begin(rank + 1) - begin(rank); }
};

}  // namespace

void SharedEngine::run(const Call& call) {
  channel_.begin(call);
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
  if (n_bytes <= kInlineBytes) {
    // The data goes with the flag, in the same cache lines. One phase; every rank reduces it all.
    copy_bytes(channel_.write_slot(n_bytes), bytes(call.in), n_bytes);  // model: put
    channel_.end_phase(call);
    for (int r = 0; r < size(); ++r) {  // model: take
      inputs_[static_cast<std::size_t>(r)] =
          r == rank() ? call.in : channel_.read_slot(r, 1, n_bytes);
    }
    kernels::reduce(call.dtype, call.reduce, inputs_.data(), size(), call.out, call.count);
    return;
  }
  if (n_allocated_ > 0 && n_bytes >= channel_.tuning().in_place_bytes) {
    BufferTable::Place place = buffers_->find(call.out, n_bytes);
    if (agree_on_place(call, place)) return all_reduce_in_place(call, place);
  }
  reduce(call, /*wants_result=*/true);
}

void SharedEngine::reduce(const Call& call, bool wants_result) {
  if (call.count * size_of(call.dtype) <= channel_.tuning().flat_bytes) {
    reduce_flat(call, wants_result);
  } else {
    reduce_sliced(call, wants_result);
  }
}

/// Whether every rank's data is at the same offset of the same shared buffer.
bool SharedEngine::agree_on_place(const Call& call, BufferTable::Place& place) {
  std::memcpy(channel_.write_slot(sizeof place), &place, sizeof place);
  channel_.end_phase(call);
  bool agree = place.buffer != 0;
  for (int r = 0; r < size(); ++r) {
    BufferTable::Place other;
    std::memcpy(&other, channel_.read_slot(r, 1, sizeof other), sizeof other);
    agree = agree && other == place;
  }
  return agree;
}

/// Each rank reduces its slice directly from every rank's memory and stores it to every rank's
/// memory. agree_on_place is the barrier before it; the phase at the end is the barrier after it.
void SharedEngine::all_reduce_in_place(const Call& call, const BufferTable::Place& place) {
  const BufferTable::Entry entry = buffers_->entry(place.buffer);
  const std::size_t element = size_of(call.dtype);
  const Slices slices(call.count, size(), element);
  const std::size_t base = place.offset + slices.begin(rank()) * element;
  const auto at = [&](int r) {
    return entry.parts + static_cast<std::size_t>(r) * entry.n_part_bytes + base;
  };
  parts_.clear();
  for (int r = 0; r < size(); ++r) parts_.push_back(at(r));
  with_write_prefetch(parts_, slices.length(rank()) * element, kMemoryPiece,
                      [&](std::size_t begin, std::size_t length) {
                        for (int r = 0; r < size(); ++r)
                          inputs_[static_cast<std::size_t>(r)] = at(r) + begin;
                        std::byte* const mine = at(rank()) + begin;
                        kernels::reduce(call.dtype, call.reduce, inputs_.data(), size(), mine,
                                        count_of(length, element));
                        for (int r = 0; r < size(); ++r) {
                          if (r != rank()) std::memcpy(at(r) + begin, mine, length);
                        }
                      });
  channel_.end_phase(call);
}

/// Every rank publishes all of its data, and each rank that wants the result reduces all of it.
void SharedEngine::reduce_flat(const Call& call, bool wants_result) {
  const std::size_t element = size_of(call.dtype);
  const Chunks chunks{call.count * element, channel_.chunk_bytes()};
  exchange(
      call, chunks.count(),
      [&](std::size_t i) {
        if (call.op == Op::reduce && wants_result) return;  // no other rank reads the root's data
        // model: put
        copy_bytes(channel_.write_slot(chunks.length(i)), bytes(call.in) + chunks.begin(i),
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
        if (channel_.swaps_slots() && chunks.length(i) > kInlineBytes) {
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
  const Chunks chunks{call.count * element, channel_.chunk_bytes()};
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
      copy_bytes(channel_.write_slot(slot), data, begin);
      copy_bytes(channel_.write_slot(slot) + end, data + end, chunks.length(i) - end);
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
        copy_bytes(channel_.write_slot(chunks.length(i)), bytes(call.in) + chunks.begin(i),
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
        copy_bytes(channel_.write_slot(own.length(i)), bytes(call.in) + own.begin(i),
                   own.length(i));
      },
      [&](std::size_t i) {
        if (!wants_result) return;
        std::byte* to = bytes(call.out);
        for (int r = 0; r < size(); ++r) {
          const Chunks part = chunks_of(r);
          const std::byte* from = r == rank() ? bytes(call.in) + part.begin(i)
                                              : channel_.read_slot(r, 1, part.length(i));
          copy_bytes(to + part.begin(i), from, part.length(i));
          to += part.n_total;
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
  std::byte* const slot = channel_.write_slot(pieces_bytes(part.length(i)));
  for (int q = 0; q < size(); ++q) {
    if (q == rank()) continue;
    copy_bytes(slot + piece_for(q, rank()) * part.length(i),
               bytes(call.in) + static_cast<std::size_t>(q) * part.n_total + part.begin(i),
               part.length(i));
  }
}

/// This rank's piece of chunk i from rank r, which may be this rank.
template <class Parts>
const std::byte* SharedEngine::piece_of(const Call& call, const Parts& part, std::size_t i, int r) {
  if (r == rank()) {
    return bytes(call.in) + static_cast<std::size_t>(r) * part.n_total + part.begin(i);
  }
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
          copy_bytes(bytes(call.out) + static_cast<std::size_t>(q) * part.n_total + part.begin(i),
                     piece_of(call, part, i, q), part.length(i));
        }
      });
}

}  // namespace lockstep::shared
