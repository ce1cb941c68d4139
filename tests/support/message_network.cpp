#include "support/message_network.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engines/message/message_engine.hpp"

namespace lockstep::test {
namespace {

using message::ControlMessage;
using message::Message;
using message::TransportError;
using Bytes = std::vector<std::byte>;

}  // namespace

struct MessageNetwork::Shared {
  /// What has arrived for one rank of the world and was not received yet.
  struct Mailbox {
    std::mutex mutex;
    std::condition_variable changed;
    struct Source {
      int channel;
      int rank;
      bool operator==(const Source&) const = default;
    };
    struct Hash {
      std::size_t operator()(const Source& source) const noexcept {
        return static_cast<std::size_t>(source.channel) * 100'003 +
               static_cast<std::size_t>(source.rank);
      }
    };
    std::unordered_map<Source, std::list<Bytes>, Hash> messages;
    std::map<int, std::deque<ControlMessage>> control;  // by channel
    Traffic sent, received;
    std::vector<Traffic> sent_to;  // by rank
    int n_started = 0;
    bool waits = false;  // and nothing has arrived for it since
  };
  /// Requires the lock of the mailbox.
  void set_waits(Mailbox& box, bool waits) {
    if (box.waits == waits) return;
    box.waits = waits;
    n_waiting += waits ? 1 : -1;
  }
  Shared(int n, bool answers_them) : mailboxes(static_cast<std::size_t>(n)), answers(answers_them) {
    for (Mailbox& box : mailboxes) box.sent_to.resize(mailboxes.size());
  }
  std::vector<Mailbox> mailboxes;
  const bool answers;
  std::function<void(int, int)> on_start;
  std::function<bool(int)> ends_when_all_wait;
  /// Ranks that wait, or have stopped. A rank that sends is not among them, nor is any longer the
  /// one that it sent to: all are among them only when none sends.
  std::atomic<int> n_waiting = 0;
};

namespace {

class NetworkTransport final : public message::Transport {
 public:
  NetworkTransport(std::shared_ptr<MessageNetwork::Shared> shared, std::vector<int> members,
                   int rank, int channel)
      : shared_(std::move(shared)), members_(std::move(members)), rank_(rank), channel_(channel) {}

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(members_.size()); }

  void start(std::span<const Message> messages, const Call& /*call*/) override {
    {
      const std::lock_guard lock(own().mutex);
      ++own().n_started;
      shared_->set_waits(own(), false);
    }
    if (shared_->on_start) shared_->on_start(world_rank(rank_), own().n_started);
    pending_.clear();
    for (const Message& message : messages) {
      if (message.direction == Message::Direction::receive) {
        pending_.push_back(message);
        continue;
      }
      const auto* const data = static_cast<const std::byte*>(message.data);
      Mailbox& to = mailbox(message.peer);
      {
        const std::lock_guard lock(to.mutex);
        to.messages[{channel_, rank_}].emplace_back(data, data + message.n_bytes);
        shared_->set_waits(to, false);
      }
      to.changed.notify_all();
      const std::lock_guard lock(own().mutex);
      ++own().sent.n_messages;
      own().sent.n_bytes += message.n_bytes;
      Traffic& sent = own().sent_to[static_cast<std::size_t>(world_rank(message.peer))];
      ++sent.n_messages;
      sent.n_bytes += message.n_bytes;
    }
  }
  bool test() override {
    const std::lock_guard lock(own().mutex);
    return receive();
  }
  State wait(detail::JobClock::time_point deadline) override {
    std::unique_lock lock(own().mutex);
    const auto end = std::min(deadline, detail::JobClock::now() + kControlInterval);
    bool is_complete = false;
    own().changed.wait_until(lock, end, [&] {
      is_complete = receive();
      shared_->set_waits(own(), !is_complete);
      // Nobody polls for those of a group that has ended.
      return is_complete || !own().control[channel_].empty() || !own().control[kWorld].empty();
    });
    if (is_complete) return State::complete;
    const bool is_over = shared_->ends_when_all_wait &&
                         shared_->n_waiting == static_cast<int>(shared_->mailboxes.size()) &&
                         shared_->ends_when_all_wait(world_rank(rank_));
    return is_over ? State::ended : State::pending;
  }
  std::vector<int> awaited() override {
    std::vector<int> ranks;
    for (const Message& message : pending_) ranks.push_back(message.peer);
    return ranks;
  }

  void send_control(const ControlMessage& message, int to) noexcept override {
    for (int r = 0; r < size(); ++r) {
      if (r == rank_ || (to != kAllRanks && to != r)) continue;
      try {
        post(r, message);
      } catch (const std::bad_alloc&) {  // of a test, which lets one allocation fail: of lockstep's
        post(r, message);
      }
    }
  }
  bool takes_shorter_messages() const noexcept override { return shared_->answers; }
  bool answers_status_queries() const noexcept override { return shared_->answers; }
  std::optional<ControlMessage> poll_control() override {
    const std::lock_guard lock(own().mutex);
    auto& messages = own().control[channel_];
    if (messages.empty()) return std::nullopt;
    auto message = std::move(messages.front());
    messages.pop_front();
    return message;
  }
  std::unique_ptr<message::Transport> split(const std::vector<int>& members, std::int32_t channel,
                                            std::span<const std::byte> /*addresses*/) override {
    std::vector<int> world_ranks;
    for (const int member : members) world_ranks.push_back(world_rank(member));
    const auto mine = static_cast<int>(std::ranges::find(members, rank_) - members.begin());
    return std::make_unique<NetworkTransport>(shared_, std::move(world_ranks), mine, channel);
  }

