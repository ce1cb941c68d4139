#include "run/node_link.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/fd.hpp"

// Links of node 0 and another node, and between them somebody who controls the network.
namespace lockstep::run {
namespace {

using Kind = NodeMessageKind;

constexpr std::string_view kSecret = "the secret of this job";
constexpr std::size_t kSize = sizeof(NodeMessage);

struct Ends {
  base::UniqueFd link;
  base::UniqueFd network;
};

Ends make_ends() {
  std::array<int, 2> fds{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds.data()), 0);
  return {base::UniqueFd(fds[0]), base::UniqueFd(fds[1])};
}

/// What the link at the other end has sent since the last call.
std::string take(int fd) {
  std::string taken(16 * kSize, '\0');
  const ssize_t n = ::recv(fd, taken.data(), taken.size(), 0);
  taken.resize(n < 0 ? 0 : static_cast<std::size_t>(n));
  return taken;
}

void put(int fd, std::string_view bytes) {
  ASSERT_EQ(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), std::ssize(bytes));
}

class Network {
 public:
  explicit Network(std::string_view secret_of_0 = kSecret, std::string_view secret_of_k = kSecret)
      : node_0(std::move(at_0_.link), secret_of_0),
        node_k(std::move(at_k_.link), secret_of_k, /*is_known=*/true) {}

  std::string from_0() const { return take(at_0_.network.get()); }
  std::string from_k() const { return take(at_k_.network.get()); }
  void to_0(std::string_view bytes) const { put(at_0_.network.get(), bytes); }
  void to_k(std::string_view bytes) const { put(at_k_.network.get(), bytes); }

 private:
  Ends at_0_ = make_ends();
  Ends at_k_ = make_ends();

 public:
  Link node_0;
  Link node_k;
};

struct Handshake {
  std::string connect, challenge, hello;
};

/// All but the delivery of hello.
Handshake shake_hands(Network& network) {
  NodeMessage hello(Kind::hello, "a host");
  hello.node_rank = 1;
  network.node_k.greet(hello);
  Handshake sent;
  sent.connect = network.from_k();
  network.to_0(sent.connect);
  EXPECT_FALSE(network.node_0.receive());
  sent.challenge = network.from_0();
  network.to_k(sent.challenge);
  EXPECT_FALSE(network.node_k.receive());
  sent.hello = network.from_k();
  EXPECT_EQ(sent.connect.size(), kSize);
  EXPECT_EQ(sent.challenge.size(), kSize);
  EXPECT_EQ(sent.hello.size(), kSize);
  return sent;
}

/// Both ends have proved the secret.
void connect(Network& network) {
  network.to_0(shake_hands(network).hello);
  const auto hello = network.node_0.receive();
  ASSERT_TRUE(hello && hello->is_authentic);
  network.node_0.identify(1);
  network.node_0.send(NodeMessage(Kind::placed));
  network.to_k(network.from_0());
  const auto placed = network.node_k.receive();
  ASSERT_TRUE(placed && placed->is_authentic);
}

bool is_authentic(Link& link) {
  const auto received = link.receive();
  return received && received->is_authentic;
}

TEST(NodeLinkTest, both_ends_prove_the_secret) {
  Network network;
  connect(network);
  for (int i = 0; i < 3; ++i) {
    NodeMessage command(Kind::command, "what follows");
    command.n_body_bytes = 4;
    network.node_0.send(command, "body");
    network.to_k(network.from_0());
    const auto received = network.node_k.receive();
    ASSERT_TRUE(received);
    EXPECT_TRUE(received->is_authentic);
    EXPECT_EQ(received->body, "body");
    EXPECT_EQ(text_of(received->message), "what follows");
    network.node_k.send(NodeMessage(Kind::done));
    network.to_0(network.from_k());
    EXPECT_TRUE(is_authentic(network.node_0));
  }
}

TEST(NodeLinkTest, a_job_without_a_secret_connects) {
  Network network("", "");
  connect(network);
}

