#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.hpp"
#include "run/link_key.hpp"
#include "run/node_message.hpp"

namespace lockstep::run {

/// Limit of unidentified connections; the oldest are dropped.
inline constexpr std::size_t kMaxUnidentified = 256;

/// One connection between two launchers: sends and receives complete messages, authenticated by
/// LinkKey.
class Link {
 public:
  /// is_known: to node 0; else it is not identified yet.
  Link(base::UniqueFd fd, std::string_view secret, bool is_known = false);
  void identify(int node) {
    node_rank = node;
    reader_.accepts_body = true;
  }

  int fd() const { return fd_.get(); }
  bool is_open() const { return static_cast<bool>(fd_); }
  void close() { fd_.reset(); }
  /// The other end's address.
  std::string peer() const;

  /// To node 0, at first: hello is sent when it has answered connect.
  void greet(const NodeMessage& hello);
  /// Sends it at once if the connection takes it, and otherwise with send_rest().
  void send(NodeMessage message, std::string_view body = {});
  void send_rest();
  bool has_unsent() const { return !unsent_.empty(); }

  /// The next message, without waiting; of another protocol version: only its head is valid. Closes
  /// the link if the peer closed it or is not lockstep, and if after one that was authentic another
  /// is not.
  std::optional<ReceivedMessage> receive();
  bool is_foreign() const { return reader_.is_foreign(); }

  int node_rank = -1;  ///< of the other end; -1: not identified yet
  bool is_done = false;
  bool is_joining = false;  ///< of an elastic job that runs: asks to be a member
  int incarnation = 1;      ///< that node 0 has given it

 private:
  /// Whether it was one of the two that make the key.
  bool makes_key(const NodeMessage& message);

  base::UniqueFd fd_;
  LinkKey key_;
  std::optional<NodeMessage> hello_;  ///< to be sent with the key
  bool is_proved_ = false;            ///< a message was authentic
  NodeMessageReader reader_;
  std::string unsent_;
};

/// Returns the errno value with which a pending connection could not be accepted; 0: none.
int accept_pending(int listener, std::string_view secret,
                   std::vector<std::unique_ptr<Link>>& links);

}  // namespace lockstep::run
