#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <lockstep/error.hpp>
#include <lockstep/sync_master.hpp>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/expect.hpp"
#include "support/waiting.hpp"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using test::expect_contains;
using test::thrown;
using ::testing::Test;

using Master = SyncMaster<int, int>;
using Pipe = SlavePipe<int, int>;
using Messages = std::span<MessageFrom<int>>;
using Replies = std::vector<ReplyTo<int>>;

// Each gets 100 times the sum of all messages, plus its own id.
Replies sum_for_each(Messages messages) {
  int sum = 0;
  for (const auto& [id, message] : messages) sum += message;
  Replies replies;
  for (const auto& [id, message] : messages) replies.push_back({id, 100 * sum + id});
  return replies;
}

TEST(SyncMasterTest, master_comes_first_and_replies_go_by_id) {
  std::vector<int> seen;
  Master master([&](Messages messages) {
    for (const auto& [id, message] : messages) seen.push_back(id);
    Replies replies = sum_for_each(messages);
    std::rotate(replies.begin(), replies.begin() + 2, replies.end());
    return replies;
  });
  std::vector<Pipe> pipes;
  for (const int id : {70, 3, 12}) pipes.push_back(master.register_slave(id));
  EXPECT_EQ(master.nr_slaves(), 3);
  std::vector<int> replies(pipes.size());
  {
    std::vector<std::jthread> slaves;
    for (std::size_t i = 0; i < pipes.size(); ++i) {
      slaves.emplace_back([&, i] { replies[i] = pipes[i].run_slave(static_cast<int>(i) + 1); });
    }
    EXPECT_EQ(master.run_master(10), 1600);
  }
  EXPECT_EQ(replies, (std::vector{1670, 1603, 1612}));
  EXPECT_EQ(seen, (std::vector{0, 3, 12, 70}));
  EXPECT_EQ(pipes[0].id(), 70);
}

TEST(SyncMasterTest, master_without_slaves) {
  Master master(sum_for_each);
  EXPECT_EQ(master.nr_slaves(), 0);
  EXPECT_EQ(master.run_master(4), 400);
  EXPECT_EQ(master.run_master(5, 0ms), 500);
}

TEST(SyncMasterTest, move_only_messages_and_replies) {
  using Text = std::unique_ptr<std::string>;
  SyncMaster<std::unique_ptr<int>, Text> master(
      [](std::span<MessageFrom<std::unique_ptr<int>>> all) {
        std::vector<ReplyTo<Text>> replies;
        for (auto& [id, message] : all) {
          const auto taken = std::move(message);
          replies.push_back({id, std::make_unique<std::string>(std::to_string(*taken))});
        }
        return replies;
      });
  auto pipe = master.register_slave(1);
  Text reply;
  std::jthread slave([&] { reply = pipe.run_slave(std::make_unique<int>(8)); });
  EXPECT_EQ(*master.run_master(std::make_unique<int>(9)), "9");
  slave.join();
  EXPECT_EQ(*reply, "8");
}

TEST(SyncMasterTest, one_registration_serves_many_rounds) {
  constexpr int kRounds = 2000;
  Master master(sum_for_each);
  std::vector<std::jthread> slaves;
  for (int id = 1; id <= 3; ++id) {
    slaves.emplace_back([id, pipe = master.register_slave(id)]() mutable {
      for (int round = 0; round < kRounds; ++round) {
        ASSERT_EQ(pipe.run_slave(round), 400 * round + id);
      }
    });
  }
  for (int round = 0; round < kRounds; ++round) ASSERT_EQ(master.run_master(round), 400 * round);
}

TEST(SyncMasterTest, registering_anew_takes_more_or_fewer_slaves) {
  Master master(sum_for_each);
  for (const int n_slaves : {2, 5, 1, 3}) {
    std::vector<Pipe> pipes;
    for (int id = n_slaves; id >= 1; --id) pipes.push_back(master.register_slave(id));
    EXPECT_EQ(master.nr_slaves(), n_slaves);
    std::vector<std::jthread> slaves;
    for (Pipe& pipe : pipes) {
      slaves.emplace_back([&] { EXPECT_EQ(pipe.run_slave(1), 100 * (n_slaves + 1) + pipe.id()); });
    }
    EXPECT_EQ(master.run_master(1), 100 * (n_slaves + 1));
  }
  master.clear_slaves();  // a batch for the master alone, though slaves were registered
  EXPECT_EQ(master.nr_slaves(), 0);
  EXPECT_EQ(master.run_master(2), 200);
}

