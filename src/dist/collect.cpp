#include <fmt/format.h>

#include <algorithm>
#include <lockstep/detail/collective.hpp>
#include <numeric>
#include <optional>

#include "base/exception.hpp"
#include "dist/messages.hpp"
#include "dist/spill.hpp"

namespace lockstep::detail {
namespace {

/// The position of each rank's items in the results.
class Interleaving {
 public:
  Interleaving(const std::vector<MessageHeader>& headers, std::size_t size) {
    for (const auto& header : headers) n_items_.push_back(header.n_items);
    n_results_ = std::min(size, std::reduce(n_items_.begin(), n_items_.end()));
    for (std::size_t r = 0; r < n_items_.size(); ++r) {
      std::size_t low = 0;
      std::size_t high = n_items_[r];
      while (low < high) {  // binary search for the first item beyond the end
        const std::size_t middle = low + (high - low) / 2;
        if (place(r, middle) < n_results_) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      n_kept_.push_back(low);
    }
  }

  std::size_t n_results() const { return n_results_; }
  std::size_t n_kept(std::size_t rank) const { return n_kept_[rank]; }
  std::size_t place(std::size_t rank, std::size_t item) const {
    std::size_t n_before = 0;
    for (std::size_t r = 0; r < n_items_.size(); ++r) {
      n_before += std::min(n_items_[r], item + (r < rank ? 1 : 0));
    }
    return n_before;
  }
  std::vector<std::size_t> places(std::size_t rank, std::size_t first, std::size_t n) const {
    std::vector<std::size_t> all(n);
    for (std::size_t i = 0; i < n; ++i) all[i] = place(rank, first + i);
    return all;
  }

 private:
  std::vector<std::size_t> n_items_;
  std::vector<std::size_t> n_kept_;
  std::size_t n_results_ = 0;
};

/// This rank's kept items as consecutive messages.
class Outgoing {
 public:
  Outgoing(const ObjectCall& call, const Results& results, std::size_t n_kept)
      : call_(call), results_(results), n_kept_(n_kept) {}

  bool is_empty() const { return next_ == n_kept_; }
  /// The next one. If an item cannot be encoded, the message is marked as failed and is the last,
  /// and the exception is in `error`.
  MessageHeader encode_next(Bytes& bytes) {
    bytes.clear();
    const std::size_t first = next_;
    try {
      next_ = results_.encode(first, n_kept_, bytes);
    } catch (...) {
      error = std::current_exception();
      const std::string text = base::text_of(error);
      bytes.clear();
      bytes.append(text.data(), text.size());
      next_ = n_kept_;
    }
    return seal({.op = call_.op,
                 .failed = error ? std::uint8_t{1} : std::uint8_t{0},
                 .type = fingerprint(call_.type),
                 .n_items = next_ - first},
                bytes.span());
  }

  std::exception_ptr error;

 private:
  const ObjectCall& call_;
  const Results& results_;
  std::size_t n_kept_;
  std::size_t next_ = 0;
};

/// What rank 0 reads from each peer.
class Incoming {
 public:
  Incoming(const ObjectCall& call, const Results& results, const Interleaving& order)
      : call_(call),
        results_(results),
        order_(order),
        n_read_(static_cast<std::size_t>(call.group.size())) {}