TEST(NodeLinkTest, another_secret_is_not_authentic) {
  for (const std::string_view other :
       {std::string_view("the secret of that job"), std::string_view("the secret of this jo"),
        std::string_view("")}) {
    Network network(kSecret, other);
    network.to_0(shake_hands(network).hello);
    const auto hello = network.node_0.receive();
    ASSERT_TRUE(hello) << "it is answered with the reason";
    EXPECT_FALSE(hello->is_authentic) << other;

    Network reversed(other, kSecret);
    reversed.to_0(shake_hands(reversed).hello);
    EXPECT_FALSE(is_authentic(reversed.node_0)) << other;
    reversed.node_0.send(NodeMessage(Kind::placed));
    reversed.to_k(reversed.from_0());
    EXPECT_FALSE(is_authentic(reversed.node_k)) << other;
  }
}

TEST(NodeLinkTest, the_secret_is_not_sent) {
  Network network;
  const Handshake sent = shake_hands(network);
  network.to_0(sent.hello);
  ASSERT_TRUE(is_authentic(network.node_0));
  network.node_0.send(NodeMessage(Kind::placed));
  const std::string all = sent.connect + sent.challenge + sent.hello + network.from_0();
  EXPECT_EQ(all.find(kSecret.substr(0, 8)), std::string::npos);
  EXPECT_NE(all.find("a host"), std::string::npos) << "nothing is encrypted";
}

TEST(NodeLinkTest, a_handshake_cannot_be_replayed) {
  Network first;
  const Handshake recorded = shake_hands(first);
  first.to_0(recorded.hello);
  ASSERT_TRUE(is_authentic(first.node_0));

  Network second;  // another connection, to this or another job with the same secret
  second.to_0(recorded.connect);
  EXPECT_FALSE(second.node_0.receive());
  second.to_0(recorded.hello);
  EXPECT_FALSE(is_authentic(second.node_0));

  Network third;  // to the other node
  third.node_k.greet(NodeMessage(Kind::hello));
  third.to_k(recorded.challenge);
  EXPECT_FALSE(third.node_k.receive());
  first.node_0.send(NodeMessage(Kind::placed));
  third.to_k(first.from_0());
  EXPECT_FALSE(is_authentic(third.node_k));
}

TEST(NodeLinkTest, a_proof_cannot_be_reflected) {
  Network network;
  network.node_k.greet(NodeMessage(Kind::hello));
  std::string echoed = network.from_k();  // the nonce of the node itself, as if it were node 0's
  const Kind challenge = Kind::challenge;
  echoed.replace(offsetof(NodeMessage, kind), sizeof challenge,
                 reinterpret_cast<const char*>(&challenge), sizeof challenge);
  network.to_k(echoed);
  EXPECT_FALSE(network.node_k.receive());
  network.to_k(network.from_k());  // its hello
  const auto received = network.node_k.receive();
  ASSERT_TRUE(received);
  EXPECT_FALSE(received->is_authentic);

  Network joined;
  connect(joined);
  joined.node_0.send(NodeMessage(Kind::all_done));
  joined.to_0(joined.from_0());
  EXPECT_FALSE(joined.node_0.receive());
  EXPECT_FALSE(joined.node_0.is_open());
}

TEST(NodeLinkTest, no_byte_of_a_hello_can_be_altered) {
  for (std::size_t i = 0; i < kSize; ++i) {
    Network network;
    std::string hello = shake_hands(network).hello;
    hello[i] ^= 1;
    network.to_0(hello);
    const auto received = network.node_0.receive();
    EXPECT_FALSE(received && received->is_authentic) << "byte " << i;
  }
}

