#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fd.hpp"
#include "cli/command.hpp"
#include "cli/nodes.hpp"
#include "run/node_message.hpp"
#include "support/temporary_folder.hpp"

// The secret of `lockstep run --rdzv-secret`, and somebody on the network who wants to join.
namespace lockstep::test {
namespace {

using run::NodeMessage;
using Kind = run::NodeMessageKind;

const std::string kSecret = "the secret of this job";

NodeMessage message_of(Kind kind) {
  NodeMessage message;
  message.kind = kind;
  return message;
}

void put(const base::UniqueFd& fd, const NodeMessage& message) {
  ASSERT_EQ(::send(fd.get(), &message, sizeof message, MSG_NOSIGNAL),
            static_cast<ssize_t>(sizeof message));
}

/// The next message, without its body.
NodeMessage take(const base::UniqueFd& fd) {
  NodeMessage message;
  EXPECT_EQ(::recv(fd.get(), &message, sizeof message, MSG_WAITALL),
            static_cast<ssize_t>(sizeof message));
  return message;
}

class Listener {
 public:
  Listener() {
    sockaddr_in address = loopback(0);
    socklen_t n_bytes = sizeof address;
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(fd_.get(), generic, n_bytes), 0);
    EXPECT_EQ(::getsockname(fd_.get(), generic, &n_bytes), 0);
    EXPECT_EQ(::listen(fd_.get(), 4), 0);
    rendezvous_ = fmt::format("127.0.0.1:{}", ntohs(address.sin_port));
  }
  const std::string& rendezvous() const { return rendezvous_; }
  base::UniqueFd accept() const { return base::UniqueFd(::accept(fd_.get(), nullptr, nullptr)); }
  /// Ends accept().
  void stop() const { ::shutdown(fd_.get(), SHUT_RDWR); }

 private:
  base::UniqueFd fd_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::string rendezvous_;
};

/// Passes one connection on to node 0, and records what it carries.
class Relay {
 public:
  explicit Relay(std::string to) : to_(std::move(to)), thread_([this] { run(); }) {}
  ~Relay() { stop(); }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  const std::string& rendezvous() const { return listener_.rendezvous(); }
  /// Of the node, and of node 0. Both have ended.
  const std::array<std::string, 2>& recorded() {
    stop();
    return recorded_;
  }

 private:
  void run() {
    const base::UniqueFd node = listener_.accept();
    if (!node) return;
    const base::UniqueFd node_0 = connect_to(to_);
    const std::array<int, 2> from{node.get(), node_0.get()};
    for (;;) {
      std::array<pollfd, 2> entries{{{from[0], POLLIN, 0}, {from[1], POLLIN, 0}}};
      ::poll(entries.data(), entries.size(), -1);
      for (std::size_t i = 0; i < 2; ++i) {
        if (entries[i].revents == 0) continue;
        std::array<char, 4096> bytes;
        const ssize_t n = ::recv(from[i], bytes.data(), bytes.size(), 0);
        if (n <= 0) return;  // which closes both
        recorded_[i].append(bytes.data(), static_cast<std::size_t>(n));
        ::send(from[1 - i], bytes.data(), static_cast<std::size_t>(n), MSG_NOSIGNAL);
      }
    }
  }
  void stop() {
    listener_.stop();
    if (thread_.joinable()) thread_.join();
  }

  Listener listener_;
  std::string to_;
  std::array<std::string, 2> recorded_;
  std::thread thread_;
};

class RunNodesSecretTest : public ::testing::Test {
 protected:
  RunNodesSecretTest() { std::ofstream(file_) << kSecret << '\n'; }

  std::unique_ptr<Command> start_node(int node, const std::string& rendezvous) const {
    return start({.node_rank = node,
                  .rendezvous = rendezvous,
                  .n_ranks = 1,
                  .script = "echo $RANK",
                  .timeout_s = "60",
                  .options = {"--rdzv-secret", file_}});
  }
  static void expect_success(Command& first, Command& second) {
    const Ended ended = first.wait();
    EXPECT_EQ(ended.out, "0\n") << ended.err;
    EXPECT_EQ(second.wait().out, "1\n") << second.err();
  }

