#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "run/nodes.hpp"
#include "run/options.hpp"

/// Messages between the launchers of one world, and their parsing. Everything received is untrusted
/// until checked.
namespace lockstep::run {

inline constexpr std::uint64_t kGreeting = 0x7365646f6e736b6cULL;
inline constexpr std::uint32_t kProtocol = 4;

enum class NodeMessageKind : std::uint32_t {
  hello,     // to node 0: node rank, number of ranks
  placed,    // from node 0: all have connected; text has the run id
  rejected,  // from node 0: text has the reason
  address,   // what a rank tells the others of its world: to node 0, which sends it to the others
  done,      // to node 0: all ranks here succeeded
  all_done,
  failed,
};

/// The first three fields never change. All machines of a world have the same byte order.
struct NodeMessage {
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
  std::int32_t rank = -1;                      ///< of failed: that failed; of address: whose
  std::uint32_t key = 0;                       ///< of placed
  std::uint32_t has_ucx = 0;                   ///< of hello
  std::uint32_t n_address_bytes = 0;           ///< of address, in text
  std::uint64_t world = 0;                     ///< of address
  std::array<char, kMaxSecretBytes> secret{};  ///< of hello and placed
  std::array<char, 1056> text{};

  NodeMessage() = default;
  explicit NodeMessage(NodeMessageKind what, std::string_view words = {});
  void set_secret(std::string_view words);
};

/// Extracts complete messages from a byte stream.
class NodeMessageReader {
 public:
  /// The number of bytes that add() accepts now.
  std::size_t n_wanted() const { return sizeof(NodeMessage) - n_bytes_; }
  void add(std::span<const char> bytes);
  /// The message received, if complete; of another protocol version: only its head is valid.
  std::optional<NodeMessage> next();
  /// The bytes do not come from lockstep.
  bool is_foreign() const;

 private:
  NodeMessage message_;
  std::size_t n_bytes_ = 0;  ///< bytes of message_ received
};

/// The text of a message, with unprintable bytes replaced.
std::string text_of(const NodeMessage& message);

/// Node 0's reaction to a connection.
struct HelloReply {
  enum class Action : std::uint8_t {
    join,
    ignore,      ///< not a launcher that is starting
    reject,      ///< not part of this job: gets an error; the wait for the others continues
    reject_all,  ///< the nodes disagree: all get an error and exit
  };
  Action action = Action::join;
  std::string text{};                   ///< of reject and reject_all
  std::chrono::milliseconds timeout{};  ///< of join
};

/// `ranks_of`: the number of ranks of each connected node, else 0. `address`: for texts.
HelloReply validate_hello(const NodeMessage& hello, const NodesOptions& options,
                          const std::string& address, int n_restarts,
                          std::span<const int> ranks_of);

/// Parses node 0's reply to the hello of a node with n_ranks ranks; sets all but master_addr.
/// Throws MismatchError.
RankLayout parse_layout(const NodeMessage& reply, const NodesOptions& options,
                        const std::string& address, int n_ranks);

/// The content of `failed`: never an exit code of success.
NodeFailure read_failed(const NodeMessage& message);

NodeMessage message_of(const RankAddress& address);
/// The rank may be any number.
RankAddress read_address(const NodeMessage& message);

}  // namespace lockstep::run
