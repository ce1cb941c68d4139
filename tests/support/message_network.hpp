#pragma once

#include <cstdint>
#include <functional>
#include <lockstep/engine.hpp>
#include <memory>
#include <vector>

#include "engines/message/transport.hpp"

namespace lockstep::test {

/// What a rank has sent or received, whichever is more, without control messages.
struct Traffic {
  std::uint64_t n_messages = 0;
  std::uint64_t n_bytes = 0;
};

/// A message-passing library whose ranks are threads of this process. It counts.
class MessageNetwork {
 public:
  /// `answers`: see Transport::answers_status_queries, and takes_shorter_messages.
  explicit MessageNetwork(int n_ranks, bool answers = true);
  ~MessageNetwork();
  MessageNetwork(const MessageNetwork&) = delete;
  MessageNetwork& operator=(const MessageNetwork&) = delete;

  /// The world's, once for each rank.
  std::unique_ptr<message::Transport> transport(int rank);
  /// Called by each rank before it starts messages; it may block, as if that rank were stopped.
  void on_start(std::function<void(int rank, int n_started)> function);
  /// The calling rank is about to block, and sends nothing. Once for each rank that does not wait.
  void stop();
  /// Calls time out, for ranks of which `whose` is true, once every rank has stopped or waits for
  /// messages that none sends: later on a slow machine.
  void end_calls_when_all_wait(std::function<bool(int rank)> whose);

  /// Of the rank with the most messages, and of the one with the most bytes. While no call runs.
  Traffic most() const;
  /// The same of hosts, between them. `hosts`: for each rank the lowest on its host.
  Traffic most(const std::vector<int>& hosts) const;
  void reset_traffic();

  struct Shared;

 private:
  std::shared_ptr<Shared> shared_;
};

/// Calls body as every rank of the message engine over a new network, or over `network`, and waits
/// for all. Then throws the first exception of a rank.
void run_message_ranks(int n_ranks, const std::function<void(Engine&)>& body,
                       MessageNetwork* network = nullptr);

}  // namespace lockstep::test
