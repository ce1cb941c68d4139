// Sends and receives that match by source and tag.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <any>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/shared/protocol/tagged_messages.hpp"
#include "engines/shared/segment/segment.hpp"
#include "support/expect.hpp"
#include "support/ranks.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

using shared::TaggedMessages;
using std::chrono::milliseconds;
using Ints = std::vector<std::int32_t>;

/// One rank of a world, in which every test runs.
class Rank {
 public:
  explicit Rank(const std::shared_ptr<shared::Segment>& segment)
      : engine_(shared::join_world(segment, get_rank(), call(Op::barrier))),
        messages_(engine_->make_messages(call(Op::allocate))) {}

  using Request = std::shared_ptr<TaggedMessages::Request>;

  bool has_messages() const { return messages_ != nullptr; }
  Engine& engine() { return *engine_; }
  void barrier() { engine_->run(call(Op::barrier)); }
  Request isend(Ints data, int to, int tag = 0) {
    auto owned = std::make_shared<Ints>(std::move(data));
    Call send = call(Op::send, to);
    send.count = owned->size();
    send.in = owned->data();
    return messages_->post(send, tag, owned);
  }
  Request irecv(const std::shared_ptr<Ints>& data, int from, int tag = 0,
                DType dtype = DType::i32) {
    Call recv = call(Op::recv, from);
    recv.dtype = dtype;
    recv.count = data->size();
    recv.out = data->data();
    return messages_->post(recv, tag, data);
  }
  void refuse(Op op, int peer) { messages_->refuse(call(op, peer), "it is too short"); }
  void send(const Ints& data, int to, int tag = 0) { isend(data, to, tag)->wait(kLimit); }
  Ints recv(std::size_t n, int from, int tag = 0) {
    auto data = std::make_shared<Ints>(n);
    irecv(data, from, tag)->wait(kLimit);
    return *data;
  }
  void leave_and_end(const std::string& failure) {
    engine_->leave(failure);
    ::_exit(0);
  }
  void drop_messages() { messages_.reset(); }
  std::shared_ptr<TaggedMessages> more_messages() {
    return engine_->make_messages(call(Op::allocate));
  }

  static constexpr milliseconds kLimit = kWatchdog;

 private:
  static Call call(Op op, int root = -1) {
    return {.op = op,
            .dtype = DType::i32,
            .root = root,
            .group = "test",
            .timeout = kLimit,
            .where = std::source_location::current()};
  }

  std::unique_ptr<shared::HostEngine> engine_;
  std::shared_ptr<TaggedMessages> messages_;
};

class TaggedMessagesTest : public testing::TestWithParam<Form> {
 protected:
  void SetUp() override {
    const SharedCount possible;
    run_as({Form::processes, 2}, [segment = world(Form::processes, 2), &possible] {
      if (Rank(segment).has_messages()) possible.raise();
    });
    if (possible.value() != 2) {
      GTEST_SKIP() << "a process may not access another's memory here (process_vm_readv)";
    }
  }

