#pragma once

#include <cstddef>
#include <lockstep/engine.hpp>
#include <vector>

#include "engines/message/message_channel.hpp"
#include "engines/message/subset.hpp"

namespace lockstep::message {

/// Transfers the data of calls, on which the ranks of a subset agree, as messages between every two
/// of them, and reduces it: in the order of the tree over ranks, for every type, with the same bits
/// on all ranks.
class Collectives {
 public:
  Collectives(MessageChannel& channel, const Subset& subset) : channel_(channel), subset_(subset) {}

  void run(const Call& call, Limit& limit);

  /// Whether an all_reduce of that size sends all data to every rank, and not slices.
  bool is_sent_flat(std::size_t n_bytes) const;
  /// Whether a broadcast or reduce of that size is one of slices first, and not of all data.
  bool is_sent_in_slices(std::size_t n_bytes) const;

 private:
  /// One step of a call: its messages and the call they belong to.
  struct Step {
    MessageChannel& channel;
    const Subset& subset;
    const Call& call;
    Limit& limit;
    std::vector<Message>& messages;  // empty between steps: its capacity is reused

    void send(int peer, const void* data, std::size_t n_bytes) {
      if (peer == subset.rank || n_bytes == 0) return;
      messages.push_back(
          {Message::Direction::send, subset.number_of(peer), const_cast<void*>(data), n_bytes});
    }
    void receive(int peer, void* data, std::size_t n_bytes) {
      if (peer == subset.rank || n_bytes == 0) return;
      messages.push_back({Message::Direction::receive, subset.number_of(peer), data, n_bytes});
    }
    void run();

   private:
    void run_in_windows();
    int exchange_index(const Message& message) const;
  };

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
  /// Whether one rank's data, sent to all others, or that of all others, is long.
  bool is_long_for_all(std::size_t n_bytes) const;
  int rank() const noexcept { return subset_.rank; }
  int size() const noexcept { return subset_.size; }
  bool is(int r) const { return r == rank(); }

  MessageChannel& channel_;
  const Subset subset_;
  std::vector<Message> messages_;
  std::vector<const void*> in_;
  std::vector<std::byte> scratch_;
};

}  // namespace lockstep::message