TEST(SyncMasterTest, stale_pipes_are_reported) {
  Master master(sum_for_each);
  auto early = master.register_slave(1);
  {
    std::jthread slave([&] { EXPECT_EQ(early.run_slave(1), 201); });
    EXPECT_EQ(master.run_master(1), 200);
  }
  std::atomic<pid_t> tid{0};
  std::jthread waiting([&] {
    tid = ::gettid();
    expect_contains(thrown<PeerLost>([&] { early.run_slave(1); }), "new registration");
  });
  EXPECT_TRUE(test::wait_until_asleep(tid));
  auto late = master.register_slave(2);
  waiting.join();
  expect_contains(thrown<PeerLost>([&] { early.run_slave(1); }), "new registration");
  early = Pipe();  // its leaving is nothing to the new registration
  std::jthread slave([&] { EXPECT_EQ(late.run_slave(1), 202); });
  EXPECT_EQ(master.run_master(1), 200);
}

TEST(SyncMasterTest, clear_slaves_forgets_replicas_that_never_ran) {
  Master master(sum_for_each);
  auto unused = master.register_slave(1);
  EXPECT_THROW(master.register_slave(1), UsageError);
  master.clear_slaves();
  auto pipe = master.register_slave(1);
  std::jthread slave([&] { EXPECT_EQ(pipe.run_slave(1), 201); });
  EXPECT_EQ(master.run_master(1), 200);
}

TEST(SyncMasterTest, all_pipes_gone_before_a_round_starts_anew) {
  Master master(sum_for_each);
  { auto pipe = master.register_slave(1); }
  auto pipe = master.register_slave(1);
  std::jthread slave([&] { EXPECT_EQ(pipe.run_slave(1), 201); });
  EXPECT_EQ(master.run_master(1), 200);
}

TEST(SyncMasterTest, bad_ids_are_rejected) {
  Master master(sum_for_each);
  expect_contains(thrown<UsageError>([&] { master.register_slave(0); }), "got id 0");
  expect_contains(thrown<UsageError>([&] { master.register_slave(-3); }), "got id -3");
  auto pipe = master.register_slave(4);
  const auto text = thrown<UsageError>([&] { master.register_slave(4); });
  expect_contains(text, "id 4 is registered already");
  expect_contains(text, "register_slave on group 'replicas' (rank 4");
  expect_contains(text, "sync_master_test.cpp:");
  EXPECT_EQ(master.nr_slaves(), 1);
  std::jthread slave([&] { EXPECT_EQ(pipe.run_slave(1), 204); });
  EXPECT_EQ(master.run_master(1), 200);
}

TEST(SyncMasterTest, register_worker_is_register_slave) {
  Master master(sum_for_each);
  auto pipe = master.register_worker(2);
  EXPECT_EQ(pipe.id(), 2);
  expect_contains(thrown<UsageError>([&] { master.register_slave(2); }), "register_slave on group");
  expect_contains(thrown<UsageError>([&] { master.register_worker(2); }),
                  "register_worker on group");
  std::jthread worker([&] { EXPECT_EQ(pipe.run_slave(1), 202); });
  EXPECT_EQ(master.run_master(1), 200);
}

TEST(SyncMasterTest, misuse_is_rejected) {
  EXPECT_THROW(Master(nullptr), UsageError);
  Pipe empty;
  EXPECT_EQ(empty.id(), -1);
  expect_contains(thrown<UsageError>([&] { empty.run_slave(1); }), "empty");
  EXPECT_THROW(empty.fail(std::make_exception_ptr(1)), UsageError);

  Master* self = nullptr;
  Master master([&](Messages messages) {
    expect_contains(thrown<UsageError>([&] { self->run_master(1); }), "another thread");
    expect_contains(thrown<UsageError>([&] { self->register_slave(1); }), "under way");
    expect_contains(thrown<UsageError>([&] { self->clear_slaves(); }), "under way");
    return sum_for_each(messages);
  });
  self = &master;
  EXPECT_EQ(master.run_master(1), 100);
}

TEST(SyncMasterTest, one_pipe_serves_one_thread_at_a_time) {
  Pipe pipe;
  Master master([&](Messages messages) {
    expect_contains(thrown<UsageError>([&] { pipe.run_slave(1); }), "another thread");
    return sum_for_each(messages);
  });
  pipe = master.register_slave(1);
  std::jthread slave([&] { EXPECT_EQ(pipe.run_slave(1), 201); });
  EXPECT_EQ(master.run_master(1), 200);
}

