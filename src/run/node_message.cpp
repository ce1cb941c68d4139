#include "run/node_message.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <lockstep/error.hpp>

#include "base/text.hpp"
#include "run/errors.hpp"

namespace lockstep::run {
namespace {

using Kind = NodeMessageKind;
using Action = HelloReply::Action;
using std::chrono::milliseconds;

constexpr std::size_t kHeadBytes = offsetof(NodeMessage, kind);
constexpr int kMaxPort = 65535;
constexpr int kMostRanks = 1 << 24;  // of a world
/// Longer than any wait; sums with it do not overflow a clock.
constexpr milliseconds kMaxTimeout = std::chrono::hours(24 * 365);

/// Constant-time comparison, so the secret cannot be guessed byte by byte.
bool has_secret(const NodeMessage& message, std::string_view secret) {
  NodeMessage expected;
  expected.set_secret(secret);
  unsigned differences = 0;
  for (std::size_t i = 0; i < kMaxSecretBytes; ++i) {
    differences |= static_cast<unsigned char>(message.secret[i] ^ expected.secret[i]);
  }
  return differences == 0;
}

}  // namespace

NodeMessage::NodeMessage(Kind what, std::string_view words) : kind(what) {
  base::copy_text(text, words);
}

void NodeMessage::set_secret(std::string_view words) { words.copy(secret.data(), secret.size()); }

void NodeMessageReader::add(std::span<const char> bytes) {
  std::memcpy(reinterpret_cast<char*>(&message_) + n_bytes_, bytes.data(), bytes.size());
  n_bytes_ += bytes.size();
}

bool NodeMessageReader::is_foreign() const {
  return n_bytes_ >= sizeof kGreeting && message_.greeting != kGreeting;
}

std::optional<NodeMessage> NodeMessageReader::next() {
  const bool is_of_another = n_bytes_ >= kHeadBytes && message_.protocol != kProtocol;
  if (is_foreign() || (n_bytes_ < sizeof(NodeMessage) && !is_of_another)) return std::nullopt;
  const NodeMessage message = message_;
  message_ = {};
  n_bytes_ = 0;
  return message;
}

std::string text_of(const NodeMessage& message) {
  std::string text(base::text_in(message.text));
  // The text is shown on a terminal, which obeys control characters.
  std::ranges::replace_if(
      text,
      [](char c) {
        const auto byte = static_cast<unsigned char>(c);
        return (byte < ' ' && c != '\n') || byte == 0x7f;
      },
      '?');
  return text;
}

HelloReply validate_hello(const NodeMessage& hello, const NodesOptions& options,
                          const std::string& address, int n_restarts,
                          std::span<const int> ranks_of) {
  if (hello.protocol != kProtocol) {
    return {Action::reject,
            fmt::format("a node that connected to {} uses protocol {}, node 0 uses {}; use one "
                        "version of lockstep on all nodes",
                        address, hello.protocol, kProtocol)};
  }
  if (!has_secret(hello, options.secret)) {
    return {Action::reject,
            fmt::format("node {} connected to {} with another --rdzv-secret than node 0; give all "
                        "nodes a file with the same content, or none",
                        hello.node_rank, address)};
  }
  if (hello.kind != Kind::hello || hello.n_ranks < 1 || hello.n_ranks > kMaxRanks) {
    return {Action::ignore};
  }
  if (hello.n_nodes != options.n_nodes) {
    return {Action::reject_all,
            fmt::format("nodes at {} disagree: node {} has --nnodes {}, node 0 has --nnodes {}",
                        address, hello.node_rank, hello.n_nodes, options.n_nodes)};
  }
  if (hello.n_restarts != n_restarts) {
    return {Action::reject_all,
            fmt::format("nodes at {} disagree: node {} starts after {} restarts, node 0 after {}; "
                        "start all nodes again, with the same --max-restarts",
                        address, hello.node_rank, hello.n_restarts, n_restarts)};
  }
  if (hello.node_rank < 0 || hello.node_rank >= options.n_nodes ||
      ranks_of[static_cast<std::size_t>(hello.node_rank)] != 0) {
    return {Action::reject_all,
            fmt::format("two launchers at {} have --node-rank {}; it must be unique, from 0 to {}",
                        address, hello.node_rank, options.n_nodes - 1)};
  }
  if ((hello.has_ucx != 0) != options.has_ucx) {
    return {Action::reject_all,
            fmt::format("nodes at {} disagree: node {} has {} liblockstep-ucx.so, node 0 has {}; "
                        "install lockstep-ucx on all nodes, or on none",
                        address, hello.node_rank, hello.has_ucx != 0 ? "the module" : "no",
                        options.has_ucx ? "it" : "none")};
  }
  const auto timeout =
      std::clamp<std::int64_t>(hello.timeout_ms, 0, milliseconds(kMaxTimeout).count());
  return {.action = Action::join, .timeout = milliseconds(timeout)};
}

RankLayout parse_layout(const NodeMessage& reply, const NodesOptions& options,
                        const std::string& address, int n_ranks) {
  if (reply.protocol != kProtocol) {
    throw MismatchError(
        launcher_context(),
        fmt::format(
            "node 0 at {} uses protocol {}, this node {}; use one version of lockstep on all nodes",
            address, reply.protocol, kProtocol));
  }
  if (reply.kind != Kind::placed) throw MismatchError(launcher_context(), text_of(reply));
  if (!has_secret(reply, options.secret)) {
    throw MismatchError(launcher_context(),
                        fmt::format("the process at {} does not have the secret of --rdzv-secret: "
                                    "it is not node 0 of this job",
                                    address));
  }
  const std::int64_t last = std::int64_t{reply.first_rank} + n_ranks;
  if (reply.first_rank < 0 || last > reply.world_size ||
      reply.world_size > std::int64_t{options.n_nodes} * kMaxRanks || reply.master_port < 1 ||
      reply.master_port > kMaxPort) {
    throw MismatchError(
        launcher_context(),
        fmt::format("node 0 at {} places this node's {} ranks from {} in a world of {}, port {}, "
                    "which is impossible; use one version of lockstep on all nodes",
                    address, n_ranks, reply.first_rank, reply.world_size, reply.master_port));
  }
  return {.node_rank = options.node_rank,
          .n_nodes = options.n_nodes,
          .first_rank = reply.first_rank,
          .world_size = reply.world_size,
          .master_addr = options.host,
          .master_port = static_cast<std::uint16_t>(reply.master_port),
          .run_id = text_of(reply),
          .key = reply.key};
}

NodeFailure read_failed(const NodeMessage& message) {
  constexpr int kMaxExitCode = 255;
  const bool is_code = message.exit_code >= 1 && message.exit_code <= kMaxExitCode;
  return {.exit_code = is_code ? message.exit_code : 1,
          .interrupted = message.interrupted != 0,
          .text = text_of(message),
          .rank = message.rank < 0 || message.rank > kMostRanks ? -1 : message.rank};
}

NodeMessage message_of(const RankAddress& address) {
  NodeMessage message(Kind::address);
  message.rank = address.rank;
  message.world = address.world;
  message.n_address_bytes =
      static_cast<std::uint32_t>(std::min(address.bytes.size(), message.text.size()));
  address.bytes.copy(message.text.data(), message.text.size());
  return message;
}

RankAddress read_address(const NodeMessage& message) {
  const std::size_t n_bytes = std::min<std::size_t>(message.n_address_bytes, message.text.size());
  return {.rank = message.rank, .world = message.world, .bytes = {message.text.data(), n_bytes}};
}

}  // namespace lockstep::run
