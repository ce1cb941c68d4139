#pragma once

#include <cstddef>
#include <lockstep/engine.hpp>
#include <span>
#include <vector>

#include "engines/message/header.hpp"
#include "engines/message/message_channel.hpp"

namespace lockstep::message {

/// Exchanges between all N ranks of a channel in ceil(log2 N) rounds, in which ranks forward what
/// they have received, instead of a message between every two ranks. All ranks make the same calls
/// in the same order.
///
/// If all send to all, rounds have distances d = 1, 2, 4, ... below N. In each, rank r sends to r +
/// d and receives from r - d, modulo N. Before the round it knows the data of the d ranks r, r - 1,
/// ... r - d + 1; it receives those of r - d, ... r - 2 d + 1 and knows 2 d. After the last round
/// it knows all N, even if N is not a power of two: the last message has the N - d parts that are
/// missing.
///
/// Termination: in round d a rank waits for r - d, which has sent that message unless it waits in a
/// round of a smaller distance, or has not begun. Such a chain of waits has at most log2 N ranks
/// and ends at one that has not begun, or does not run: that rank is late, not the one waited for.
/// MessageChannel finds it when the call times out, by querying the wait state of all ranks.
///
/// Calls are compared by the same messages, which have the sender's header and whether all headers
/// that it knows agree. Agreement is an equivalence, so it is enough that each agrees with its
/// sender. Each message has the same size for every call, so that ranks that make another call can
/// parse it. A rank that finds a difference completes all rounds: then all ranks know that the
/// calls differ, and only then exchange their headers, between all pairs.
class Rounds {
 public:
  explicit Rounds(MessageChannel& channel);

  /// The most bytes of a rank that compare() can send: at least these.
  static constexpr std::size_t kMinPayloadBytes = 16;
  std::size_t payload_bytes() const noexcept { return slot_bytes_; }
  /// Sends every rank's payload to all ranks, in the messages that compare calls. False on all
  /// ranks if the calls differ.
  bool compare(const Header& mine, std::span<const std::byte> payload, const Call& call,
               Limit& limit);
  /// What rank r has sent with the last compare().
  const std::byte* payload(int r) const noexcept;

  /// A buffer for the first message of a peer, which may be one of compare().
  std::span<std::byte> eager_message() noexcept { return {in_.data(), eager_bytes_}; }

  /// parts[r * part_bytes ...] <- rank r's `part`, for all ranks.
  void all_gather(const std::byte* part, std::byte* parts, std::size_t part_bytes, const Call& call,
                  Limit& limit);
  /// The same, on root only: along a tree, in which a rank sends once.
  void gather(const std::byte* part, std::byte* parts, std::size_t part_bytes, int root,
              const Call& call, Limit& limit);
  /// part <- root's parts[r * part_bytes ...], along the same tree.
  void scatter(const std::byte* parts, std::byte* part, std::size_t part_bytes, int root,
               const Call& call, Limit& limit);
  /// data <- root's data, along the same tree.
  void broadcast(std::byte* data, std::size_t n_bytes, int root, const Call& call, Limit& limit);
  /// out[q * part_bytes ...] <- rank q's in[r * part_bytes ...]. A byte is sent log2(N) / 2 times.
  void all_to_all(const std::byte* in, std::byte* out, std::size_t part_bytes, const Call& call,
                  Limit& limit);

 private:
  struct Head;
  struct Tree;

  void run(int distance, std::size_t out_bytes, std::size_t in_bytes, int n_known, const Call& call,
           Limit& limit);
  void send(int to, std::byte* data, std::size_t n_bytes, const Call& call, Limit& limit);
  void receive(int from, std::byte* data, std::size_t n_bytes, const Call& call, Limit& limit);
  /// From the root to all ranks. part(first, n): the data of n ranks of the subtree, from its
  /// first-th on.
  template <class Part>
  void send_down(const Tree& tree, const Part& part, const Call& call, Limit& limit);
  int before(int distance) const noexcept { return (rank_ + size_ - distance) % size_; }

  MessageChannel& channel_;
  const int rank_;
  const int size_;
  const std::size_t slot_bytes_;
  const std::size_t eager_bytes_;
  // Of compare(): a head and the slots of this rank, the rank before, ...
  std::vector<std::byte> known_;
  std::vector<std::byte> in_, out_, parts_;
};

}  // namespace lockstep::message