 private:
  static constexpr std::chrono::milliseconds kControlInterval{50};

  int world_rank(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  using Mailbox = MessageNetwork::Shared::Mailbox;
  Mailbox& mailbox(int rank) {
    return shared_->mailboxes[static_cast<std::size_t>(world_rank(rank))];
  }
  Mailbox& own() { return mailbox(rank_); }

  void post(int to, const ControlMessage& message) {
    Mailbox& box = mailbox(to);
    {
      const std::lock_guard lock(box.mutex);
      box.control[channel_].push_back(message);
    }
    box.changed.notify_all();
  }
  /// Takes what has arrived; true if nothing is left to come. Requires the lock.
  bool receive() {
    std::erase_if(pending_, [this](const Message& message) {
      auto& arrived = own().messages[{channel_, message.peer}];
      if (arrived.empty()) return false;
      const Bytes bytes = std::move(arrived.front());
      arrived.pop_front();
      // Like MPI, it takes a shorter message, and reports a longer one.
      if (bytes.size() > message.n_bytes) throw TransportError("message truncated", message.peer);
      std::memcpy(message.data, bytes.data(), bytes.size());
      ++own().received.n_messages;
      own().received.n_bytes += bytes.size();
      return true;
    });
    return pending_.empty();
  }

  const std::shared_ptr<MessageNetwork::Shared> shared_;
  const std::vector<int> members_;  // ranks of the world
  const int rank_;
  const int channel_;
  std::vector<Message> pending_;  // receives
};

}  // namespace

MessageNetwork::MessageNetwork(int n_ranks, bool answers)
    : shared_(std::make_shared<Shared>(n_ranks, answers)) {}
MessageNetwork::~MessageNetwork() = default;

std::unique_ptr<message::Transport> MessageNetwork::transport(int rank) {
  std::vector<int> all(shared_->mailboxes.size());
  std::iota(all.begin(), all.end(), 0);
  return std::make_unique<NetworkTransport>(shared_, std::move(all), rank,
                                            NetworkTransport::kWorld);
}

void MessageNetwork::on_start(std::function<void(int, int)> function) {
  shared_->on_start = std::move(function);
}

void MessageNetwork::stop() { ++shared_->n_waiting; }

void MessageNetwork::end_calls_when_all_wait(std::function<bool(int)> whose) {
  shared_->ends_when_all_wait = std::move(whose);
}

Traffic MessageNetwork::most() const {
  Traffic most;
  for (const Shared::Mailbox& box : shared_->mailboxes) {
    for (const Traffic& traffic : {box.sent, box.received}) {
      most.n_messages = std::max(most.n_messages, traffic.n_messages);
      most.n_bytes = std::max(most.n_bytes, traffic.n_bytes);
    }
  }
  return most;
}

Traffic MessageNetwork::most(const std::vector<int>& hosts) const {
  std::vector<Traffic> sent(hosts.size()), received(hosts.size());  // by the lowest rank
  const auto add = [](Traffic& to, const Traffic& traffic) {
    to.n_messages += traffic.n_messages;
    to.n_bytes += traffic.n_bytes;
  };
  for (std::size_t from = 0; from < hosts.size(); ++from) {
    for (std::size_t to = 0; to < hosts.size(); ++to) {
      if (hosts[from] == hosts[to]) continue;
      const Traffic& traffic = shared_->mailboxes[from].sent_to[to];
      add(sent[static_cast<std::size_t>(hosts[from])], traffic);
      add(received[static_cast<std::size_t>(hosts[to])], traffic);
    }
  }
  Traffic most;
  for (const auto& traffics : {sent, received}) {
    for (const Traffic& traffic : traffics) {
      most.n_messages = std::max(most.n_messages, traffic.n_messages);
      most.n_bytes = std::max(most.n_bytes, traffic.n_bytes);
    }
  }
  return most;
}

void MessageNetwork::reset_traffic() {
  for (Shared::Mailbox& box : shared_->mailboxes) {
    box.sent = box.received = {};
    box.sent_to.assign(box.sent_to.size(), {});
  }
}

void run_message_ranks(int n_ranks, const std::function<void(Engine&)>& body,
                       MessageNetwork* network) {
  std::optional<MessageNetwork> own;
  if (network == nullptr) network = &own.emplace(n_ranks);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<Engine> engine;
      try {
        engine = message::make("network", network->transport(rank));
        body(*engine);
      } catch (const std::exception& error) {
        if (engine) engine->abandon(error.what());
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace lockstep::test
