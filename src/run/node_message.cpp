#include "run/node_message.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <lockstep/error.hpp>
#include <numeric>
#include <utility>

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

}  // namespace

NodeMessage::NodeMessage(Kind what, std::string_view words) : kind(what) {
  base::copy_text(text, words);
}

std::size_t NodeMessageReader::n_wanted() const {
  if (n_bytes_ < sizeof(NodeMessage)) return sizeof(NodeMessage) - n_bytes_;
  return message_.n_body_bytes - body_.size();
}

void NodeMessageReader::add(std::span<const char> bytes) {
  if (n_bytes_ == sizeof(NodeMessage)) {
    body_.append(bytes.data(), bytes.size());
    return;
  }
  std::memcpy(reinterpret_cast<char*>(&message_) + n_bytes_, bytes.data(), bytes.size());
  n_bytes_ += bytes.size();
}

bool NodeMessageReader::is_foreign() const {
  if (n_bytes_ >= sizeof kGreeting && message_.greeting != kGreeting) return true;
  return n_bytes_ == sizeof(NodeMessage) &&
         message_.n_body_bytes > (accepts_body ? kMaxBodyBytes : 0);
}

std::optional<ReceivedMessage> NodeMessageReader::next() {
  const bool is_of_another = n_bytes_ >= kHeadBytes && message_.protocol != kProtocol;
  if (is_foreign() || (!is_of_another && n_wanted() > 0)) return std::nullopt;
  ReceivedMessage received{.message = message_, .body = std::exchange(body_, {})};
  message_ = {};
  n_bytes_ = 0;
  return received;
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

HelloReply validate_hello(const ReceivedMessage& received, const NodesOptions& options,
                          const ElasticOptions& elastic, const std::string& address, int n_restarts,
                          std::span<const int> ranks_of) {
  const NodeMessage& hello = received.message;
  // Without a secret it may come from anybody, who must not end the job. The node of somebody who
  // mistyped an option gets its error either way, and may come again.
  const Action disagree = options.secret.empty() ? Action::reject : Action::reject_all;
  if (hello.protocol != kProtocol) {
    return {Action::reject,
            fmt::format("a node that connected to {} uses protocol {}, node 0 uses {}; use one "
                        "version of lockstep on all nodes",
                        address, hello.protocol, kProtocol)};
  }
  if (!received.is_authentic) {
    return {Action::reject,
            fmt::format("node {} connected to {} with another --rdzv-secret than node 0; give all "
                        "nodes a file with the same content, or none",
                        hello.node_rank, address)};
  }
  if (hello.kind != Kind::hello || hello.n_ranks < 1 || hello.n_ranks > kMaxRanks) {
    return {Action::ignore};
  }
  if (hello.n_nodes != options.n_nodes) {
    return {disagree,
            fmt::format("nodes at {} disagree: node {} has --nnodes {}, node 0 has --nnodes {}",
                        address, hello.node_rank, hello.n_nodes, options.n_nodes)};
  }
  if (hello.n_restarts != n_restarts) {
    return {disagree,
            fmt::format("nodes at {} disagree: node {} starts after {} restarts, node 0 after {}; "
                        "start all nodes again, with the same --max-restarts",
                        address, hello.node_rank, hello.n_restarts, n_restarts)};
  }
  if (hello.node_rank < 0 || hello.node_rank >= options.n_nodes) {
    return {Action::reject, fmt::format("a launcher connected to {} as node {}; nodes are 0 to {}",
                                        address, hello.node_rank, options.n_nodes - 1)};
  }
  if (ranks_of[static_cast<std::size_t>(hello.node_rank)] != 0) {
    return {disagree,
            fmt::format("two launchers at {} have --node-rank {}; it must be unique, from 0 to {}",
                        address, hello.node_rank, options.n_nodes - 1)};
  }
  if ((hello.has_ucx != 0) != options.has_ucx) {
    return {disagree,
            fmt::format("nodes at {} disagree: node {} has {} liblockstep-ucx.so, node 0 has {}; "
                        "install lockstep-ucx on all nodes, or on none",
                        address, hello.node_rank, hello.has_ucx != 0 ? "the module" : "no",
                        options.has_ucx ? "it" : "none")};
  }
  if (hello.least != elastic.least || hello.most != elastic.most ||
      hello.lease_ms != elastic.lease.count()) {
    return {disagree,
            fmt::format("nodes at {} disagree: node {} has another --elastic or --elastic-lease "
                        "than node 0",
                        address, hello.node_rank)};
  }
  const auto timeout =
      std::clamp<std::int64_t>(hello.timeout_ms, 0, milliseconds(kMaxTimeout).count());
  return {.action = Action::join, .timeout = milliseconds(timeout)};
}

std::string body_of(std::span<const int> ranks_of) {
  return {reinterpret_cast<const char*>(ranks_of.data()), ranks_of.size_bytes()};
}

RankLayout parse_layout(const ReceivedMessage& received, const NodesOptions& options,
                        const std::string& address, int n_ranks) {
  const NodeMessage& reply = received.message;
  if (reply.protocol != kProtocol) {
    throw MismatchError(
        launcher_context(),
        fmt::format(
            "node 0 at {} uses protocol {}, this node {}; use one version of lockstep on all nodes",
            address, reply.protocol, kProtocol));
  }
  if (reply.kind != Kind::placed) throw MismatchError(launcher_context(), text_of(reply));
  if (!received.is_authentic) {
    throw MismatchError(launcher_context(),
                        fmt::format("the process at {} does not have the secret of --rdzv-secret: "
                                    "it is not node 0 of this job",
                                    address));
  }
  std::vector<int> ranks_of(static_cast<std::size_t>(options.n_nodes), -1);
  if (received.body.size() == std::span(ranks_of).size_bytes()) {
    std::memcpy(ranks_of.data(), received.body.data(), received.body.size());
  }
  const std::int64_t last = std::int64_t{reply.first_rank} + n_ranks;
  const bool are_sizes =
      std::ranges::none_of(ranks_of, [](int n) { return n < 1 || n > kMaxRanks; });
  if (!are_sizes || reply.first_rank < 0 || last > reply.world_size ||
      reply.world_size != std::accumulate(ranks_of.begin(), ranks_of.end(), std::int64_t{0}) ||
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
          .key = reply.key,
          .ranks_of = std::move(ranks_of),
          .incarnation = reply.incarnation};
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

ReceivedMessage message_of(const StoreMessage& store) {
  ReceivedMessage sent{.message = NodeMessage(Kind::store), .body = store.bytes};
  sent.message.place = store.place;
  sent.message.process = store.process;
  sent.message.number = store.number;
  sent.message.world = store.world;
  sent.message.n_body_bytes = static_cast<std::uint32_t>(sent.body.size());
  return sent;
}

StoreMessage read_store(const ReceivedMessage& received, int node) {
  const NodeMessage& message = received.message;
  return {.node = node,
          .place = message.place,
          .process = message.process,
          .number = message.number,
          .world = message.world,
          .bytes = received.body};
}

NodeMessage message_of(const NodeEvent& event) {
  NodeMessage message(Kind::event, event.why);
  message.sort = static_cast<std::uint32_t>(event.kind);
  message.place = event.place;
  message.generation = event.generation;
  message.flag = event.is_done ? 1 : 0;
  message.limit_ms = event.limit.count();
  message.exit_code = event.exit_code;
  message.sent_ns = event.sent.time_since_epoch().count();
  return message;
}

std::optional<NodeEvent> read_event(const NodeMessage& message, int node) {
  if (message.sort > static_cast<std::uint32_t>(NodeEvent::Kind::completed_step))
    return std::nullopt;
  return NodeEvent{
      .kind = static_cast<NodeEvent::Kind>(message.sort),
      .node = node,
      .incarnation = message.incarnation,
      .number = message.number,
      .place = message.place,
      .generation = message.generation,
      .is_done = message.flag != 0,
      .limit = std::clamp(milliseconds(message.limit_ms), milliseconds(0), kMaxTimeout),
      .sent = NodeLease::Clock::time_point(NodeLease::Clock::duration(message.sent_ns)),
      .why = text_of(message),
      .exit_code = message.exit_code};
}

namespace {

template <class T>
void append(std::string& body, const std::vector<T>& items) {
  body.append(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
}

template <class T>
std::vector<T> take(std::string_view& body, std::size_t n) {
  std::vector<T> items(n);
  if (n > 0) std::memcpy(items.data(), body.data(), n * sizeof(T));
  body.remove_prefix(n * sizeof(T));
  return items;
}

}  // namespace

ReceivedMessage message_of(const NodeCommand& command) {
  ReceivedMessage sent{.message = NodeMessage(Kind::command, command.text), .body = {}};
  NodeMessage& message = sent.message;
  message.sort = static_cast<std::uint32_t>(command.kind);
  message.sent_ns = command.sent.time_since_epoch().count();
  message.place = command.place;
  message.generation = command.generation;
  message.number = static_cast<std::uint64_t>(command.number);
  message.flag = command.has_earlier_steps ? 1 : 0;
  message.n_items = static_cast<std::uint32_t>(command.ranks.size());
  message.n_lost = static_cast<std::uint32_t>(command.lost.size());
  append(sent.body, command.ranks);
  append(sent.body, command.lost);
  message.n_body_bytes = static_cast<std::uint32_t>(sent.body.size());
  return sent;
}

std::optional<NodeCommand> read_command(const ReceivedMessage& received) {
  const NodeMessage& message = received.message;
  if (message.sort > static_cast<std::uint32_t>(NodeCommand::Kind::waiting) ||
      received.body.size() !=
          message.n_items * sizeof(NodeCommand::Rank) + message.n_lost * sizeof(shared::Lost)) {
    return std::nullopt;
  }
  NodeCommand command{
      .kind = static_cast<NodeCommand::Kind>(message.sort),
      .sent = NodeLease::Clock::time_point(NodeLease::Clock::duration(message.sent_ns)),
      .place = message.place,
      .generation = message.generation,
      .number = static_cast<int>(message.number),
      .text = text_of(message),
      .has_earlier_steps = message.flag != 0};
  std::string_view body = received.body;
  command.ranks = take<NodeCommand::Rank>(body, message.n_items);
  command.lost = take<shared::Lost>(body, message.n_lost);
  return command;
}

}  // namespace lockstep::run