  using Body = std::function<void(Rank&, int rank)>;
  void on_ranks(int n, const Body& body) const {
    run_as({GetParam(), n}, [segment = world(GetParam(), n), &body] {
      Rank rank(segment);
      body(rank, get_rank());
    });
  }
  static std::shared_ptr<shared::Segment> world(Form form, int n) {
    return shared::make_world(form == Form::threads ? shared::Segment::for_threads(n)
                                                    : shared::Segment::for_processes(n));
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, TaggedMessagesTest, testing::Values(Form::threads, Form::processes),
                         [](const auto& form) {
                           return form.param == Form::threads ? "threads" : "processes";
                         });

TEST(TaggedMessagesMemoryTest, grows_with_the_messages_under_way) {
  const auto segment = shared::make_world(shared::Segment::for_processes(4));
  run_as({Form::processes, 4}, [&segment] {
    Rank rank(segment);
    if (!rank.has_messages()) GTEST_SKIP() << "process_vm_readv is not permitted here";
    // All that the world has: the channel, its slots for no message yet, and the messages.
    const auto n_bytes = [&segment] {
      struct stat status {};
      EXPECT_EQ(::fstat(segment->fd(), &status), 0);
      return status.st_blocks * 512L;
    };
    rank.barrier();
    const auto before = n_bytes();
    rank.barrier();
    const auto fresh = rank.more_messages();
    EXPECT_LE(n_bytes() - before, 64L << 10U);
    rank.barrier();
    const int next = (get_rank() + 1) % 4;
    const int previous = (get_rank() + 3) % 4;
    constexpr int kUnderWay = 1000;  // more than have memory at first
    std::vector<Rank::Request> sends;
    for (int tag = 0; tag < kUnderWay; ++tag) sends.push_back(rank.isend({tag}, next, tag));
    for (int tag = kUnderWay - 1; tag >= 0; --tag) {
      EXPECT_EQ(rank.recv(1, previous, tag), Ints{tag});
    }
    for (const auto& sent : sends) sent->wait(Rank::kLimit);
  });
}

Ints numbers(std::size_t n, int first) {
  Ints data(n);
  std::iota(data.begin(), data.end(), first);
  return data;
}

TEST_P(TaggedMessagesTest, any_size_in_either_order) {
  on_ranks(2, [](Rank& ranks, int rank) {
    for (const std::size_t n : {0UL, 1UL, 1000UL, 300'001UL}) {
      for (const bool sender_first : {false, true}) {
        if (rank == 0) {
          if (!sender_first) ranks.barrier();
          const auto sent = ranks.isend(numbers(n, 5), 1);
          if (sender_first) {
            EXPECT_FALSE(sent->poll());
            ranks.barrier();
          }
          sent->wait(Rank::kLimit);
        } else {
          if (sender_first) ranks.barrier();
          auto got = std::make_shared<Ints>(n);
          const auto receive = ranks.irecv(got, 0);
          if (!sender_first) {
            EXPECT_FALSE(receive->poll());
            ranks.barrier();
          }
          receive->wait(Rank::kLimit);
          EXPECT_EQ(receive->source(), 0);
          EXPECT_EQ(*got, numbers(n, 5));
        }
      }
    }
  });
}

TEST_P(TaggedMessagesTest, match_by_tag_and_in_order) {
  on_ranks(2, [](Rank& ranks, int rank) {
    if (rank == 0) {
      std::vector<Rank::Request> sent;
      for (int i = 0; i < 6; ++i) sent.push_back(ranks.isend({i}, 1, i % 2));
      ranks.barrier();
      for (const auto& each : sent) each->wait(Rank::kLimit);
    } else {
      ranks.barrier();
      for (const int expected : {1, 3}) EXPECT_EQ(ranks.recv(1, 0, 1), Ints{expected});
      for (const int expected : {0, 2, 4}) EXPECT_EQ(ranks.recv(1, 0, 0), Ints{expected});
      EXPECT_EQ(ranks.recv(1, TaggedMessages::kAnySource, 1), Ints{5});
    }
  });
}

TEST_P(TaggedMessagesTest, posted_receives_take_messages_in_order) {
  on_ranks(3, [](Rank& ranks, int rank) {
    if (rank < 2) {
      ranks.barrier();
      ranks.send({rank}, 2);
      return;
    }
    auto from_one = std::make_shared<Ints>(1), from_any = std::make_shared<Ints>(1);
    const auto one = ranks.irecv(from_one, 1),
               any = ranks.irecv(from_any, TaggedMessages::kAnySource);
    ranks.barrier();
    one->wait(Rank::kLimit);
    any->wait(Rank::kLimit);
    EXPECT_EQ(*from_one, Ints{1});
    EXPECT_EQ(*from_any, Ints{0});
    EXPECT_EQ(any->source(), 0);
  });
}

TEST_P(TaggedMessagesTest, another_size_or_type_is_an_error_of_both) {
  on_ranks(2, [](Rank& ranks, int rank) {
    const std::string text = rank == 0 ? thrown<MismatchError>([&] {
      ranks.send({1, 2}, 1);
    })
                                       : thrown<MismatchError>([&] { (void)ranks.recv(3, 0); });
    expect_contains(text, "rank 0 sends 2 elements of i32, rank 1 receives 3 elements of i32");
    const auto data = std::make_shared<Ints>(2);
    const std::string of_type = rank == 0
                                    ? thrown<MismatchError>([&] {
                                        ranks.send({1, 2}, 1);
                                      })
                                    : thrown<MismatchError>([&] {
                                        ranks.irecv(data, 0, 0, DType::f32)->wait(Rank::kLimit);
                                      });
    expect_contains(of_type, "rank 1 receives 2 elements of f32");
    if (rank == 0) ranks.send({7}, 1);
    if (rank == 1) {
      EXPECT_EQ(ranks.recv(1, 0), Ints{7});
    }
  });
}

TEST_P(TaggedMessagesTest, another_number_of_refused_calls_is_an_error_of_both) {
  on_ranks(2, [](Rank& ranks, int rank) {
    const auto exchange_in_vain = [&] {
      return rank == 0 ? thrown<MismatchError>([&] { ranks.send({1}, 1); })
                       : thrown<MismatchError>([&] { (void)ranks.recv(1, 0); });
    };
    if (rank == 0) ranks.refuse(Op::send, 1);
    for (int i = 0; i < 2; ++i) {
      expect_contains(exchange_in_vain(), "rank 0 has refused send: it is too short, at ");
    }
    ranks.barrier();  // or the other's second exchange meets as many refused calls, or recv below
    if (rank == 1) {
      for (int i = 0; i < 2; ++i) ranks.refuse(Op::recv, 0);
    }
    ranks.barrier();
    expect_contains(exchange_in_vain(), "rank 1 has refused recv: it is too short, at ");
    ranks.barrier();
    const auto data = std::make_shared<Ints>(1);  // from any source they are not compared
    if (rank == 0) ranks.send({7}, 1);
    if (rank == 1) {
      ranks.irecv(data, TaggedMessages::kAnySource)->wait(Rank::kLimit);
      EXPECT_EQ(*data, Ints{7});
    }
    if (rank == 0) ranks.refuse(Op::send, 1);  // as many as the other end
    ranks.barrier();
    if (rank == 0) ranks.send({8}, 1);
    if (rank == 1) {
      EXPECT_EQ(ranks.recv(1, 0), Ints{8});
    }
  });
}

TEST_P(TaggedMessagesTest, a_timeout_names_the_rank_and_what_is_there_instead) {
  on_ranks(2, [](Rank& ranks, int rank) {
    const auto data = std::make_shared<Ints>(1);
    Rank::Request other;
    if (rank == 0) other = ranks.isend({3}, 1, 4);
    ranks.barrier();
    if (rank == 1) {
      const auto late = ranks.irecv(data, 0, 5);
      const std::string text = thrown<TimeoutError>([&] { late->wait(milliseconds(50)); });
      expect_contains(text, "waited 0.05 s for rank 0 to send (tag 5)");
      expect_contains(text, "waits in send to rank 1 (tag 4)");
      EXPECT_EQ(thrown<TimeoutError>([&] { late->wait(milliseconds(50)); }), text);  // again
    } else {
      expect_contains(thrown<TimeoutError>([&] { ranks.isend({9}, 1, 6)->wait(milliseconds(50)); }),
                      "for rank 1 to receive (tag 6)");
    }
    ranks.barrier();
    if (rank == 0) {
      ranks.send({8}, 1, 5);
      other->wait(Rank::kLimit);
    } else {
      EXPECT_EQ(ranks.recv(1, 0, 5), Ints{8});
      EXPECT_EQ(*data, Ints{0});  // cancelled
      EXPECT_EQ(ranks.recv(1, 0, 4), Ints{3});
    }
  });
}

TEST_P(TaggedMessagesTest, arrive_without_a_handle) {
  on_ranks(2, [](Rank& ranks, int rank) {
    if (rank == 0) (void)ranks.isend(numbers(50'000, 1), 1);
    ranks.barrier();
    if (rank == 1) {
      EXPECT_EQ(ranks.recv(50'000, 0), numbers(50'000, 1));
    }
    ranks.barrier();
  });
}

TEST_P(TaggedMessagesTest, many_under_way_on_both_sides) {
  constexpr int kMessages = 2000;
  on_ranks(2, [](Rank& ranks, int rank) {
    for (int round = 0; round < 3; ++round) {
      std::vector<std::shared_ptr<Ints>> got;
      std::vector<Rank::Request> posted;
      for (int i = 0; i < kMessages; ++i) {
        got.push_back(std::make_shared<Ints>(1));
        posted.push_back(ranks.irecv(got.back(), 1 - rank, i % 3));
      }
      for (int i = 0; i < kMessages; ++i) posted.push_back(ranks.isend({i}, 1 - rank, i % 3));
      for (const auto& each : posted) each->wait(Rank::kLimit);
      for (int i = 0; i < kMessages; ++i) {
        ASSERT_EQ(*got[static_cast<std::size_t>(i)], Ints{i});
      }
    }
  });
}

TEST_P(TaggedMessagesTest, more_than_may_be_under_way) {
  constexpr int kMax = 4096;
  on_ranks(3, [](Rank& ranks, int rank) {
    std::vector<Rank::Request> sent;
    if (rank == 2) sent.push_back(ranks.isend({6}, 0));
    ranks.barrier();
    if (rank == 0) {
      for (int i = 0; i < kMax; ++i) sent.push_back(ranks.isend({i}, 1));
      expect_contains(thrown<UsageError>([&] { (void)ranks.isend({0}, 1); }),
                      "4096 sends and receives of this rank are pending");
      EXPECT_EQ(ranks.recv(1, 2), Ints{6});  // a match needs no free entry
    }
    ranks.barrier();
    if (rank == 2) ranks.send({7}, 1, 5);  // not kept from it by those of rank 0
    if (rank == 1) {
      EXPECT_EQ(ranks.recv(1, 2, 5), Ints{7});
      for (int i = 0; i < kMax; ++i) ASSERT_EQ(ranks.recv(1, 0), Ints{i});
    }
    if (rank == 0) {
      for (const auto& each : sent) each->wait(Rank::kLimit);
      ranks.send({1}, 1);
      sent.clear();
      for (int i = 0; i < kMax; ++i) {  // given up
        sent.push_back(ranks.isend({i}, 2, 1));
        sent.back()->end_with(std::make_exception_ptr(UsageError({}, "enough")));
      }
      ranks.send({2}, 1);  // rank 2, which does not receive yet, has the list of the others
      ranks.send({3}, 2);
    }
    if (rank == 1) {
      EXPECT_EQ(ranks.recv(1, 0), Ints{1});
      EXPECT_EQ(ranks.recv(1, 0), Ints{2});
    }
    if (rank == 2) {
      EXPECT_EQ(ranks.recv(1, 0), Ints{3});
    }
  });
}

TEST_P(TaggedMessagesTest, of_many_threads_at_once) {
  constexpr int kThreads = 3, kMessages = 300;
  on_ranks(3, [](Rank& ranks, int rank) {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {  // to the next rank, from any
        std::mt19937 random(static_cast<unsigned>(10 * rank + t));
        const int next = (rank + 1) % 3, before = (rank + 2) % 3;
        for (int i = 0; i < kMessages; ++i) {
          const std::size_t n = 1 + static_cast<std::size_t>(i * i % 4099);
          const bool sends_first = random() % 2 == 0;
          Rank::Request sent;
          if (sends_first) sent = ranks.isend(numbers(n, 1000 * rank + i), next, t);
          const auto data = std::make_shared<Ints>(n);
          const auto got =
              ranks.irecv(data, random() % 2 == 0 ? before : TaggedMessages::kAnySource, t);
          if (!sends_first) sent = ranks.isend(numbers(n, 1000 * rank + i), next, t);
          got->wait(Rank::kLimit);
          sent->wait(Rank::kLimit);
          EXPECT_EQ(got->source(), before);
          EXPECT_EQ(*data, numbers(n, 1000 * before + i));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    ranks.barrier();
  });
}

TEST_P(TaggedMessagesTest, end_with_the_group) {
  on_ranks(2, [](Rank& ranks, int rank) {
    const auto data = std::make_shared<Ints>(1);
    const auto never = ranks.irecv(data, 1 - rank, 3);
    ranks.barrier();
    if (rank == 1) ranks.engine().abandon("no more data");
    expect_contains(thrown<PeerFailed>([&] { never->wait(Rank::kLimit); }),
                    "rank 1 failed: no more data");
    expect_contains(thrown<PeerFailed>([&] { ranks.send({1}, 1 - rank); }), "no more data");
  });
}

TEST_P(TaggedMessagesTest, end_when_their_owner_leaves) {
  on_ranks(2, [](Rank& ranks, int rank) {
    if (rank == 0) {
      const auto never = ranks.irecv(std::make_shared<Ints>(1), 1);
      EXPECT_FALSE(never->poll());
      std::thread waiting([&] {
        expect_contains(thrown<UsageError>([&] { never->wait(Rank::kLimit); }),
                        "this rank has left the group");
      });
      ranks.engine().leave({});
      waiting.join();
      EXPECT_TRUE(never->poll());
    } else {  // stays until rank 0 has gone
      expect_contains(thrown<PeerLost>([&] { ranks.recv(1, 0); }), "rank 0 left");
    }
  });
}

TEST_P(TaggedMessagesTest, cancelled_by_their_owner) {
  on_ranks(2, [](Rank& ranks, int rank) {
    const auto data = std::make_shared<Ints>(1);
    if (rank == 1) {
      const auto received = ranks.irecv(data, 0);
      received->end_with(std::make_exception_ptr(UsageError({}, "enough")));
      expect_contains(thrown<UsageError>([&] { received->wait(Rank::kLimit); }), "enough");
    }
    ranks.barrier();
    if (rank == 0) ranks.send({2}, 1);
    if (rank == 1) {
      EXPECT_EQ(ranks.recv(1, 0), Ints{2});
    }
    EXPECT_EQ(*data, Ints{0});
  });
}

/// Ranks that end, as processes.
class TaggedMessagesEndTest : public TaggedMessagesTest {
 protected:
  /// Statuses as from waitpid.
  std::vector<int> end_on_ranks(int n, const Body& body) const {
    return run_processes(n, [segment = world(GetParam(), n), &body] {
      Rank rank(segment);
      body(rank, get_rank());
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, TaggedMessagesEndTest, testing::Values(Form::processes),
                         [](const auto&) { return "processes"; });

TEST_P(TaggedMessagesEndTest, a_killed_rank_is_named) {
  const auto statuses = end_on_ranks(3, [](Rank& ranks, int rank) {
    const auto data = std::make_shared<Ints>(1);
    Rank::Request waiting;
    if (rank == 0) waiting = ranks.irecv(data, TaggedMessages::kAnySource);
    if (rank == 1) waiting = ranks.isend({1}, 2);
    if (rank == 2) waiting = ranks.isend({1}, 1, 7);
    ranks.barrier();
    if (rank == 2) ::raise(SIGKILL);
    expect_contains(thrown<PeerLost>([&] { waiting->wait(Rank::kLimit); }), "rank 2 ");
    if (rank == 1) {  // finds what the dead rank has posted
      expect_contains(thrown<PeerLost>([&] { (void)ranks.recv(1, 2, 7); }), "rank 2 ");
      expect_contains(thrown<PeerLost>([&] { ranks.send({1}, 2, 9); }), "rank 2 ");
    }
  });
  EXPECT_EQ(statuses[0], 0);
  EXPECT_EQ(statuses[1], 0);
}

TEST_P(TaggedMessagesEndTest, failure_of_a_rank_reaches_peers) {
  const auto statuses = end_on_ranks(2, [](Rank& ranks, int rank) {
    const auto data = std::make_shared<Ints>(1);
    const auto waiting = ranks.irecv(data, 1 - rank);
    ranks.barrier();
    if (rank == 1) ranks.leave_and_end("ValueError: no such sample");
    expect_contains(thrown<PeerFailed>([&] { waiting->wait(Rank::kLimit); }),
                    "rank 1 failed: ValueError: no such sample");
  });
  EXPECT_EQ(statuses[0], 0);
}

TEST_P(TaggedMessagesEndTest, ranks_that_have_left_in_order_end_no_wait_for_any) {
  const auto statuses = end_on_ranks(3, [](Rank& ranks, int rank) {
    const auto data = std::make_shared<Ints>(1);
    if (rank == 0) {
      const auto first = ranks.irecv(data, TaggedMessages::kAnySource);
      first->wait(Rank::kLimit);
      EXPECT_EQ(first->source(), 1);
      const auto second = ranks.irecv(data, TaggedMessages::kAnySource);
      // Rank 2 sends after rank 0 has waited for a while.
      expect_contains(thrown<TimeoutError>([&] { second->wait(milliseconds(200)); }), "any rank");
      const auto third = ranks.irecv(data, TaggedMessages::kAnySource);
      ranks.send({0}, 2);
      third->wait(Rank::kLimit);
      EXPECT_EQ(third->source(), 2);
      const auto last = ranks.irecv(data, TaggedMessages::kAnySource);
      expect_contains(thrown<PeerLost>([&] { last->wait(Rank::kLimit); }), "left");
    } else if (rank == 1) {
      ranks.send({1}, 0);
      ranks.leave_and_end("");
    } else {
      (void)ranks.recv(1, 0);
      ranks.send({2}, 0);
      ranks.leave_and_end("");
    }
  });
  EXPECT_EQ(statuses[0], 0);
}

TEST_P(TaggedMessagesEndTest, a_poll_sees_the_end_of_a_rank) {
  const auto statuses = end_on_ranks(2, [](Rank& ranks, int rank) {
    const auto data = std::make_shared<Ints>(1);
    const auto waiting = ranks.irecv(data, 1 - rank);
    ranks.barrier();
    if (rank == 1) ::raise(SIGKILL);
    EXPECT_TRUE(wait_until([&] { return waiting->poll(); }));
    expect_contains(thrown<PeerLost>([&] { waiting->wait(milliseconds(0)); }), "rank 1 ");
  });
  EXPECT_EQ(statuses[0], 0);
}

TEST_P(TaggedMessagesEndTest, a_rank_that_died_after_its_copies_is_no_copier) {
  constexpr int kMax = 4096, kTrials = 300;
  static constexpr std::size_t kLong = 100'000;
  const auto statuses = end_on_ranks(3, [](Rank& ranks, int rank) {
    std::vector<Rank::Request> posted;  // rank 2 copies every message to rank 0
    for (int i = 0; rank == 0 && i < kMax; ++i) {
      posted.push_back(ranks.irecv(std::make_shared<Ints>(1), 2));
    }
    ranks.barrier();
    if (rank == 2) {
      for (int i = 0; i < kMax; ++i) ranks.send({i}, 0);
      ::raise(SIGKILL);
    }
    if (rank == 0) {
      for (const auto& each : posted) each->wait(Rank::kLimit);
      expect_contains(thrown<PeerLost>([&] { (void)ranks.recv(1, 2); }), "rank 2 ");
    }
    for (int i = 0; i < kTrials; ++i) {
      if (rank == 1) {
        EXPECT_EQ(ranks.recv(1, 0), Ints{i});
        ranks.send(numbers(kLong, i), 0, 1);
        continue;
      }
      const auto data = std::make_shared<Ints>(kLong);
      const auto got = ranks.irecv(data, 1, 1);
      ranks.send({i}, 1);
      while (!got->poll()) {
      }
      got->wait(Rank::kLimit);
      EXPECT_EQ(got->source(), 1);
      EXPECT_EQ(*data, numbers(kLong, i));
    }
  });
  EXPECT_EQ(statuses[0], 0);
  EXPECT_EQ(statuses[1], 0);
}

TEST_P(TaggedMessagesEndTest, a_rank_stopped_while_it_copies_is_named) {
  // In several system calls, so that the signal ends it before its last.
  static constexpr std::size_t kLong = (256 << 20) / sizeof(std::int32_t);
  const SharedCount pid, told;
  const auto statuses = end_on_ranks(3, [&](Rank& ranks, int rank) {
    if (rank == 1) {
      pid.store(::getpid());
      ranks.barrier();
      expect_contains(thrown<TimeoutError>([&] { ranks.send(Ints(kLong, 1), 0); }),
                      "rank 0 abandoned its message while this rank copied it");
      return;
    }
    if (rank == 2) {
      ranks.barrier();
      EXPECT_TRUE(told.wait_for(1));
      return;
    }
    const auto data = std::make_shared<Ints>(kLong);
    const auto got = ranks.irecv(data, TaggedMessages::kAnySource);
    ranks.barrier();
    EXPECT_TRUE(wait_until([&] { return std::atomic_ref(data->front()).load() == 1; }));
    ::kill(pid.value(), SIGSTOP);  // takes effect when the copy's system call returns
    EXPECT_TRUE(wait_until([&] { return thread_state(pid.value()) == 'T'; }));
    const std::string text = thrown<TimeoutError>([&] { got->wait(milliseconds(300)); });
    expect_contains(text, "rank 1 is stopped");
    expect_contains(text, "and has begun to copy the message");
    ::kill(pid.value(), SIGCONT);
    told.raise();
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

/// Everyone with everyone, both ways at once, until an error.
template <class E>
std::string text_of_traffic(Rank& ranks, int rank, milliseconds limit) {
  return thrown<E>([&] {
    while (true) {
      for (int r = 0; r < 3; ++r) {
        if (r == rank) continue;
        const auto data = std::make_shared<Ints>(30'000);
        const auto got = ranks.irecv(data, r);
        const auto sent = ranks.isend(numbers(30'000, r), r);
        got->wait(limit);
        sent->wait(limit);
        EXPECT_EQ(*data, numbers(30'000, rank));
      }
    }
  });
}

TEST_P(TaggedMessagesEndTest, a_rank_killed_at_any_moment_is_named) {
  std::mt19937 random(17);
  for (int trial = 0; trial < 20; ++trial) {
    const auto delay_us = static_cast<useconds_t>(random() % 5000);
    const auto statuses = end_on_ranks(3, [&](Rank& ranks, int rank) {
      if (rank == 2) {
        std::thread([delay_us] {
          ::usleep(delay_us);
          ::raise(SIGKILL);
        }).detach();
      }
      const std::string text = text_of_traffic<PeerLost>(ranks, rank, Rank::kLimit);
      if (rank == 2) ::pause();
      expect_contains(text, "rank 2 ");
      ranks.engine().leave(text);  // the error that the other may get
    });
    EXPECT_EQ(statuses[0], 0);
    EXPECT_EQ(statuses[1], 0);
  }
}

TEST_P(TaggedMessagesEndTest, a_rank_stopped_at_any_moment_is_named) {
  std::mt19937 random(18);
  for (int trial = 0; trial < 8; ++trial) {
    const auto delay_us = static_cast<useconds_t>(random() % 5000);
    const SharedCount told, named, pid;
    const auto statuses = end_on_ranks(3, [&](Rank& ranks, int rank) {
      if (rank == 2) {
        pid.store(::getpid());
        std::thread([delay_us] {
          ::usleep(delay_us);
          ::kill(::getpid(), SIGSTOP);
        }).detach();
        (void)text_of_traffic<Error>(ranks, rank, Rank::kLimit);  // continued, and without peers
        return;
      }
      const auto text = text_of_traffic<TimeoutError>(ranks, rank, milliseconds(500));
      // Of the two running ranks, one may wait for the other, which waits for rank 2 or has timed
      // out.
      if (text.find("rank 2 ") != std::string::npos) named.raise();
      told.raise();
      EXPECT_TRUE(told.wait_for(2));
      if (rank == 0) ::kill(pid.value(), SIGCONT);
    });
    EXPECT_EQ(statuses[0], 0);
    EXPECT_EQ(statuses[1], 0);
    EXPECT_EQ(statuses[2], 0);
    EXPECT_GE(named.value(), 1);
  }
}

}  // namespace
}  // namespace lockstep::test
