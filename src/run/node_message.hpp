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

/// What launchers of one world send each other, and what a peer's bytes are taken for. All of it is
/// a stranger's until checked.
namespace lockstep::run {

inline constexpr std::uint64_t kGreeting = 0x7365646f6e736b6cULL;
inline constexpr std::uint32_t kProtocol = 2;

enum class NodeMessageKind : std::uint32_t {
  hello,    // to node 0: who, how many ranks
  placed,   // from node 0: all have come
  refused,  // from node 0: text says why
  done,     // to node 0: all ranks here ended well
  all_done,
  failed,
};

/// Fixed in every protocol: the first three fields. Machines of one world have one byte order.
struct NodeMessage {
  std::uint64_t greeting = kGreeting;
  std::uint32_t protocol = kProtocol;
  NodeMessageKind kind = NodeMessageKind::hello;
  std::int32_t node_rank = 0;
  std::int32_t n_nodes = 0;
  std::int32_t n_ranks = 0;
  std::int32_t n_restarts = 0;
  std::int64_t patience_ms = 0;  ///< how long the sender of hello waits
  std::int32_t first_rank = 0;
  std::int32_t world_size = 0;
  std::int32_t master_port = 0;
  std::int32_t exit_code = 0;
  std::uint32_t interrupted = 0;
  std::array<char, kMaxSecretBytes> secret{};  ///< of hello and placed
  std::array<char, 508> text{};

  NodeMessage() = default;
  explicit NodeMessage(NodeMessageKind what, std::string_view words = {});
  void set_secret(std::string_view words);
};

/// Whole messages out of a stream of bytes.
class NodeMessageReader {
 public:
  /// How many bytes add() takes now at most.
  std::size_t n_wanted() const { return sizeof(NodeMessage) - n_bytes_; }
  void add(std::span<const char> bytes);
  /// The message that has come, if one has; of another protocol: only its head is right.
  std::optional<NodeMessage> next();
  /// The bytes are not of lockstep.
  bool is_stranger() const;

 private:
  NodeMessage message_;
  std::size_t n_bytes_ = 0;  ///< of message_ that have come
};

/// Printable, whatever was sent.
std::string text_of(const NodeMessage& message);

/// What node 0 does with who came.
struct Welcome {
  enum class What : std::uint8_t {
    join,
    ignore,      ///< no launcher that just starts
    turn_away,   ///< does not belong here: told so, and the others are waited for as before
    refuse_all,  ///< the nodes disagree: all are told so, and end
  };
  What what = What::join;
  std::string text{};                    ///< of turn_away and refuse_all
  std::chrono::milliseconds patience{};  ///< of join
};

/// `ranks_of`: how many ranks each node has that has come, 0 where none has. `address`: for texts.
Welcome judge_hello(const NodeMessage& hello, const NodesOptions& options,
                    const std::string& address, int n_restarts, std::span<const int> ranks_of);

/// What a node that said hello, of n_ranks, takes from node 0's answer; but for master_addr. Throws
/// MismatchError.
Placement read_placed(const NodeMessage& reply, const NodesOptions& options,
                      const std::string& address, int n_ranks);

/// What `failed` says: never an exit code of success.
NodeFailure read_failed(const NodeMessage& message);

}  // namespace lockstep::run
