#include "run/link_key.hpp"

#include <sodium.h>

#include <initializer_list>

#include "run/errors.hpp"

namespace lockstep::run {
namespace {

using Nonce = NodeMessage::Nonce;
using Code = NodeMessage::Code;
static_assert(Code{}.size() == crypto_auth_hmacsha256_BYTES);

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

Code hmac(std::string_view key, std::initializer_list<std::string_view> parts) {
  const auto* const unsigned_key = reinterpret_cast<const unsigned char*>(key.data());
  crypto_auth_hmacsha256_state state;
  ::crypto_auth_hmacsha256_init(&state, unsigned_key, key.size());
  for (const std::string_view part : parts) {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(part.data());
    ::crypto_auth_hmacsha256_update(&state, bytes, part.size());
  }
  Code code;
  ::crypto_auth_hmacsha256_final(&state, code.data());
  return code;
}

}  // namespace

LinkKey::LinkKey(std::string_view secret, bool is_node_0) : secret_(secret), is_node_0_(is_node_0) {
  if (::sodium_init() < 0) throw system_error("libsodium does not start");
  ::randombytes_buf(nonce_.data(), nonce_.size());
}

void LinkKey::complete(const Nonce& others) {
  const Nonce& of_node_k = is_node_0_ ? others : nonce_;
  const Nonce& of_node_0 = is_node_0_ ? nonce_ : others;
  key_ = hmac(secret_, {"lockstep link", bytes_of(of_node_k), bytes_of(of_node_0)});
  is_complete_ = true;
}

void LinkKey::sign(NodeMessage& message, std::string_view body) {
  message.code = code_of(is_node_0_, n_signed_++, message, body);
}

bool LinkKey::verify(const NodeMessage& message, std::string_view body) {
  const Code expected = code_of(!is_node_0_, n_verified_, message, body);
  // In constant time: its duration says nothing about the right code.
  const bool is_right =
      is_complete_ && ::sodium_memcmp(expected.data(), message.code.data(), expected.size()) == 0;
  if (is_right) ++n_verified_;
  return is_right;
}

Code LinkKey::code_of(bool is_of_node_0, std::uint64_t number, NodeMessage message,
                      std::string_view body) const {
  message.code = {};
  const char sender = is_of_node_0 ? '0' : 'k';
  return hmac(bytes_of(key_), {bytes_of(sender), bytes_of(number), bytes_of(message), body});
}

}  // namespace lockstep::run
