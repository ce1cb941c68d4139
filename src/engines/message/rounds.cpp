#include "engines/message/rounds.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

namespace lockstep::message {
namespace {

/// All payloads of a call together, up to 512 ranks: what a rank receives beyond the heads.
constexpr std::size_t kPayloadsBytes = 8 << 10;

std::size_t slot_bytes_of(int n_ranks) {
  const std::size_t share = kPayloadsBytes / static_cast<std::size_t>(n_ranks);
  return std::clamp(std::bit_floor(share), Rounds::kMinPayloadBytes, sizeof(EagerMessage::payload));
}

}  // namespace

/// Precedes the slots.
struct Rounds::Head {
  Header header;
  std::uint64_t agrees;  ///< all that the sender knows
  std::uint64_t unused;  ///< aligns the slots
};

Rounds::Rounds(MessageChannel& channel)
    : channel_(channel),
      rank_(channel.rank()),
      size_(channel.size()),
      slot_bytes_(slot_bytes_of(size_)),
      eager_bytes_(std::max(sizeof(EagerMessage),
                            sizeof(Head) + static_cast<std::size_t>(size_) * slot_bytes_)),
      known_(eager_bytes_),
      in_(eager_bytes_) {}

void Rounds::run(int distance, std::size_t out_bytes, std::size_t in_bytes, int n_known,
                 const Call& call, Limit& limit) {
  const int from = before(distance);
  const std::array<Message, 2> messages = {
      Message{Message::Direction::send, (rank_ + distance) % size_, out_.data(), out_bytes},
      Message{Message::Direction::receive, from, in_.data(), in_bytes}};
  channel_.round(messages, from, n_known, call, limit);
}

bool Rounds::compare(const Header& mine, std::span<const std::byte> payload, const Call& call,
                     Limit& limit) {
  const bool compares_sites = call.check == Check::full;
  std::byte* const slots = known_.data() + sizeof(Head);
  if (!payload.empty()) std::memcpy(slots, payload.data(), payload.size());
  Head head{mine, /*agrees=*/1, 0};
  channel_.begin_rounds(mine);
  for (int distance = 1; distance < size_; distance *= 2) {
    const std::size_t n_bytes =
        static_cast<std::size_t>(std::min(distance, size_ - distance)) * slot_bytes_;
    std::memcpy(known_.data(), &head, sizeof(head));
    const std::array<Message, 2> messages = {
        Message{Message::Direction::send, (rank_ + distance) % size_, known_.data(),
                sizeof(Head) + n_bytes},
        // Also large enough for the EagerMessage of a rank that is in a send or recv.
        Message{Message::Direction::receive, before(distance), in_.data(),
                std::max(sizeof(EagerMessage), sizeof(Head) + n_bytes)}};
    channel_.round(messages, before(distance), /*n_known=*/distance, call, limit);
    Head other{};
    std::memcpy(&other, in_.data(), sizeof(other));
    if (other.agrees == 0 || !same_signature(mine, other.header, compares_sites)) head.agrees = 0;
    std::memcpy(slots + static_cast<std::size_t>(distance) * slot_bytes_, in_.data() + sizeof(Head),
                n_bytes);
  }
  channel_.end_rounds();
  return head.agrees != 0;
}

const std::byte* Rounds::payload(int r) const noexcept {
  return known_.data() + sizeof(Head) + static_cast<std::size_t>(before(r)) * slot_bytes_;
}

void Rounds::all_gather(const std::byte* part, std::byte* parts, std::size_t part_bytes,
                        const Call& call, Limit& limit) {
  const auto n = static_cast<std::size_t>(size_);
  out_.resize(n * part_bytes);  // of this rank, the rank before, ...
  in_.resize(std::max(eager_bytes_, n * part_bytes));
  std::memcpy(out_.data(), part, part_bytes);
  channel_.begin_rounds({});
  for (int distance = 1; distance < size_; distance *= 2) {
    const std::size_t n_bytes =
        static_cast<std::size_t>(std::min(distance, size_ - distance)) * part_bytes;
    run(distance, n_bytes, n_bytes, /*n_known=*/size_, call, limit);
    std::memcpy(out_.data() + static_cast<std::size_t>(distance) * part_bytes, in_.data(), n_bytes);
  }
  channel_.end_rounds();
  for (int r = 0; r < size_; ++r) {
    std::memcpy(parts + static_cast<std::size_t>(r) * part_bytes,
                out_.data() + static_cast<std::size_t>(before(r)) * part_bytes, part_bytes);
  }
}

void Rounds::send(int to, std::byte* data, std::size_t n_bytes, const Call& call, Limit& limit) {
  const Message message{Message::Direction::send, to, data, n_bytes};
  channel_.round(std::span(&message, 1), to, /*n_known=*/size_, call, limit);
}

void Rounds::receive(int from, std::byte* data, std::size_t n_bytes, const Call& call,
                     Limit& limit) {
  const Message message{Message::Direction::receive, from, data, n_bytes};
  channel_.round(std::span(&message, 1), from, /*n_known=*/size_, call, limit);
}

/// Ranks numbered from the root on: 0, 1, ... The parent of i is i without its lowest bit, and its
/// subtree is i, i + 1, ... up to the next multiple of that bit.
struct Rounds::Tree {
  int n_ranks;
  int root;
  int own;  ///< this rank's number

