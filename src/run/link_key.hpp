#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "run/node_message.hpp"

namespace lockstep::run {

/// Authenticates the messages of one link between launchers, by a secret that neither sends.
///
///     node k                          node 0
///     connect, with a nonce     ->
///                               <-    challenge, with a nonce
///     hello, with a code        ->
///                               <-    placed or rejected, with a code
///
/// The link's key is the HMAC-SHA256 of both nonces under the secret. Each message after the first
/// two has a code: the HMAC-SHA256 under that key of its sender (node 0 or not), of its number and
/// of its bytes. So a right code proves the secret, and what was recorded on another link, altered,
/// repeated, reordered or sent back has none. The nonces are random, 32 bytes each; without a
/// secret whoever reads them has the key.
class LinkKey {
 public:
  /// Throws SystemError.
  LinkKey(std::string_view secret, bool is_node_0);

  const NodeMessage::Nonce& nonce() const { return nonce_; }
  bool is_complete() const { return is_complete_; }
  /// others: the other end's nonce.
  void complete(const NodeMessage::Nonce& others);
  /// Each message is signed once, in the order of sending.
  void sign(NodeMessage& message, std::string_view body);
  /// Whether the message is the next one that the other end has signed.
  bool verify(const NodeMessage& message, std::string_view body);

 private:
  NodeMessage::Code code_of(bool is_of_node_0, std::uint64_t number, NodeMessage message,
                            std::string_view body) const;

  std::string secret_;
  bool is_node_0_;
  bool is_complete_ = false;
  NodeMessage::Nonce nonce_{};
  NodeMessage::Code key_{};
  std::uint64_t n_signed_ = 0;
  std::uint64_t n_verified_ = 0;
};

}  // namespace lockstep::run