  bool is_complete(std::size_t rank) const { return n_read_[rank] == order_.n_kept(rank); }
  /// Processes one message. An error is thrown at the end, because the other ranks' bytes must be
  /// received anyway.
  void take(std::size_t rank, const MessageHeader& header, std::span<const std::byte> bytes) {
    const std::size_t first = n_read_[rank];
    const std::size_t n_left = order_.n_kept(rank) - first;
    if (header.failed != 0 || header.n_items == 0 || header.n_items > n_left) {
      n_read_[rank] = order_.n_kept(rank);
    } else {
      n_read_[rank] += header.n_items;
    }
    if (error_) return;
    try {
      const int sender = static_cast<int>(rank);
      check_message(call_, sender, header, bytes);
      if (header.failed != 0) {
        throw PeerFailed(
            context_of(call_),
            fmt::format("rank {} failed: {}. The group stays usable", rank,
                        std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size())));
      }
      decode_from(call_, sender, [&] {
        if (header.n_items == 0 || header.n_items > n_left) {
          throw DecodeError(fmt::format("it has {} items of {}", header.n_items, n_left));
        }
        results_.decode(bytes, order_.places(rank, first, header.n_items));
      });
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const ObjectCall& call_;
  const Results& results_;
  const Interleaving& order_;
  std::vector<std::size_t> n_read_;  // items, by rank
  std::exception_ptr error_;
};

void store_own(const Results& results, const Interleaving& order) {
  results.make(order.n_results());
  for (std::size_t i = 0; i < order.n_kept(0); ++i) results.keep(i, order.place(0, i));
}

void send_all(const ObjectCall& call, Outgoing& outgoing) {
  Bytes bytes;
  while (!outgoing.is_empty()) {
    const MessageHeader header = outgoing.encode_next(bytes);
    call.group.send({.data = &header, .count = sizeof header, .dtype = DType::u8}, /*dst=*/0,
                    call.limit.timeout(), call.where);
    call.group.send({.data = bytes.data(), .count = bytes.size(), .dtype = DType::u8}, /*dst=*/0,
                    call.limit.timeout(), call.where);
  }
}

/// One message of each rank per round, so that no rank waits for all messages of another.
void receive_all(const ObjectCall& call, Incoming& incoming) {
  Bytes bytes;
  const auto n = static_cast<std::size_t>(call.group.size());
  for (bool is_any = true; is_any;) {
    is_any = false;
    for (std::size_t rank = 1; rank < n; ++rank) {
      if (incoming.is_complete(rank)) continue;
      is_any = true;
      const int src = static_cast<int>(rank);
      MessageHeader header;
      call.group.recv({.data = &header, .count = sizeof header, .dtype = DType::u8}, src,
                      call.limit.timeout(), call.where);
      bytes.resize(header.n_bytes);
      call.group.recv({.data = bytes.data(), .count = bytes.size(), .dtype = DType::u8}, src,
                      call.limit.timeout(), call.where);
      incoming.take(rank, header, bytes.span());
    }
  }
}

template <class F>
std::exception_ptr error_of(F step) {
  try {
    step();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void write_spill(const std::filesystem::path& path, Outgoing& outgoing) {
  SpillFile file = SpillFile::create(path);
  Bytes bytes;
  while (!outgoing.is_empty()) {
    const MessageHeader header = outgoing.encode_next(bytes);
    if (outgoing.error) std::rethrow_exception(outgoing.error);
    file.write(&header, sizeof header);
    file.write(bytes.data(), bytes.size());
  }
}

void read_spill(const ObjectCall& call, std::size_t rank, SpillFile& file, Incoming& incoming) {
  const int sender = static_cast<int>(rank);
  const auto read = [&](void* data, std::size_t n_bytes) {
    if (!file.read(data, n_bytes))
      throw_undecodable(call, sender, DecodeError("its file ends too early"));
  };
  Bytes bytes;
  while (!incoming.is_complete(rank)) {
    MessageHeader header;
    read(&header, sizeof header);
    decode_from(call, sender, [&] { bytes.resize(header.n_bytes); });
    read(bytes.data(), bytes.size());
    incoming.take(rank, header, bytes.span());
  }
}

/// Every rank writes its file and rank 0 opens all of them; then the names are no longer needed,
/// and rank 0 removes them before it reads. On an earlier failure each rank removes all files,
/// because a peer may have been killed. The ranks agree after each file, so that a disk failure is
/// an error on all of them, and the timeout applies to one file at a time.
void spill(const ObjectCall& call, const std::filesystem::path& tmpdir, const Results& results,
           const Interleaving& order) {
  const int rank = call.group.rank();
  const std::uint64_t job = sync_random_seed(call.group, call.limit.timeout(), call.where);
  const auto path_of = [&](std::size_t r) {
    return tmpdir / fmt::format("lockstep-{:016x}-{}", job, r);
  };
  const auto me = static_cast<std::size_t>(rank);
  std::vector<std::filesystem::path> paths;
  for (std::size_t r = 1; r < static_cast<std::size_t>(call.group.size()); ++r) {
    paths.push_back(path_of(r));
  }
  Removal removal(paths);
  agree(call, error_of([&] {
          if (rank == 0) return;
          Outgoing outgoing(call, results, order.n_kept(me));
          write_spill(path_of(me), outgoing);
        }));
  std::vector<SpillFile> files;
  agree(call, error_of([&] {
          if (rank != 0) return;
          for (const auto& path : paths) files.push_back(SpillFile::open(path));
          removal.now();
          store_own(results, order);
        }));
  Incoming incoming(call, results, order);
  for (std::size_t r = 1; r <= paths.size(); ++r) {
    agree(call, error_of([&] {
            if (rank == 0) read_spill(call, r, files[r - 1], incoming);
          }));
  }
  incoming.rethrow();
}

}  // namespace

void collect_results(const ObjectCall& call, const std::filesystem::path* tmpdir,
                     const Results& results) {
  // Thrown after the last message: an item could not be sent or read, which all ranks know.
  std::exception_ptr error;
  const Collective collective(name_of(call.op), call.group, call.where);
  const auto headers = exchange_headers(call, {});
  collective.run([&] {
    check_agreed(call, headers, "size");
    const Interleaving order(headers, call.agreed);
    if (tmpdir != nullptr) {
      error = error_of([&] { spill(call, *tmpdir, results, order); });
    } else if (call.group.rank() == 0) {
      store_own(results, order);
      Incoming incoming(call, results, order);
      receive_all(call, incoming);
      error = error_of([&] { incoming.rethrow(); });
    } else {
      Outgoing outgoing(call, results, order.n_kept(static_cast<std::size_t>(call.group.rank())));
      send_all(call, outgoing);
      error = outgoing.error;
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace lockstep::detail