  const TemporaryFolder folder_;
  const std::string file_ = folder_ / "secret";
};

TEST_F(RunNodesSecretTest, who_listens_sees_no_secret_and_cannot_join_with_what_it_heard) {
  const std::string rendezvous = free_rendezvous();
  const auto first = start_node(0, rendezvous);
  Relay relay(rendezvous);
  const auto second = start_node(1, relay.rendezvous());
  expect_success(*first, *second);
  const auto& [of_node, of_node_0] = relay.recorded();
  for (const std::string& heard : {of_node, of_node_0}) {
    EXPECT_GE(heard.size(), 2 * sizeof(NodeMessage));
    EXPECT_EQ(heard.find(kSecret), std::string::npos);
    EXPECT_EQ(heard.find(kSecret.substr(0, 8)), std::string::npos);
  }

  // The next job with the same secret.
  const std::string rendezvous_2 = free_rendezvous();
  const auto first_2 = start_node(0, rendezvous_2);
  const base::UniqueFd replaying = connect_to(rendezvous_2);
  const std::string handshake = of_node.substr(0, 2 * sizeof(NodeMessage));
  ASSERT_EQ(::send(replaying.get(), handshake.data(), handshake.size(), MSG_NOSIGNAL),
            std::ssize(handshake));
  EXPECT_EQ(take(replaying).kind, Kind::challenge);
  const NodeMessage reply = take(replaying);
  EXPECT_EQ(reply.kind, Kind::rejected);
  EXPECT_TRUE(contains(reply.text.data(), "another --rdzv-secret")) << reply.text.data();
  expect_success(*first_2, *start_node(1, rendezvous_2));
}

TEST_F(RunNodesSecretTest, node_0_that_does_not_prove_the_secret_is_refused) {
  for (const bool has_recorded_code : {false, true}) {
    const Listener impostor;
    const auto node = start_node(1, impostor.rendezvous());
    const base::UniqueFd connection = impostor.accept();
    NodeMessage challenge = message_of(Kind::challenge);
    challenge.nonce = take(connection).nonce;
    put(connection, challenge);
    const NodeMessage hello = take(connection);
    EXPECT_EQ(hello.kind, Kind::hello);
    NodeMessage placed = message_of(Kind::placed);
    if (has_recorded_code) placed.code = hello.code;
    put(connection, placed);
    const Ended ended = node->wait();
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_TRUE(contains(ended.err, "the process at " + impostor.rendezvous() +
                                        " does not have the secret of --rdzv-secret"))
        << ended.err;
  }
}

TEST_F(RunNodesSecretTest, who_stops_in_the_handshake_does_not_disturb) {
  const std::string rendezvous = free_rendezvous();
  const auto first = start_node(0, rendezvous);
  std::vector<base::UniqueFd> strangers;
  const NodeMessage connect = message_of(Kind::connect);
  for (int i = 0; i < 100; ++i) {
    strangers.push_back(connect_to(rendezvous));
    const std::size_t n_bytes = i % 2 == 0 ? sizeof connect : sizeof connect / 2;
    ASSERT_EQ(::send(strangers.back().get(), &connect, n_bytes, MSG_NOSIGNAL),
              static_cast<ssize_t>(n_bytes));
  }
  EXPECT_EQ(take(strangers[0]).kind, Kind::challenge);
  expect_success(*first, *start_node(1, rendezvous));
}

TEST_F(RunNodesSecretTest, who_has_no_secret_cannot_end_the_job) {
  const std::string rendezvous = free_rendezvous();
  const auto first = start_node(0, rendezvous);
  const base::UniqueFd stranger = connect_to(rendezvous);
  put(stranger, message_of(Kind::connect));
  EXPECT_EQ(take(stranger).kind, Kind::challenge);
  NodeMessage hello = message_of(Kind::hello);
  hello.n_nodes = 3;
  hello.n_ranks = 1;
  put(stranger, hello);
  EXPECT_EQ(take(stranger).kind, Kind::rejected);
  expect_success(*first, *start_node(1, rendezvous));
}

}  // namespace
}  // namespace lockstep::test
