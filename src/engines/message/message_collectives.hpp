#pragma once

#include <bit>
#include <cstddef>
#include <lockstep/engine.hpp>
#include <vector>

#include "engines/message/costs.hpp"
#include "engines/message/message_channel.hpp"
#include "engines/message/rounds.hpp"

namespace lockstep::message {

/// Transfers the data of calls, on which all ranks agree, as messages between the ranks, and
/// reduces it: in the order of the tree over ranks, for every type, with the same bits on all
/// ranks.
class Collectives {
 public:
  /// `rounds`: null if every pair of ranks exchanges messages directly.
  Collectives(MessageChannel& channel, Rounds* rounds, const Costs& costs)
      : channel_(channel), rounds_(rounds), costs_(costs) {}

  void run(const Call& call, Limit& limit);

  /// Whether data is sent after the headers in a separate exchange, or together with them.
  enum class Data : bool { follows, with_headers };
  /// Whether an all_reduce of that size sends all data to every rank, and not slices.
  bool is_sent_flat(std::size_t n_bytes, Data data) const;
  /// Whether a broadcast or reduce of that size is one of slices first, and not of all data.
  bool is_sent_in_slices(std::size_t n_bytes, Data data) const;

 private:
  /// One step of a call: its messages and the call they belong to.
  struct Step {
    MessageChannel& channel;
    const Call& call;
    Limit& limit;
    const Costs& costs;
    std::vector<Message>& messages;  // empty between steps: its capacity is reused

    void send(int peer, const void* data, std::size_t n_bytes) {
      if (peer == channel.rank() || n_bytes == 0) return;
      messages.push_back({Message::Direction::send, peer, const_cast<void*>(data), n_bytes});
    }
    void receive(int peer, void* data, std::size_t n_bytes) {
      if (peer == channel.rank() || n_bytes == 0) return;
      messages.push_back({Message::Direction::receive, peer, data, n_bytes});
    }
    void run();
  };

  /// Whether an operation takes fewer microseconds in log2 N rounds than as direct messages between
  /// all pairs, if it then sends `n_bytes` more.
  bool is_faster_in_rounds(int n_exchanges, double n_bytes) const;
  bool is_all_to_all_faster_in_rounds(std::size_t part_bytes) const;
  void all_reduce(Step step);
  void reduce(Step step);
  void reduce_in_slices(Step step);
  void broadcast(Step step);
  void gather(Step step, bool is_for_all);
  void scatter(Step step);
  void reduce_scatter(Step step);
  void all_to_all(Step step);
  /// out <- reduction of this rank's `own` and the peers' parts in `parts`, n_bytes each.
  void reduce_parts(const Call& call, const std::byte* own, std::byte* parts, std::size_t n_bytes,
                    std::byte* out);
  /// Rank r's share of the call's data.
  struct Slice {
    std::size_t at;
    std::size_t n_bytes;
  };
  Slice slice_of(const Call& call, int r) const;
  /// Microseconds of an exchange between all pairs of ranks, without its bytes.
  double exchange_us() const { return (size() - 1) * costs_.message_us + costs_.round_us; }
  int n_rounds() const noexcept {
    return static_cast<int>(std::bit_width(static_cast<unsigned>(size() - 1)));
  }
  int rank() const noexcept { return channel_.rank(); }
  int size() const noexcept { return channel_.size(); }
  bool is(int r) const { return r == rank(); }

  MessageChannel& channel_;
  Rounds* rounds_;
  Costs costs_;
  std::vector<Message> messages_;
  std::vector<const void*> in_;
  std::vector<std::byte> scratch_;
};

}  // namespace lockstep::message