TEST(NodeLinkTest, a_message_that_is_altered_repeated_or_left_out_closes_the_link) {
  const auto send_two = [](Network& network) {
    connect(network);
    for (const char* text : {"first", "second"}) {
      NodeMessage message(Kind::failed, text);
      message.n_body_bytes = 4;
      network.node_k.send(message, "body");
    }
    return network.from_k();
  };
  const std::size_t n_message = kSize + 4;
  {
    Network altered;
    std::string sent = send_two(altered).substr(0, n_message);
    sent.back() = 'x';
    altered.to_0(sent);
    EXPECT_FALSE(altered.node_0.receive());
    EXPECT_FALSE(altered.node_0.is_open());
  }
  {
    Network repeated;
    const std::string sent = send_two(repeated).substr(0, n_message);
    repeated.to_0(sent + sent);
    EXPECT_TRUE(is_authentic(repeated.node_0));
    EXPECT_FALSE(repeated.node_0.receive());
    EXPECT_FALSE(repeated.node_0.is_open());
  }
  {
    Network left_out;
    left_out.to_0(send_two(left_out).substr(n_message));
    EXPECT_FALSE(left_out.node_0.receive());
    EXPECT_FALSE(left_out.node_0.is_open());
  }
}

TEST(NodeLinkTest, what_comes_without_a_handshake_is_not_authentic) {
  for (const Kind kind : {Kind::hello, Kind::challenge, Kind::failed}) {
    for (const std::string_view secret : {kSecret, std::string_view()}) {
      Network network(secret);
      NodeMessage message(kind);
      LinkKey(secret, /*is_node_0=*/false).sign(message, "");  // under the key that is not made yet
      network.to_0({reinterpret_cast<const char*>(&message), kSize});
      const auto received = network.node_0.receive();
      ASSERT_TRUE(received);
      EXPECT_FALSE(received->is_authentic);
      EXPECT_EQ(network.from_0(), "");
    }
  }
}

TEST(NodeLinkTest, node_0_challenges_once) {
  Network network;
  const Handshake sent = shake_hands(network);
  network.to_0(sent.connect);
  const auto again = network.node_0.receive();
  ASSERT_TRUE(again);
  EXPECT_FALSE(again->is_authentic);
  EXPECT_EQ(network.from_0(), "");
}

TEST(NodeLinkTest, a_link_that_is_not_identified_takes_no_body) {
  NodeMessage connect(Kind::connect);
  connect.n_body_bytes = 1;
  Network network;
  network.to_0({reinterpret_cast<const char*>(&connect), kSize});
  EXPECT_FALSE(network.node_0.receive());
  EXPECT_FALSE(network.node_0.is_open());
}

TEST(NodeMessageTest, only_a_node_that_has_proved_the_secret_ends_the_job) {
  const ElasticOptions elastic;
  NodeMessage agreeing(Kind::hello);
  agreeing.node_rank = 1;
  agreeing.n_nodes = 3;
  agreeing.n_ranks = 2;
  agreeing.lease_ms = elastic.lease.count();
  std::vector<NodeMessage> disagreeing(5, agreeing);
  disagreeing[0].n_nodes = 2;
  disagreeing[1].n_restarts = 1;
  disagreeing[2].node_rank = 2;  // which has connected
  disagreeing[3].has_ucx = 1;
  disagreeing[4].least = 1;
  const std::array<int, 3> ranks_of{2, 0, 2};
  for (const std::string_view secret : {kSecret, std::string_view()}) {
    NodesOptions options;
    options.n_nodes = 3;
    options.secret = secret;
    const auto action = [&](const NodeMessage& hello, bool is_authentic) {
      return validate_hello({.message = hello, .body = {}, .is_authentic = is_authentic}, options,
                            elastic, "host:1", /*n_restarts=*/0, ranks_of)
          .action;
    };
    EXPECT_EQ(action(agreeing, true), HelloReply::Action::join);
    EXPECT_EQ(action(agreeing, false), HelloReply::Action::reject);
    for (const NodeMessage& hello : disagreeing) {
      EXPECT_EQ(action(hello, true),
                secret.empty() ? HelloReply::Action::reject : HelloReply::Action::reject_all);
      EXPECT_EQ(action(hello, false), HelloReply::Action::reject);
    }
  }
}

}  // namespace
}  // namespace lockstep::run
