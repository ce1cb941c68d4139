// Calls that are refused, or that have no memory. An engine that has the installed headers alone
// need not report them.

#ifndef LOCKSTEP_CONFORMANCE_ENGINE
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "conformance/conformance.hpp"
#include "support/expect.hpp"
#ifndef LOCKSTEP_CONFORMANCE_GLOO
#include "support/allocations.hpp"
#endif

namespace lockstep::test {
namespace {

/// A collective in two forms: one that every rank makes, and one that is refused.
struct Refusable {
  const char* operation;
  std::function<void(const Group&)> made, refused;
};

std::vector<Refusable> refusable_calls() {
  // Larger than what is sent eagerly, and than a slot.
  static thread_local std::vector<double> data, more, out;
  data.assign(70'000, 1);
  more.assign(70'000 * 16, 1);
  out.assign(70'000 * 16, 1);
  static const std::size_t n = 70'000;
  const auto all = [](const Group& group) { return n * static_cast<std::size_t>(group.size()); };
  const auto of = [](std::vector<double>& v, std::size_t count) {
    return Elements{v.data(), count, DType::f64};
  };
  std::vector<Refusable> calls;
  calls.push_back({"all_reduce", [=](const Group& g) { g.all_reduce(of(data, n)); },
                   [](const Group& g) {
                     g.all_reduce({nullptr, 3, DType::f64});
                   }});
  calls.push_back({"all_reduce", [=](const Group& g) { g.all_reduce(of(data, 1)); },
                   [=](const Group& g) { g.all_reduce(of(data, 1), ReduceOp::bxor); }});
  calls.push_back({"all_reduce",
                   [=](const Group& g) { (void)g.all_reduce_async(of(data, n)).wait(); },
                   [](const Group& g) {
                     (void)g.all_reduce_async({nullptr, 3, DType::f64});
                   }});
  calls.push_back({"reduce", [=](const Group& g) { g.reduce(of(data, n), 0); },
                   [=](const Group& g) { g.reduce(of(data, n), -1); }});
  calls.push_back({"broadcast", [=](const Group& g) { g.broadcast(of(data, n), 0); },
                   [=](const Group& g) { g.broadcast(of(data, n), g.size()); }});
  calls.push_back({"all_gather",
                   [=](const Group& g) { g.all_gather(of(data, n), of(more, all(g))); },
                   [=](const Group& g) { g.all_gather(of(data, n), of(more, all(g) - 1)); }});
  calls.push_back({"gather", [=](const Group& g) { g.gather(of(data, n), of(more, all(g)), 0); },
                   [=](const Group& g) { g.gather(of(data, n), of(more, all(g)), 99); }});
  calls.push_back({"scatter", [=](const Group& g) { g.scatter(of(more, all(g)), of(data, n), 0); },
                   [=](const Group& g) {
                     g.scatter(of(more, all(g)), {nullptr, n, DType::f64}, 0);
                   }});
  calls.push_back({"reduce_scatter",
                   [=](const Group& g) { g.reduce_scatter(of(more, all(g)), of(data, n)); },
                   [=](const Group& g) {
                     g.reduce_scatter(of(more, all(g)), {data.data(), n, DType::f32});
                   }});
  calls.push_back({"all_to_all",
                   [=](const Group& g) { g.all_to_all(of(more, all(g)), of(out, all(g))); },
                   [=](const Group& g) { g.all_to_all(of(more, all(g)), of(more, all(g))); }});
  calls.push_back({"split", [](const Group& g) { (void)g.split(0); },
                   [](const Group& g) { (void)g.split(-1); }});
  calls.push_back({"allocate", [](const Group& g) { (void)g.allocate(64); },
                   [](const Group& g) { (void)g.allocate(SIZE_MAX); }});
  return calls;
}

TEST_P(Conformance, calls_that_all_ranks_refuse_leave_the_group_usable) {
  run([] {
    const Group group = default_group().duplicate();
    for (const Refusable& call : refusable_calls()) {
      SCOPED_TRACE(call.operation);
      for (int i = 0; i < 3; ++i) EXPECT_THROW(call.refused(group), UsageError);
      call.made(group);
      EXPECT_EQ(sum_of_ones(group), group.size());
    }
  });
}

TEST_P(Conformance, a_call_that_one_rank_refuses_is_a_mismatch_on_all) {
  SKIP_UNLESS_RANKS(2, GetParam());
  run([] {
    const Group world = default_group();
    if (world.size() == 1) return;  // launched alone
    const int refuser = world.size() - 1;
    for (const Refusable& call : refusable_calls()) {
      SCOPED_TRACE(call.operation);
      const Group group = world.duplicate();
      EXPECT_EQ(sum_of_ones(group), group.size());
      world.barrier();  // the group's end would reach a rank that is still in that call
      const std::string line = "refused " + std::string(call.operation) + " #2: ";
      if (group.rank() == refuser) {
        EXPECT_THROW(call.refused(group), UsageError);
        expect_contains(thrown<MismatchError>([&] { call.made(group); }), line);
      } else {
        std::string text = thrown<MismatchError>([&] { call.made(group); });
        // Over several hosts a rank may complete its part before the hosts compare.
        if (text == "no exception") text = thrown<MismatchError>([&] { group.barrier(); });
        expect_contains(text, line);
        expect_contains(text, "refusals_test.cpp:");
      }
      world.barrier();
    }
  });
}

TEST_P(Conformance, a_rank_that_refuses_a_call_and_makes_no_other_is_reported) {
  SKIP_UNLESS_RANKS(2, GetParam());
  run([] {
    const Group world = default_group();
    if (world.size() == 1) return;  // launched alone
    const Group group = world.duplicate();
    if (group.rank() == 0) {
      EXPECT_THROW(group.all_reduce({nullptr, 3, DType::f64}), UsageError);
    } else {
      expect_contains(thrown<MismatchError>([&] { group.barrier(); }), "refused all_reduce #1: ");
    }
    world.barrier();
  });
}

TEST_P(Conformance, ranks_that_refuse_different_numbers_of_calls_are_reported) {
  SKIP_UNLESS_RANKS(2, GetParam());
  run([] {
    const Group world = default_group();
    if (world.size() == 1) return;  // launched alone
    const Group group = world.duplicate();
    const int n = group.rank() == 0 ? 2 : 1;
    for (int i = 0; i < n; ++i) {
      EXPECT_THROW(group.all_reduce({nullptr, 3, DType::f64}), UsageError);
    }
    const std::string text = thrown<MismatchError>([&] { sum_of_ones(group); });
    expect_contains(text, "refused all_reduce #2: ");
    EXPECT_EQ(text.find("refused all_reduce #1: "), std::string::npos) << text;
    world.barrier();
  });
}

#ifndef LOCKSTEP_CONFORMANCE_GLOO  // where a call that ends inside a message takes the connection
/// "", or the error that the call threw, which must not be a timeout.
std::string text_thrown(const std::function<void()>& call) {
  try {
    call();
    return "";
  } catch (const TimeoutError& error) {
    ADD_FAILURE() << error.what();
    return error.what();
  } catch (const std::exception& error) {
    return error.what();
  }
}

/// Allocations of each operation fail in turn on one rank, each of the first eight. It gets an
/// exception, and its peers an error; or it does without the memory, and the call is right.
TEST_P(LocalConformance, no_memory_on_one_rank_ends_the_call_on_all) {
  SKIP_UNLESS_RANKS(2, GetParam());
  run([] {
    const Group world = default_group();
    if (world.size() == 1) return;  // launched alone
    const bool is_victim = world.rank() == world.size() - 1;
    for (const Refusable& call : refusable_calls()) {
      SCOPED_TRACE(call.operation);
      int n_failed = 0;
      for (int nth = 1, is_over = 0; is_over == 0; nth += 1 + nth / 8) {
        SCOPED_TRACE(nth);
        const Group group = world.duplicate();
        int n_left = 0;
        std::string text = text_thrown([&] {
          if (is_victim) fail_allocation(nth);
          call.made(group);
        });
        if (is_victim) n_left = fail_allocation(0);
        n_failed += text.empty() ? 0 : 1;
        // It may have failed behind the last message of its part.
        if (text.empty()) text = text_thrown([&] { EXPECT_EQ(sum_of_ones(group), group.size()); });
        int has_failed = text.empty() ? 0 : 1;
        world.broadcast({&has_failed, 1, DType::i32}, world.size() - 1);
        ASSERT_EQ(has_failed, text.empty() ? 0 : 1) << text;
        is_over = n_left > 0 ? 1 : 0;
        world.broadcast({&is_over, 1, DType::i32}, world.size() - 1);
      }
      // Every engine needs memory for a new group.
      EXPECT_TRUE(n_failed > 0 || std::string_view(call.operation) != "split");
    }
  });
}

/// Of a refused call: then the peers are told why it ends, whether it is behind a pending one or
/// not.
TEST_P(LocalConformance, no_memory_for_a_refusal_ends_the_group) {
  SKIP_UNLESS_RANKS(2, GetParam());
  run([] {
    const Group world = default_group();
    const bool is_victim = world.rank() == world.size() - 1;
    for (const bool is_behind : {false, true}) {
      for (int nth = 1, is_over = 0; is_over == 0; nth += 1 + nth / 8) {
        SCOPED_TRACE(nth);
        const Group group = world.duplicate();
        double one = 1;
        std::optional<Work> before;
        int n_left = 0;
        if (is_victim) {
          if (is_behind) before = group.all_reduce_async({&one, 1, DType::f64});
          fail_allocation(nth);
          EXPECT_ANY_THROW(group.all_reduce({nullptr, 3, DType::f64}));
          n_left = fail_allocation(0);
        }
        world.barrier();  // the call before is pending until then
        if (!is_victim && is_behind) before = group.all_reduce_async({&one, 1, DType::f64});
        const std::string text = text_thrown([&] {
          if (before) before->wait();
          EXPECT_EQ(sum_of_ones(group), group.size());
        });
        int has_failed = text.empty() ? 0 : 1;
        world.broadcast({&has_failed, 1, DType::i32}, world.size() - 1);
        ASSERT_EQ(has_failed, text.empty() ? 0 : 1) << text;
        is_over = n_left > 0 ? 1 : 0;
        world.broadcast({&is_over, 1, DType::i32}, world.size() - 1);
        if (is_over != 0) expect_contains(text, "refused all_reduce #");
      }
    }
  });
}
#endif

TEST_P(Conformance, a_refused_call_follows_the_pending_ones) {
  run([] {
    const Group world = default_group();
    const Group group = world.duplicate();
    for (int round = 0; round < 20; ++round) {
      std::vector<double> one(20'000, 1), two(1, 1);
      Work first = group.all_reduce_async({one.data(), one.size(), DType::f64});
      Work second = group.all_reduce_async({two.data(), 1, DType::f64});
      EXPECT_THROW((void)group.all_reduce_async({nullptr, 3, DType::f64}), UsageError);
      first.wait();
      second.wait();
      EXPECT_EQ(one.back(), group.size());
      EXPECT_EQ(two[0], group.size());
    }
  });
}

TEST_P(Conformance, a_refused_send_or_recv_ends_the_group) {
  SKIP_UNLESS_RANKS(2, GetParam());
  run([] {
    const Group world = default_group();
    if (world.size() == 1) return;  // launched alone
    const int rank = world.rank();
    double value = rank;
    const Elements one{&value, 1, DType::f64}, none{nullptr, 1, DType::f64};
    const std::vector<double> many(200'000, 1);
    const ConstElements large{many.data(), many.size(), DType::f64};
    // On every rank, whatever it calls next.
    const auto expect_ended = [](const Group& group, const std::string& text) {
      expect_contains(thrown<MismatchError>([&] { (void)sum_of_ones(group); }), text);
    };
    // All ranks have left the call that made it: a group that fails ends those that are still
    // there.
    const auto new_group = [&world] {
      const Group group = world.duplicate();
      world.barrier();
      return group;
    };
    {  // by the sender
      const Group group = new_group();
      if (rank == 0) {
        EXPECT_THROW(group.send(none, 1), UsageError);
      }
      if (rank == 1) {
        expect_contains(thrown<MismatchError>([&] { group.recv(one, 0); }),
                        "rank 0 refused send #1: ");
      }
      expect_ended(group, "rank 0 refused send #1: ");
      world.barrier();
    }
    {  // by the sender, whose next message the receiver would take
      const Group group = new_group();
      if (rank == 0) {
        EXPECT_THROW(group.send(none, 1), UsageError);
        (void)thrown<MismatchError>([&] { group.send(one, 1); });
      }
      if (rank == 1) {
        (void)thrown<MismatchError>([&] { group.recv(one, 0); });
      }
      world.barrier();
    }
    {  // by the receiver
      const Group group = new_group();
      if (rank == 0) {
        expect_contains(thrown<MismatchError>([&] { group.send(large, 1); }),
                        "rank 1 refused recv #1: ");
      }
      if (rank == 1) {
        EXPECT_THROW(group.recv(none, 0), UsageError);
      }
      expect_ended(group, "rank 1 refused recv #1: ");
      world.barrier();
    }
    {  // of a rank that does not exist
      const Group group = new_group();
      if (rank == 0) {
        EXPECT_THROW(group.send(one, 1000), UsageError);
      }
      expect_ended(group, "rank 0 refused send #1: dst is 1000");
      world.barrier();
    }
  });
}

}  // namespace
}  // namespace lockstep::test
#endif