// Four participants, of which some do what a test says; the others must all get E, promptly.
class FaultTest : public Test {
 protected:
  FaultTest() {
    for (int id = 1; id <= 3; ++id) pipes_.push_back(master_.register_slave(id));
  }

  Pipe& pipe(int id) { return pipes_[static_cast<std::size_t>(id) - 1]; }

  // Runs a round in which these ids and the master take part, and gathers what E told each of them.
  template <class E>
  std::vector<std::string> failing_round(const std::vector<int>& ids, Timeout master_timeout = {}) {
    std::vector<std::string> texts(ids.size() + 1);
    std::vector<std::jthread> slaves;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      slaves.emplace_back([&, i] {
        tids_.at(static_cast<std::size_t>(ids[i])) = ::gettid();
        texts[i + 1] = thrown<E>([&] { pipe(ids[i]).run_slave(1); });
      });
    }
    texts[0] = thrown<E>([&] { master_.run_master(1, master_timeout); });
    slaves.clear();
    for (const auto& text : texts) expect_contains(text, "on group 'replicas'");
    return texts;
  }

  void good_round(const std::vector<int>& ids) {
    const int sum = 100 * (1 + static_cast<int>(ids.size()));
    std::vector<std::jthread> slaves;
    for (const int id : ids) {
      slaves.emplace_back([&, id] { EXPECT_EQ(pipe(id).run_slave(1), sum + id); });
    }
    EXPECT_EQ(master_.run_master(1), sum);
  }

  std::array<std::atomic<pid_t>, 4> tids_{};  // of the slaves of failing rounds
  std::function<Replies(Messages)> callback_ = sum_for_each;
  Master master_{[this](Messages messages) { return callback_(messages); }};
  std::vector<Pipe> pipes_;
};

TEST_F(FaultTest, callback_that_throws) {
  callback_ = [](Messages) -> Replies { throw std::out_of_range("channel 9"); };
  std::vector<std::jthread> slaves;
  for (int id = 1; id <= 3; ++id) {
    slaves.emplace_back([&, id] {
      const auto text = thrown<PeerFailed>([&] { pipe(id).run_slave(1); });
      expect_contains(text, "callback threw: channel 9");
      expect_contains(text,
                      "run_slave on group 'replicas' (rank " + std::to_string(id) + ", call #1)");
    });
  }
  EXPECT_EQ(thrown<std::out_of_range>([&] { master_.run_master(1); }), "channel 9");
  slaves.clear();
  callback_ = sum_for_each;
  good_round({1, 2, 3});
}

TEST_F(FaultTest, callback_throws_non_std_exception) {
  callback_ = [](Messages) -> Replies { throw 7; };
  std::vector<std::jthread> slaves;
  for (int id = 1; id <= 3; ++id) {
    slaves.emplace_back([&, id] { EXPECT_THROW(pipe(id).run_slave(1), PeerFailed); });
  }
  EXPECT_THROW(master_.run_master(1), int);
}

TEST_F(FaultTest, callback_with_wrong_ids) {
  const auto expect_everywhere = [&](Replies replies, const std::string& part) {
    callback_ = [&](Messages) { return replies; };
    for (const auto& text : failing_round<UsageError>({1, 2, 3})) expect_contains(text, part);
  };
  expect_everywhere({}, "no reply for 0, 1, 2, 3;");
  expect_everywhere({{0, 1}, {2, 1}, {1, 1}}, "wrong ids: no reply for 3; return");
  expect_everywhere({{0, 1}, {2, 1}, {1, 1}, {2, 1}, {3, 1}, {2, 1}},
                    "wrong ids: several replies for 2; return");
  expect_everywhere({{0, 1}, {2, 1}, {1, 1}, {3, 1}, {4, 1}, {-1, 1}},
                    "wrong ids: unknown -1, 4; return");
  expect_everywhere(
      {{1, 1}, {2, 1}, {3, 1}, {3, 1}},
      "no reply for 0; several replies for 3; return one reply for each of 0, 1, 2, 3");
  callback_ = sum_for_each;
  good_round({1, 2, 3});
}

