// Whatever bytes arrive at the port of `lockstep run --rdzv`, in whatever pieces, a launcher
// accepts no invalid message: at node 0 a node's hello, at the others their ranks, why a node
// failed, and what launchers of an elastic job tell each other.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <lockstep/error.hpp>
#include <span>
#include <string>

#include "run/link_key.hpp"
#include "run/node_message.hpp"

namespace {

using namespace lockstep::run;

void require(bool holds) {
  if (!holds) std::abort();
}

void require_printable(const std::string& text) {
  require(text.size() < sizeof(NodeMessage));
  require(std::ranges::none_of(text, [](unsigned char c) { return c < ' ' && c != '\n'; }));
}

void come_to_node_0(const ReceivedMessage& received, const NodesOptions& options) {
  const NodeMessage& message = received.message;
  std::array<int, 3> ranks_of = {2, 0, 4};
  const HelloReply welcome =
      validate_hello(received, options, ElasticOptions{}, "host:1", /*n_restarts=*/1, ranks_of);
  if (welcome.action == HelloReply::Action::reject_all) {
    require(received.is_authentic && !options.secret.empty());
  }
  if (welcome.action == HelloReply::Action::join) {
    require(received.is_authentic);
    require(message.node_rank == 1 && message.n_ranks >= 1 && message.n_ranks <= kMaxRanks);
    const auto now = std::chrono::steady_clock::now();
    require(now + welcome.timeout >= now);
  }
}

void answer(const ReceivedMessage& message, const NodesOptions& options) {
  try {
    constexpr int kRanks = 2;
    const RankLayout placement = parse_layout(message, options, "host:1", kRanks);
    require(message.is_authentic);
    require(placement.first_rank >= 0 && placement.first_rank + kRanks <= placement.world_size);
    require(placement.world_size <= options.n_nodes * kMaxRanks && placement.master_port > 0);
    require(placement.ranks_of.size() == static_cast<std::size_t>(options.n_nodes));
  } catch (const lockstep::MismatchError& error) {
    require_printable(error.text());
  }
}

/// Of an elastic job.
void report_and_decide(const ReceivedMessage& received) {
  if (const auto event = read_event(received.message, /*node=*/1)) {
    require(event->kind <= NodeEvent::Kind::completed_step);
    require_printable(event->why);
  }
  if (const auto command = read_command(received)) {
    require(command->kind <= NodeCommand::Kind::waiting);
    require(command->ranks.size() * sizeof(NodeCommand::Rank) +
                command->lost.size() * sizeof(lockstep::shared::Lost) ==
            received.body.size());
    require_printable(command->text);
  }
}

}  // namespace

/// The first byte: in pieces of how many bytes, and with which secret, the rest comes.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::size_t n_piece = 1 + data[0] / 2;
  const NodesOptions options{.n_nodes = 3,
                             .node_rank = 1,
                             .host = "host",
                             .port = 1,
                             .secret = data[0] % 2 == 0 ? "" : "the secret of this job"};
  std::span<const char> rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  NodeMessageReader reader;
  LinkKey key(options.secret, /*is_node_0=*/true);
  key.complete({});
  while (!rest.empty()) {
    const std::size_t n = std::min({n_piece, reader.n_wanted(), rest.size()});
    require(n > 0);
    reader.add(rest.first(n));
    rest = rest.subspan(n);
    if (reader.is_foreign()) return 0;  // the connection ends
    while (auto received = reader.next()) {
      const NodeMessage& message = received->message;
      require(message.greeting == kGreeting);
      require(!key.verify(message, received->body));
      for (const bool is_authentic : {false, true}) {
        received->is_authentic = is_authentic;
        come_to_node_0(*received, options);
        answer(*received, options);
      }
      report_and_decide(*received);
      const NodeFailure failure = read_failed(message);
      require(failure.exit_code >= 1 && failure.exit_code <= 255);
      require_printable(failure.text);
    }
  }
  return 0;
}