  Tree(int rank, int size, int root_rank)
      : n_ranks(size), root(root_rank), own((rank - root_rank + size) % size) {}
  int rank_of(int i) const { return (i + root) % n_ranks; }
  /// Ranks in the subtree of i, whose lowest bit is `bit`.
  std::size_t n_below(int i, int bit) const {
    return static_cast<std::size_t>(std::min(bit, n_ranks - i));
  }
};

void Rounds::gather(const std::byte* part, std::byte* parts, std::size_t part_bytes, int root,
                    const Call& call, Limit& limit) {
  const Tree tree(rank_, size_, root);
  out_.resize(static_cast<std::size_t>(size_) * part_bytes);  // of the subtree
  std::memcpy(out_.data(), part, part_bytes);
  channel_.begin_rounds({});
  for (int bit = 1; bit < size_; bit *= 2) {
    if ((tree.own & bit) != 0) {
      send(tree.rank_of(tree.own - bit), out_.data(), tree.n_below(tree.own, bit) * part_bytes,
           call, limit);
      break;
    }
    const int child = tree.own + bit;
    if (child >= size_) continue;
    receive(tree.rank_of(child), out_.data() + static_cast<std::size_t>(bit) * part_bytes,
            tree.n_below(child, bit) * part_bytes, call, limit);
  }
  channel_.end_rounds();
  for (int i = 0; tree.own == 0 && i < size_; ++i) {
    std::memcpy(parts + static_cast<std::size_t>(tree.rank_of(i)) * part_bytes,
                out_.data() + static_cast<std::size_t>(i) * part_bytes, part_bytes);
  }
}

template <class Part>
void Rounds::send_down(const Tree& tree, const Part& part, const Call& call, Limit& limit) {
  channel_.begin_rounds({});
  auto bit = static_cast<int>(std::bit_ceil(static_cast<std::size_t>(size_)));
  if (tree.own != 0) {
    bit = tree.own & -tree.own;
    const std::span<std::byte> data = part(0, tree.n_below(tree.own, bit));
    receive(tree.rank_of(tree.own - bit), data.data(), data.size(), call, limit);
  }
  while ((bit /= 2) > 0) {
    const int child = tree.own + bit;
    if (child >= size_) continue;
    const std::span<std::byte> data = part(static_cast<std::size_t>(bit), tree.n_below(child, bit));
    send(tree.rank_of(child), data.data(), data.size(), call, limit);
  }
  channel_.end_rounds();
}

void Rounds::scatter(const std::byte* parts, std::byte* part, std::size_t part_bytes, int root,
                     const Call& call, Limit& limit) {
  const Tree tree(rank_, size_, root);
  out_.resize(static_cast<std::size_t>(size_) * part_bytes);  // of the subtree
  for (int i = 0; tree.own == 0 && i < size_; ++i) {
    std::memcpy(out_.data() + static_cast<std::size_t>(i) * part_bytes,
                parts + static_cast<std::size_t>(tree.rank_of(i)) * part_bytes, part_bytes);
  }
  const auto of_subtree = [&](std::size_t first, std::size_t n) {
    return std::span(out_).subspan(first * part_bytes, n * part_bytes);
  };
  send_down(tree, of_subtree, call, limit);
  std::memcpy(part, out_.data(), part_bytes);
}

void Rounds::broadcast(std::byte* data, std::size_t n_bytes, int root, const Call& call,
                       Limit& limit) {
  const auto all = [&](std::size_t, std::size_t) { return std::span(data, n_bytes); };
  send_down(Tree(rank_, size_, root), all, call, limit);
}

void Rounds::all_to_all(const std::byte* in, std::byte* out, std::size_t part_bytes,
                        const Call& call, Limit& limit) {
  const auto n = static_cast<std::size_t>(size_);
  const auto place = [part_bytes](std::byte* parts, std::size_t i) {
    return parts + i * part_bytes;
  };
  // Part i is for the rank i ahead of this one; after it has been forwarded by all distances of i's
  // bits, it is from the rank i behind.
  parts_.resize(n * part_bytes);
  out_.resize(n * part_bytes);
  in_.resize(std::max(eager_bytes_, n * part_bytes));
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t to = (static_cast<std::size_t>(rank_) + i) % n;
    std::memcpy(place(parts_.data(), i), in + to * part_bytes, part_bytes);
  }
  channel_.begin_rounds({});
  for (int distance = 1; distance < size_; distance *= 2) {
    const auto bit = static_cast<std::size_t>(distance);
    std::size_t n_parts = 0;
    for (std::size_t i = bit; i < n; ++i) {
      if ((i & bit) != 0) {
        std::memcpy(place(out_.data(), n_parts++), place(parts_.data(), i), part_bytes);
      }
    }
    run(distance, n_parts * part_bytes, n_parts * part_bytes, /*n_known=*/size_, call, limit);
    n_parts = 0;
    for (std::size_t i = bit; i < n; ++i) {
      if ((i & bit) != 0) {
        std::memcpy(place(parts_.data(), i), place(in_.data(), n_parts++), part_bytes);
      }
    }
  }
  channel_.end_rounds();
  for (std::size_t i = 0; i < n; ++i) {
    const auto from = static_cast<std::size_t>(before(static_cast<int>(i)));
    std::memcpy(place(out, from), place(parts_.data(), i), part_bytes);
  }
}

}  // namespace lockstep::message