TEST_F(FaultTest, slave_that_fails) {
  std::jthread failing([&, master = ::gettid()] {
    EXPECT_TRUE(test::wait_until_asleep(master));
    for (const int id : {1, 3})
      EXPECT_TRUE(test::wait_until_asleep(tids_.at(static_cast<std::size_t>(id))));
    pipe(2).fail(std::make_exception_ptr(std::runtime_error("bad sample 17")));
  });
  for (const auto& text : failing_round<PeerFailed>({1, 3})) {
    expect_contains(text, "slave 2 failed: bad sample 17");
  }
  failing.join();
  good_round({1, 2, 3});
}

TEST_F(FaultTest, slave_that_failed_before_the_others_came) {
  pipe(2).fail(std::make_exception_ptr(std::runtime_error("bad sample 17")));
  for (const auto& text : failing_round<PeerFailed>({1, 3})) {
    expect_contains(text, "slave 2 failed: bad sample 17");
  }
  good_round({1, 2, 3});
}

TEST_F(FaultTest, master_that_fails) {
  std::vector<std::jthread> slaves;
  for (int id = 1; id <= 3; ++id) {
    slaves.emplace_back([&, id] {
      expect_contains(thrown<PeerFailed>([&] { pipe(id).run_slave(1); }),
                      "the master failed: no memory");
    });
  }
  master_.fail(std::make_exception_ptr(std::runtime_error("no memory")));
  slaves.clear();
  good_round({1, 2, 3});
}

TEST_F(FaultTest, slave_that_leaves_while_others_wait) {
  std::jthread leaving([&, master = ::gettid()] {
    EXPECT_TRUE(test::wait_until_asleep(master));
    for (const int id : {1, 3})
      EXPECT_TRUE(test::wait_until_asleep(tids_.at(static_cast<std::size_t>(id))));
    pipe(2) = Pipe();
  });
  for (const auto& text : failing_round<PeerLost>({1, 3})) expect_contains(text, "slave 2 left");
  leaving.join();
  EXPECT_EQ(master_.nr_slaves(), 2);
  good_round({1, 3});
}

TEST_F(FaultTest, slaves_that_left_before_the_round) {
  pipe(2) = Pipe();
  pipe(1) = Pipe();
  EXPECT_EQ(master_.nr_slaves(), 1);
  for (const auto& text : failing_round<PeerLost>({3})) {
    expect_contains(text, "slave 2 left");
    expect_contains(text, "slave 1 left");
  }
  good_round({3});
}

TEST_F(FaultTest, slave_that_leaves_between_rounds) {
  good_round({1, 2, 3});
  pipe(3) = Pipe();
  for (const auto& text : failing_round<PeerLost>({1, 2})) expect_contains(text, "slave 3 left");
  good_round({1, 2});
  pipes_.clear();
  expect_contains(thrown<PeerLost>([&] { master_.run_master(1); }), "slave 1 left");
  pipes_.push_back(master_.register_slave(1));
  good_round({1});
}

TEST_F(FaultTest, slave_that_leaves_by_an_exception) {
  std::jthread leaving([&] {
    try {
      const Pipe mine = std::move(pipe(2));
      throw std::runtime_error("forward");
    } catch (const std::runtime_error&) {
    }
  });
  for (const auto& text : failing_round<PeerFailed>({1, 3})) {
    expect_contains(text, "slave 2 left");
    expect_contains(text, "exception");
  }
}

TEST_F(FaultTest, missing_slaves_are_named_to_all) {
  good_round({1, 2, 3});
  pipe(2).fail(std::make_exception_ptr(std::runtime_error("x")));
  failing_round<PeerFailed>({1, 3});
  for (const auto& text : failing_round<TimeoutError>({1}, 50ms)) {
    expect_contains(text, "call #3)");
    expect_contains(text, "slave 2 (its last call was #2)");
    expect_contains(text, "slave 3 (its last call was #2)");
    expect_contains(text, "50 ms of the master's call");
  }
}

TEST_F(FaultTest, late_slave_gets_the_timeout_and_harms_no_later_round) {
  expect_contains(failing_round<TimeoutError>({1, 3}, 30ms)[0], "missing within 30 ms");
  std::vector<std::jthread> others;  // wait in round 2 already
  for (const int id : {1, 3}) {
    others.emplace_back([&, id] { EXPECT_EQ(pipe(id).run_slave(1), 400 + id); });
  }
  std::jthread late([&, master = ::gettid()] {
    EXPECT_TRUE(test::wait_until_asleep(master));
    const auto text = thrown<TimeoutError>([&] { pipe(2).run_slave(50); });
    expect_contains(text, "call #1)");
    expect_contains(text, "late");
    expect_contains(text, "slave 2 (has not called yet)");
    EXPECT_EQ(pipe(2).run_slave(1), 402);
  });
  EXPECT_EQ(master_.run_master(1), 400);
}

