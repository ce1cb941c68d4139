#include "engines/message/message_channel.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <deque>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engines/message/message_engine.hpp"

namespace lockstep::message {
namespace {

using namespace std::chrono_literals;
using internal::Failure;
using Kind = Failure::Kind;
using State = Transport::State;

/// What a ScriptedTransport does, and what was done with it.
struct Script {
  std::deque<State> states;  ///< of each wait(); then pending
  std::vector<int> awaited;
  std::deque<ControlMessage> received;
  std::deque<ControlMessage> received_in_wait;  ///< arrives with the first wait()
  std::vector<ControlMessage> sent;
  std::optional<TransportError> error;  ///< of start()
  bool has_no_memory = false;           ///< for start()
  bool answers_status_queries = false;
  int n_own = 0;  ///< control messages to itself
  int n_cancelled = 0;
};

/// Rank 0 of 3.
class ScriptedTransport final : public Transport {
 public:
  explicit ScriptedTransport(Script& script, Script* part = nullptr)
      : script_(script), part_(part) {}
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 3; }
  void start(std::span<const Message>, const Call&) override {
    if (script_.has_no_memory) throw std::bad_alloc();
    if (script_.error) throw *script_.error;
  }
  State wait(detail::JobClock::time_point) override {
    script_.received.insert(script_.received.end(), script_.received_in_wait.begin(),
                            script_.received_in_wait.end());
    script_.received_in_wait.clear();
    if (script_.states.empty()) return State::pending;
    const State next = script_.states.front();
    script_.states.pop_front();
    return next;
  }
  std::vector<int> awaited() override { return script_.awaited; }
  void cancel() noexcept override { ++script_.n_cancelled; }
  bool answers_status_queries() const noexcept override { return script_.answers_status_queries; }
  std::int32_t last_channel() const noexcept override { return 5; }
  void send_control(const ControlMessage& message, int to) noexcept override {
    if (to == rank()) {
      ++script_.n_own;
    } else {
      script_.sent.push_back(message);
    }
  }
  std::optional<ControlMessage> poll_control() override {
    if (script_.received.empty()) return std::nullopt;
    auto message = std::move(script_.received.front());
    script_.received.pop_front();
    return message;
  }
  std::unique_ptr<Transport> split(const std::vector<int>&, std::int32_t,
                                   std::span<const std::byte>) override {
    return std::make_unique<ScriptedTransport>(*part_);
  }

 private:
  Script& script_;
  Script* part_;
};

class MessageChannelTest : public ::testing::Test {
 protected:
  void exchange(MessageChannel& channel) {
    Limit limit(call.timeout);
    channel.exchange({}, call, limit);
  }
  /// The text of the E that the next exchange throws.
  template <class E>
  std::string error_of(MessageChannel& channel) {
    try {
      exchange(channel);
    } catch (const E& error) {
      return error.text();
    }
    return "no error";
  }
  template <class E>
  std::string error() {
    return error_of<E>(world);
  }
  const Failure& sent() {
    EXPECT_EQ(script.sent.size(), 1U);
    EXPECT_EQ(script.sent.at(0).kind, ControlMessage::Kind::failure);
    return script.sent[0].failure;
  }

