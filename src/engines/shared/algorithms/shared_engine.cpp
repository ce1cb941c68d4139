#include "engines/shared/algorithms/shared_engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <iterator>
#include <lockstep/error.hpp>
#include <new>
#include <numeric>
#include <string>
#include <string_view>

#include "base/text.hpp"
#include "group/failure.hpp"

namespace lockstep::shared {

void BufferTable::add(const Entry& entry) {
  const std::lock_guard lock(mutex_);
  entries_.push_back(entry);
}

void BufferTable::remove(std::uint64_t buffer) {
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [buffer](const Entry& entry) { return entry.buffer == buffer; });
}

BufferTable::Found BufferTable::find(const void* data, std::size_t n_bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    const auto mine = reinterpret_cast<std::uintptr_t>(entry.mine);
    if (begin >= mine && begin + n_bytes <= mine + entry.n_part_bytes) {
      return {.place = {.buffer = entry.buffer, .offset = begin - mine}, .entry = entry};
    }
  }
  return {};
}

namespace {

/// This rank's part of a range that has one part per rank.
class Buffer final : public SharedMemory {
 public:
  Buffer(const std::shared_ptr<Segment>& segment, std::uint64_t offset, std::uint64_t number,
         std::size_t n_part_bytes, int rank, int n_ranks, std::shared_ptr<BufferTable> table)
      : range_(std::make_shared<const Range>(segment, offset,
                                             n_part_bytes * static_cast<std::size_t>(n_ranks))),
        table_(std::move(table)),
        number_(number),
        data_(range_->data() + n_part_bytes * static_cast<std::size_t>(rank)) {
    table_->add({.buffer = number_,
                 .parts = range_->data(),
                 .n_part_bytes = n_part_bytes,
                 .mine = data_,
                 .range = range_});
  }
  ~Buffer() override { table_->remove(number_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const noexcept override { return data_; }

 private:
  std::shared_ptr<const Range> range_;
  std::shared_ptr<BufferTable> table_;
  std::uint64_t number_;
  std::byte* data_;
};

/// A rank's result of creating memory, for its peers: the offset, or the error. Sent in the flag.
struct Outcome {
  std::uint64_t offset;
  std::int32_t error_number;
  std::array<char, kInlineBytes - 12> text;
};

struct ColorKey {
  std::int32_t color;
  std::int32_t key;
};

/// Calls make(), which may fail on a single rank, and sends the result to all ranks: if one fails,
/// all fail. This includes the ranks of other leaders, because their group is still one group.
template <class Make>
void run_on_all(Channel& channel, const Call& call, const char* what, Outcome& mine, Make make) {
  try {
    make();
  } catch (const SystemError& error) {
    mine.error_number = error.error_number();
    base::copy_text(mine.text, internal::failure_of(error).text);
  } catch (const std::bad_alloc&) {
    mine.error_number = ENOMEM;
    base::copy_text(mine.text, "no memory for the list of ranks");
  }
  channel.announce(mine);
  channel.end_phase(call);
  for (int r = 0; r < channel.size(); ++r) {
    const auto outcome = channel.announced_by<Outcome>(r);
    if (outcome.error_number == 0) continue;
    channel.fail_system(call, outcome.error_number,
                        fmt::format("rank {} could not {} shared memory: {}", call.number_of(r),
                                    what, base::text_in(outcome.text)));
  }
}

/// Runs reserve() on the leader; returns on all ranks what it returned there.
template <class Reserve>
std::uint64_t reserve_for_all(Channel& channel, const Call& call, int leader, Reserve reserve) {
  Outcome mine{};
  run_on_all(channel, call, "reserve", mine, [&] {
    if (leader == channel.rank()) mine.offset = reserve();
  });
  return channel.announced_by<Outcome>(leader).offset;
}

/// Runs map() on all ranks; returns when it has succeeded on all.
template <class Map>
auto map_on_all(Channel& channel, const Call& call, Map map) {
  decltype(map()) result;
  Outcome mine{};
  run_on_all(channel, call, "map", mine, [&] { result = map(); });
  return result;
}

/// From how many bytes on ranks access each other's memory.
std::size_t least_bytes_between_threads(const Channel& channel) {
  // Two phases where slots need one: below, that costs more than the copies (2 KiB, same buffer
  // again: 0.28 us against 0.18).
  constexpr std::size_t kMin = 4096;
  if (!channel.is_in_one_process()) return SIZE_MAX;
  return std::max<std::size_t>(channel.tuning().in_place_bytes, kMin);
}

}  // namespace

SharedEngine::SharedEngine(std::shared_ptr<Membership> membership)
    : SharedEngine(membership, membership->segment().header().world_channel,
                   membership->world_rank(), membership->segment().n_ranks()) {}

std::unique_ptr<HostEngine> SharedEngine::join(std::shared_ptr<Membership> membership,
                                               const Call& barrier) {
  auto engine = std::make_unique<SharedEngine>(std::move(membership));
  engine->run(barrier);
  engine->look_at_peers();
  return engine;
}

std::unique_ptr<HostEngine> SharedEngine::of_world(std::shared_ptr<Membership> membership) {
  auto engine = std::make_unique<SharedEngine>(std::move(membership));
  engine->look_at_peers();
  return engine;
}

std::vector<std::unique_ptr<HostEngine>> ranks_of_threads(int n) {
  const auto segment = Segment::for_threads(n);
  std::vector<int> all(static_cast<std::size_t>(n));
  std::iota(all.begin(), all.end(), 0);
  segment->header().world_channel = Channel::make(*segment, all);
  std::vector<std::shared_ptr<Membership>> memberships;
  for (const int rank : all) memberships.push_back(std::make_shared<Membership>(segment, rank));
  std::vector<std::unique_ptr<HostEngine>> engines;
  for (auto& membership : memberships) engines.push_back(SharedEngine::of_world(membership));
  return engines;
}

void SharedEngine::look_at_peers() {
  channel_.membership()->watch_peers();
  channel_.choose_waiting();
}

SharedEngine::SharedEngine(std::shared_ptr<Membership> membership, std::uint64_t offset, int rank,
                           int n_ranks)
    : channel_(std::move(membership), offset, rank, n_ranks),
      between_threads_bytes_(least_bytes_between_threads(channel_)),
      inputs_(static_cast<std::size_t>(n_ranks)),
      ins_(static_cast<std::size_t>(n_ranks)),
      outs_(static_cast<std::size_t>(n_ranks)) {}

std::unique_ptr<HostEngine> SharedEngine::split_host(const Call& call, int color, int key) {
  channel_.begin(call);
  channel_.announce(ColorKey{.color = color, .key = key});
  channel_.end_phase(call);

  std::vector<int> members;
  std::vector<int> keys(static_cast<std::size_t>(size()));
  for (int r = 0; r < size(); ++r) {
    const auto chosen = channel_.announced_by<ColorKey>(r);
    if (chosen.color == color) members.push_back(r);
    keys[static_cast<std::size_t>(r)] = chosen.key;
  }
  std::stable_sort(members.begin(), members.end(), [&keys](int a, int b) {
    return keys[static_cast<std::size_t>(a)] < keys[static_cast<std::size_t>(b)];
  });
  const int leader = members.front();
  const std::uint64_t offset = reserve_for_all(channel_, call, leader, [&] {
    std::vector<int> world_ranks;
    for (const int r : members) world_ranks.push_back(channel_.world_rank(r));
    return Channel::make(channel_.membership()->segment(), world_ranks);
  });
  const auto my_rank = std::find(members.begin(), members.end(), rank()) - members.begin();
  auto engine = map_on_all(channel_, call, [&] {
    return std::make_unique<SharedEngine>(channel_.membership(), offset, static_cast<int>(my_rank),
                                          static_cast<int>(members.size()));
  });
  engine->channel_.choose_waiting();
  channel_.end();
  return engine;
}

std::vector<std::unique_ptr<HostEngine>> SharedEngine::divide_host(const Call& call,
                                                                   std::span<const int> counts) {
  channel_.begin(call);
  std::vector<int> world_ranks;
  for (int r = 0; r < size(); ++r) {
    const auto n = static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
    world_ranks.insert(world_ranks.end(), n, channel_.world_rank(r));
  }
  const int first = std::accumulate(counts.begin(), counts.begin() + rank(), 0);
  const std::uint64_t offset = reserve_for_all(channel_, call, /*leader=*/0, [&] {
    return Channel::make(channel_.membership()->segment(), world_ranks);
  });
  auto engines = map_on_all(channel_, call, [&] {
    std::vector<std::unique_ptr<SharedEngine>> mine;
    for (int i = 0; i < counts[static_cast<std::size_t>(rank())]; ++i) {
      mine.push_back(std::make_unique<SharedEngine>(channel_.membership(), offset, first + i,
                                                    static_cast<int>(world_ranks.size())));
      mine.back()->channel_.choose_waiting();
    }
    return mine;
  });
  channel_.end();
  return {std::make_move_iterator(engines.begin()), std::make_move_iterator(engines.end())};
}

std::unique_ptr<SharedMemory> SharedEngine::allocate(const Call& call) {
  constexpr std::size_t kPage = 4096;  // parts do not share pages, so each stays local to its rank
  channel_.begin(call);
  const std::size_t n_part_bytes =
      (std::max<std::size_t>(call.count, 1) + kPage - 1) / kPage * kPage;
  const std::uint64_t offset = reserve_for_all(channel_, call, /*leader=*/0, [&] {
    return Range::make(channel_.membership()->segment(),
                       n_part_bytes * static_cast<std::size_t>(size()), size(), [](std::byte*) {});
  });
  ++n_allocated_;
  auto buffer = map_on_all(channel_, call, [&] {
    return std::make_unique<Buffer>(channel_.membership()->shared_segment(), offset, n_allocated_,
                                    n_part_bytes, rank(), size(), buffers_);
  });
  channel_.end();
  return buffer;
}

std::shared_ptr<TaggedMessages> SharedEngine::make_messages(const Call& call) {
  channel_.begin(call);
  std::shared_ptr<TaggedMessages> messages;
  TaggedMessages::Permission permission;
  if (TaggedMessages::are_possible(channel_, call, permission)) {
    const std::uint64_t offset = reserve_for_all(channel_, call, /*leader=*/0, [&] {
      return TaggedMessages::make(channel_.membership()->segment(), size());
    });
    messages = map_on_all(channel_, call, [&] {
      return std::make_shared<TaggedMessages>(channel_, offset, permission);
    });
  }
  channel_.end();
  return messages;
}

}  // namespace lockstep::shared
