#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "engines/shared/bootstrap/launcher_socket.hpp"
#include "run/elastic_membership.hpp"
#include "run/node_lease.hpp"
#include "run/options.hpp"
#include "run/rank_layout.hpp"

/// Messages between the launchers of one world, and their parsing. Everything received is untrusted
/// until checked.
namespace lockstep::run {

inline constexpr std::uint64_t kGreeting = 0x7365646f6e736b6cULL;
inline constexpr std::uint32_t kProtocol = 6;
/// Limit of what follows a message.
inline constexpr std::size_t kMaxBodyBytes = std::size_t{1} << 20U;

enum class NodeMessageKind : std::uint32_t {
  // The first two of a link: LinkKey.
  connect,
  challenge,
  hello,     // to node 0: node rank, number of ranks
  placed,    // from node 0: all have connected; text has the run id
  rejected,  // from node 0: text has the reason
  address,   // what a rank tells the others of its world: to node 0, which sends it to the others
  done,      // to node 0: all ranks here succeeded
  all_done,
  failed,
  event,    // of an elastic job, to node 0: NodeEvent
  command,  // the same, from node 0: NodeCommand
  store,    // StoreMessage: what a rank asks, to node 0, which answers with another
};

/// What node 0's launcher decides of an elastic job, for the launcher of each node to do.
struct NodeCommand {
  enum class Kind : std::uint32_t {
    echo,     // of the heartbeat that was sent at `sent`
    start,    // a process for `place`
    kill,     // that of `place`: see ElasticMembership::Kill
    refuse,   // the rank of `place`, which has asked: the others went on without it
    end,      // the generation is over; text says why
    choose,   // the next one
    form,     // all its ranks have given their addresses
    waiting,  // `number` replacements wait for the next one
  };
  Kind kind = Kind::echo;
  NodeLease::Clock::time_point sent{};
  int place = -1;
  int generation = -1;
  int number = 0;
  std::string text{};
  /// Of choose, by rank: its place, and the generation in which its process was first a rank.
  struct Rank {
    std::int32_t place;
    std::int32_t first_generation;
  };
  std::vector<Rank> ranks{};
  std::vector<shared::Lost> lost{};  ///< in generations that ranks may ask from
  bool has_earlier_steps = false;    ///< an earlier generation has completed one
};

/// The first three fields never change. All machines of a world have the same byte order.
struct NodeMessage {
  using Nonce = std::array<unsigned char, 32>;
  using Code = std::array<unsigned char, 32>;

  std::uint64_t greeting = kGreeting;
  std::uint32_t protocol = kProtocol;
  NodeMessageKind kind = NodeMessageKind::hello;
  std::int32_t node_rank = 0;
  std::int32_t n_nodes = 0;
  std::int32_t n_ranks = 0;
  std::int32_t n_restarts = 0;
  std::int64_t timeout_ms = 0;  ///< timeout of the sender of hello
  std::int32_t first_rank = 0;
  std::int32_t world_size = 0;
  std::int32_t master_port = 0;
  std::int32_t exit_code = 0;
  std::uint32_t interrupted = 0;
  std::int32_t rank = -1;     ///< of failed: that failed; of address: whose
  std::uint32_t key = 0;      ///< of placed
  std::uint32_t has_ucx = 0;  ///< of hello
  std::int32_t least = 0;     ///< of hello: ElasticOptions, the next two too
  std::int32_t most = 0;
  std::int64_t lease_ms = 0;
  std::int32_t incarnation = 0;           ///< of placed and event
  std::uint32_t sort = 0;                 ///< kind of an event, or of a command
  std::uint64_t number = 0;               ///< of events, commands and store
  std::int64_t sent_ns = 0;               ///< of a heartbeat and its echo
  std::int64_t limit_ms = 0;              ///< of an event
  std::int32_t place = -1;                ///< of events, commands and store
  std::int32_t generation = -1;           ///< of events and commands
  std::uint32_t flag = 0;                 ///< of an event: is_done; of a command: has_earlier_steps
  std::uint32_t n_items = 0, n_lost = 0;  ///< in the body
  std::uint32_t n_body_bytes = 0;         ///< that follow the message
  std::uint32_t n_address_bytes = 0;      ///< of address, in text
  std::int32_t process = 0;               ///< of store
  std::uint64_t world = 0;                ///< of address and store
  Nonce nonce{};                          ///< of connect and challenge
  Code code{};                            ///< of all others: see LinkKey
  std::array<char, 1056> text{};

  NodeMessage() = default;
  explicit NodeMessage(NodeMessageKind what, std::string_view words = {});
};
static_assert(std::has_unique_object_representations_v<NodeMessage>, "a code covers every byte");

/// A message and what follows it.
struct ReceivedMessage {
  NodeMessage message;
  std::string body;
  bool is_authentic = false;  ///< its sender has the secret; without one: it follows the protocol
};

/// Extracts complete messages from a byte stream.
class NodeMessageReader {
 public:
  /// The number of bytes that add() accepts now.
  std::size_t n_wanted() const;
  void add(std::span<const char> bytes);
  /// The message received, if complete; of another protocol version: only its head is valid.
  std::optional<ReceivedMessage> next();
  /// The bytes do not come from lockstep, or more follow than accepts_body allows.
  bool is_foreign() const;
  bool accepts_body = true;

 private:
  NodeMessage message_;
  std::size_t n_bytes_ = 0;  ///< bytes of message_ received
  std::string body_;
};

/// The text of a message, with unprintable bytes replaced.
std::string text_of(const NodeMessage& message);

/// Node 0's reaction to a connection.
struct HelloReply {
  enum class Action : std::uint8_t {
    join,
    ignore,      ///< not a launcher that is starting
    reject,      ///< not part of this job: gets an error; the wait for the others continues
    reject_all,  ///< a node that has proved the secret disagrees: all get an error and exit
  };
  Action action = Action::join;
  std::string text{};                   ///< of reject and reject_all
  std::chrono::milliseconds timeout{};  ///< of join
};

/// `ranks_of`: the number of ranks of each connected node, else 0. `address`: for texts.
HelloReply validate_hello(const ReceivedMessage& received, const NodesOptions& options,
                          const ElasticOptions& elastic, const std::string& address, int n_restarts,
                          std::span<const int> ranks_of);

/// Parses node 0's reply to the hello of a node with n_ranks ranks; sets all but master_addr.
/// Throws MismatchError.
RankLayout parse_layout(const ReceivedMessage& received, const NodesOptions& options,
                        const std::string& address, int n_ranks);
/// The body of `placed`: how many ranks each node has.
std::string body_of(std::span<const int> ranks_of);

/// The content of `failed`: never an exit code of success.
NodeFailure read_failed(const NodeMessage& message);

NodeMessage message_of(const RankAddress& address);
/// The rank may be any number.
RankAddress read_address(const NodeMessage& message);

ReceivedMessage message_of(const StoreMessage& store);
StoreMessage read_store(const ReceivedMessage& received, int node);

/// Without what Nodes adds: incarnation and number.
NodeMessage message_of(const NodeEvent& event);
/// Of a node; nullopt: of a kind that is unknown.
std::optional<NodeEvent> read_event(const NodeMessage& message, int node);
ReceivedMessage message_of(const NodeCommand& command);
/// nullopt: damaged.
std::optional<NodeCommand> read_command(const ReceivedMessage& received);

}  // namespace lockstep::run
