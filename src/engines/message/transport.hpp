#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/engine.hpp>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/patience.hpp"
#include "engines/message/header.hpp"
#include "engines/message/message.hpp"
#include "group/failure.hpp"

namespace lockstep::message {

/// For which ranks another rank waits in the exchanges of its channel.
struct WaitState {
  std::int32_t rank = -1;  ///< whose wait state
  /// The ranks whose messages it waits for, or the first of them; none if it does not wait.
  internal::PeerList awaited{};
  std::uint64_t number = 0;  ///< of its last collective, if the channel has levels
  Header header{};           ///< of that
};
static_assert(std::is_trivially_copyable_v<WaitState>);

/// Sent in addition to the messages of a channel. Rank numbers are those of that channel.
struct ControlMessage {
  enum class Kind : std::int32_t {
    failure,       ///< the channel is dead
    departure,     ///< the culprit leaves the world: peer_left, or peer_failed with its reason
    status_query,  ///< of wait_state.rank, to ranks that have begun collective wait_state.number
    status_reply,  ///< the answer
    refusal,  ///< of wait_state.rank, after its call wait_state.number; see MessageChannel::refuse
  };
  Kind kind = Kind::failure;
  internal::Failure failure{};
  WaitState wait_state{};
};

/// The library failed, with its own text.
class TransportError : public std::runtime_error {
 public:
  static constexpr int kNoPeer = -1;

  explicit TransportError(const std::string& text, int peer = kNoPeer, bool is_closed = false)
      : std::runtime_error(text), peer_(peer), is_closed_(is_closed) {}
  /// The rank whose connection failed, if that is known.
  int peer() const noexcept { return peer_; }
  bool is_closed() const noexcept { return is_closed_; }  ///< the peer closed it, or has ended

 private:
  int peer_;
  bool is_closed_;
};

/// The ranks of one channel over a message-passing library: all that such a library must provide.
/// Channels are numbered: the world's number is kWorld, the others' are unique over all ranks.
/// Messages between two ranks arrive in order, and never on another channel. Point-to-point rather
/// than the library's own collectives, to identify the rank that is late, lost or failed.
///
/// An exchange is start(), then test() and wait() until it is complete, or else cancel().
/// start, test, wait, awaited and split throw TransportError.
///
/// Threads: one at a time per channel; poll_control: one at a time; send_control: any. If there is
/// a why_one_thread(): only the thread that created it, except for send_control.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// See Engine::why_one_thread.
  virtual std::string_view why_one_thread() const noexcept { return {}; }

  /// Sends and receives all messages at once, none of them empty. `call` is for a UsageError.
  virtual void start(std::span<const Message> messages, const Call& call) = 0;
  /// Whether all messages are complete. Does not wait.
  virtual bool test() { return false; }
  enum class State {
    complete,
    pending,  ///< call wait() again after polling the control messages
    ended,    ///< at the deadline or by a control message; do not call wait() again
  };
  virtual State wait(detail::JobClock::time_point deadline) = 0;
  /// After wait(): the ranks whose messages are incomplete, in any order and number.
  virtual std::vector<int> awaited() = 0;
  /// Ends an exchange that is not complete: the caller may reuse its messages' memory, and the
  /// library no longer writes to it, as far as the library can guarantee that (docs/mpi.md).
  virtual void cancel() noexcept {}
  /// Whether a message may be shorter than its receive.
  virtual bool takes_shorter_messages() const noexcept { return false; }
  /// A hint: these messages will be exchanged often, from the same span; their receives do not
  /// change.
  virtual void prepare(std::span<const Message> /*messages*/) {}
  /// Whether messages do not cross a network: bytes then cost little compared with messages.
  virtual bool is_on_one_host() const noexcept { return false; }
  /// The best size of an exchange when bandwidth matters, not latency.
  virtual std::size_t piece_bytes() const noexcept {
    return std::numeric_limits<std::size_t>::max();
  }

  static constexpr int kAllRanks = -1;
  /// To a rank, or to all other ranks of the channel. A failure also ends this rank's own
  /// wait() on another thread (with `to` == rank(), only that). Blocks only for a departure.
  virtual void send_control(const ControlMessage& message, int to = kAllRanks) noexcept = 0;
  /// The next control message from another rank.
  virtual std::optional<ControlMessage> poll_control() = 0;
  /// Why whoever started the ranks has ended their world, with the rank of the world that was lost
  /// as culprit, if that is known.
  virtual std::optional<internal::Failure> verdict() const { return std::nullopt; }
  /// How long the reason of a broken connection may take to arrive as a control message.
  virtual std::chrono::milliseconds time_of_reason() const noexcept {
    return base::patience::kControlMessage;
  }
  /// How often to poll before an exchange, which may not have to wait and so not poll at all.
  virtual int n_polls_before_exchange() noexcept { return 1; }

  /// Up to this many ranks exchange short messages directly, every two of them.
  static constexpr int kMaxDirect = 8;
  /// Whether wait() returns often while it waits, to answer the query for which ranks this one
  /// waits. More than kMaxDirect ranks then exchange short messages in levels.
  virtual bool answers_status_queries() const noexcept { return false; }

  static constexpr std::int32_t kWorld = 1;  // 0: for messages of the transport's own
  /// The largest number that a channel may have.
  virtual std::int32_t last_channel() const noexcept {
    return std::numeric_limits<std::int32_t>::max();
  }
  /// What the others need to know of this rank to split(), which is the next call: address_bytes().
  virtual std::vector<std::byte> open_part() { return {}; }
  virtual std::size_t address_bytes() const noexcept { return 0; }
  /// The transport of the channel of `members`, ranks of this one that include this rank. Sends no
  /// messages, so it does not wait. addresses: what open_part() has returned on the members.
  virtual std::unique_ptr<Transport> split(const std::vector<int>& members, std::int32_t channel,
                                           std::span<const std::byte> addresses) = 0;
};

}  // namespace lockstep::message