TEST_F(FaultTest, slave_that_is_several_rounds_late) {
  failing_round<TimeoutError>({1, 3}, 10ms);
  callback_ = [](Messages) -> Replies {
    ADD_FAILURE() << "ran without slave 2";
    return {};
  };
  failing_round<TimeoutError>({1, 3}, 10ms);
  callback_ = sum_for_each;
  std::jthread late([&] {
    expect_contains(thrown<TimeoutError>([&] { pipe(2).run_slave(1); }), "call #1)");
    pipe(2).fail(std::make_exception_ptr(std::runtime_error("x")));  // its call of round 2
  });
  late.join();
  good_round({1, 2, 3});
}

TEST_F(FaultTest, missing_master_is_named) {
  const auto text = thrown<TimeoutError>([&] { pipe(1).run_slave(1, 20ms); });
  expect_contains(text, "the master (has not called yet), slave 2 (has");
  expect_contains(text, "20 ms of slave 1's call");
  for (const auto& late : failing_round<TimeoutError>({2, 3})) expect_contains(late, "late");
  good_round({1, 2, 3});
}

TEST_F(FaultTest, callback_slower_than_a_slave_waits) {
  FutureResult<bool> slave_gave_up;
  callback_ = [&](Messages messages) {
    slave_gave_up.get();
    return sum_for_each(messages);
  };
  std::jthread impatient([&] {
    expect_contains(thrown<TimeoutError>([&] { pipe(2).run_slave(1, 500ms); }),
                    "callback did not return");
    slave_gave_up.put(true);
  });
  for (const auto& text : failing_round<TimeoutError>({1, 3})) {
    expect_contains(text, "500 ms of slave 2's call");
  }
  impatient.join();
  callback_ = sum_for_each;
  good_round({1, 2, 3});
}

TEST(SyncMasterTest, master_that_leaves) {
  auto master = std::make_unique<Master>(sum_for_each);
  auto waiting = master->register_slave(1);
  auto late = master->register_slave(2);
  std::atomic<pid_t> tid{0};
  std::jthread slave([&] {
    tid = ::gettid();
    expect_contains(thrown<PeerLost>([&] { waiting.run_slave(1); }), "the master left");
  });
  EXPECT_TRUE(test::wait_until_asleep(tid));
  master.reset();
  expect_contains(thrown<PeerLost>([&] { late.run_slave(1); }), "the master left");
  expect_contains(thrown<PeerLost>([&] { late.run_slave(1); }), "the master left");
}

TEST(SyncMasterTest, options_give_the_default_deadline) {
  Master master(sum_for_each, {.timeout = 20ms});
  auto pipe = master.register_slave(1);
  expect_contains(thrown<TimeoutError>([&] { master.run_master(1); }), "20 ms");
  expect_contains(thrown<TimeoutError>([&] { pipe.run_slave(1); }), "late");
  expect_contains(thrown<TimeoutError>([&] { pipe.run_slave(1); }), "20 ms");
}

TEST(SyncMasterTest, deadline_never_waits_on) {
  Master master(sum_for_each);
  auto pipe = master.register_slave(1);
  std::jthread slave([&, master_thread = ::gettid()] {
    EXPECT_TRUE(test::wait_until_asleep(master_thread));
    EXPECT_EQ(pipe.run_slave(1, Timeout::never()), 201);
  });
  EXPECT_EQ(master.run_master(1, Timeout::never()), 200);
}

TEST(SyncMasterTest, errors_carry_their_context) {
  Master master(sum_for_each);
  auto pipe = master.register_slave(6);
  const auto line = std::source_location::current().line() + 2;
  try {
    pipe.run_slave(1, 0ms);
    FAIL() << "no error";
  } catch (const TimeoutError& error) {
    EXPECT_EQ(error.context().operation, "run_slave");
    EXPECT_EQ(error.context().rank, 6);
    EXPECT_EQ(error.context().sequence, 1U);
    EXPECT_EQ(error.context().where.line(), line);
  }
}

}  // namespace
}  // namespace lockstep