  Script script;
  Script part;
  Call call{.group = "world", .sequence = 1, .timeout = 10min, .where = {}};
  MessageChannel world{std::make_unique<ScriptedTransport>(script, &part)};
};

ControlMessage departure_of(int rank, Kind kind = Kind::peer_left, std::string text = "") {
  return {.kind = ControlMessage::Kind::departure,
          .failure = {.kind = kind, .culprit = rank, .text = std::move(text)}};
}

TEST_F(MessageChannelTest, a_failure_ends_a_wait_and_every_later_exchange) {
  script.states = {State::pending};
  script.received = {{}, {}};
  script.received[0].failure = {.kind = Kind::mismatch, .text = "the table"};
  script.received[1].failure = {.kind = Kind::timeout, .text = "the second"};
  EXPECT_EQ(error<MismatchError>(), "the table");
  EXPECT_EQ(error<MismatchError>(), "the table");
  EXPECT_TRUE(script.sent.empty());  // the sender has told all
}

TEST_F(MessageChannelTest, a_failure_that_arrives_during_a_wait_ends_it) {
  script.states = {State::pending, State::complete};
  script.received_in_wait = {{}};
  script.received_in_wait[0].failure = {.kind = Kind::mismatch, .text = "the table"};
  EXPECT_EQ(error<MismatchError>(), "the table");
}

TEST_F(MessageChannelTest, an_exchange_is_cancelled_unless_it_completes) {
  script.states = {State::pending, State::complete};
  exchange(world);
  EXPECT_EQ(script.n_cancelled, 0);
  script.states = {State::ended};
  script.awaited = {1};
  EXPECT_EQ(error<TimeoutError>(), "rank 0 waited 600 s for rank 1 of 3");
  EXPECT_EQ(script.n_cancelled, 1);
}

TEST_F(MessageChannelTest, late_ranks_are_named_once_in_order_and_on_all_ranks) {
  call.timeout = 2ms;
  script.awaited = {2, 1, 2};
  const std::string text = error<TimeoutError>();
  EXPECT_EQ(text, "rank 0 waited 0.002 s for ranks 1, 2 of 3");
  EXPECT_EQ(sent().kind, Kind::timeout);
  EXPECT_EQ(sent().text, text);
}

TEST_F(MessageChannelTest, status_query_that_ends_the_first_wait) {
  script.answers_status_queries = true;
  script.awaited = {2};
  script.states = {State::pending, State::complete};
  script.received_in_wait = {
      {.kind = ControlMessage::Kind::status_query, .wait_state = {.rank = 1}}};
  exchange(world);
  ASSERT_EQ(script.sent.size(), 1U);
  EXPECT_EQ(script.sent[0].kind, ControlMessage::Kind::status_reply);
  EXPECT_EQ(script.sent[0].wait_state.awaited.get()[0], 2);
}

TEST_F(MessageChannelTest, messages_that_arrive_at_the_deadline_are_not_late) {
  call.timeout = 0ms;
  script.states = {State::pending, State::complete};
  exchange(world);
  EXPECT_TRUE(script.sent.empty());
}

TEST_F(MessageChannelTest, the_last_messages_of_a_rank_that_left_may_still_arrive) {
  script.received = {departure_of(1)};
  script.awaited = {1};
  script.states = {State::pending, State::pending, State::complete};
  exchange(world);
  EXPECT_TRUE(script.sent.empty());
}

TEST_F(MessageChannelTest, waiter_for_departed_rank_notifies_others) {
  script.received = {departure_of(2, Kind::peer_failed, "no more sheets")};
  script.awaited = {1};
  script.states = {State::pending, State::complete};
  exchange(world);          // of a rank that is there
  script.awaited = {1, 2};  // for longer than messages may be in transit
  EXPECT_EQ(error<PeerFailed>(), "rank 2 failed: no more sheets");
  EXPECT_EQ(internal::text_of(sent()), "rank 2 failed: no more sheets");
}

TEST_F(MessageChannelTest, a_rank_that_left_just_before_the_deadline_is_not_late) {
  call.timeout = 2ms;
  script.received = {departure_of(1, Kind::peer_failed, "no more sheets")};
  script.awaited = {1};
  EXPECT_EQ(error<PeerFailed>(), "rank 1 failed: no more sheets");
}

TEST_F(MessageChannelTest, a_departure_is_named_by_the_ranks_of_the_group_that_waits) {
  const auto group = world.split({0, 2, 1}, world.next_number(), call);
  script.received = {departure_of(2)};
  part.awaited = {1};
  part.states = {State::ended};
  EXPECT_EQ(error_of<PeerLost>(*group), "rank 1 left the world (destroy_dist or program exit)");
  EXPECT_EQ(part.sent.size(), 1U);
  EXPECT_TRUE(script.sent.empty());
}

TEST_F(MessageChannelTest, a_split_for_which_the_library_has_no_number_is_an_error) {
  EXPECT_EQ(world.next_number(), 2);
  EXPECT_EQ(world.next_number(), 5);  // 3 and 4 are of the ranks 1 and 2
  EXPECT_TRUE(world.split({0, 1, 2}, 5, call));
  EXPECT_THROW(world.split({0, 1, 2}, world.next_number(), call), EngineError);
  EXPECT_EQ(internal::text_of(sent()).substr(0, 31), "rank 0 failed: too many splits:");
}

TEST_F(MessageChannelTest, a_failure_of_the_world_leaves_its_parts) {
  const auto group = world.split({0, 1, 2}, world.next_number(), call);
  script.received = {{.failure = {.kind = Kind::mismatch, .text = "the table"}}};
  part.states = {State::pending, State::complete};
  exchange(*group);
  EXPECT_EQ(error<MismatchError>(), "the table");  // though `group` has received it
}

TEST_F(MessageChannelTest, an_error_of_the_library_is_a_failure_of_this_rank_for_the_others) {
  script.error.emplace("MPI_ERR_OTHER");
  EXPECT_EQ(error<EngineError>(), "MPI_ERR_OTHER");
  EXPECT_EQ(internal::text_of(sent()), "rank 0 failed: MPI_ERR_OTHER");
  EXPECT_EQ(script.n_cancelled, 1);
}

TEST_F(MessageChannelTest, a_closed_connection_is_a_lost_rank) {
  script.error.emplace("reset by peer", /*peer=*/2, /*is_closed=*/true);
  const std::string text = error<PeerLost>();
  EXPECT_EQ(text.substr(0, 14), "rank 2 is gone");
  EXPECT_EQ(internal::text_of(sent()), text);
}

TEST_F(MessageChannelTest, reason_received_after_connection_broke) {
  script.error.emplace("reset by peer", /*peer=*/2, /*is_closed=*/true);
  script.received = {departure_of(2, Kind::peer_failed, "no more sheets")};
  EXPECT_EQ(error<PeerFailed>(), "rank 2 failed: no more sheets");
}

TEST_F(MessageChannelTest, abandon_and_end_with_fail_this_ranks_exchange_too) {
  world.abandon("a thread threw");
  EXPECT_EQ(internal::text_of(sent()), "rank 0 failed: a thread threw");
  EXPECT_EQ(error<PeerFailed>(), "rank 0 failed: a thread threw");
  world.end_with(TimeoutError({}, "late elsewhere"));
  EXPECT_EQ(script.sent[1].failure.kind, Kind::timeout);
  EXPECT_EQ(error<PeerFailed>(), "rank 0 failed: a thread threw");  // the first counts
}

TEST_F(MessageChannelTest, received_failure_takes_precedence) {
  script.received = {{.failure = {.kind = Kind::timeout, .text = "the first"}}};
  EXPECT_THROW(world.fail({.kind = Kind::mismatch, .text = "the table"}, call), TimeoutError);
  EXPECT_TRUE(script.sent.empty());
}

TEST_F(MessageChannelTest, non_lockstep_exception_fails_peers) {
  for (const Op op : {Op::all_reduce, Op::split, Op::allocate}) {
    script = Script();
    script.has_no_memory = true;
    const Group group(make("scripted", std::make_unique<ScriptedTransport>(script, &part)), "world",
                      call.timeout);
    double data = 0;
    const auto run = [&] {
      if (op == Op::all_reduce) group.all_reduce({&data, 1, DType::f64});
      if (op == Op::split) static_cast<void>(group.split(0));
      if (op == Op::allocate) static_cast<void>(group.allocate(1));
    };
    EXPECT_THROW(run(), std::bad_alloc);
    EXPECT_EQ(internal::text_of(sent()).substr(0, 14), "rank 0 failed:");
  }
}

TEST_F(MessageChannelTest, leave_announces_a_departure) {
  world.leave("");
  world.leave("no more sheets");
  ASSERT_EQ(script.sent.size(), 2U);
  for (const ControlMessage& message : script.sent) {
    EXPECT_EQ(message.kind, ControlMessage::Kind::departure);
  }
  EXPECT_EQ(script.sent[0].failure.kind, Kind::peer_left);
  EXPECT_EQ(internal::text_of(script.sent[1].failure), "rank 0 failed: no more sheets");
}

TEST_F(MessageChannelTest, a_failure_after_a_departure_ends_only_this_ranks_calls) {
  const auto group = world.split({0, 1, 2}, world.next_number(), call);
  world.leave("no more sheets");
  script.sent.clear();
  for (MessageChannel* const channel : {&world, group.get()}) {
    channel->abandon("no more sheets");
    EXPECT_EQ(error_of<PeerFailed>(*channel), "rank 0 failed: no more sheets");
  }
  EXPECT_TRUE(script.sent.empty());
  EXPECT_TRUE(part.sent.empty());
  EXPECT_EQ(script.n_own + part.n_own, 2);
}

}  // namespace
}  // namespace lockstep::message
