#include "engines/hierarchical/hierarchical.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.hpp"
#include "base/process.hpp"
#include "conformance/reference.hpp"
#include "engines/hierarchical/hosts.hpp"
#include "engines/shared/bootstrap/job.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "group/step.hpp"
#include "support/expect.hpp"
#include "support/namespaces.hpp"
#include "support/waiting.hpp"

namespace lockstep::hierarchical {
namespace {

using std::chrono::seconds;
using test::Bytes;
/// For each rank the lowest rank on its host.
using Hosts = std::vector<int>;

Call barrier_call() {
  return {.op = Op::barrier,
          .group = "world",
          .sequence = 1,
          .timeout = seconds(60),
          .where = std::source_location::current()};
}

/// Ranks as threads, told to be on these hosts; between them the shared engine stands for a
/// network.
void run_hosts(
    const Hosts& hosts, const std::function<void(const Group&)>& body,
    const std::function<std::unique_ptr<Engine>(std::unique_ptr<Engine>)>& wrap = std::identity()) {
  const int n = static_cast<int>(hosts.size());
  auto segment = shared::make_world(shared::Segment::for_threads(n));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const Call barrier = barrier_call();
        body(Group(make(wrap(shared::join_world(segment, rank, barrier)), hosts, barrier), "world",
                   seconds(60)));
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

const std::vector<Hosts>& layouts() {
  static const std::vector<Hosts> all = {{0, 0, 2, 2}, {0, 0, 0, 3},    {0, 1, 0, 1},
                                         {0, 0, 0},    {0, 1, 1, 0, 4}, {0, 0, 2, 2, 4, 4}};
  return all;
}

constexpr DType kTypes[] = {DType::u8,  DType::i8,   DType::i32, DType::i64,
                            DType::f16, DType::bf16, DType::f32, DType::f64};

TEST(HierarchicalTest, all_reduce_of_every_type_and_reduction) {
  for (const Hosts& hosts : layouts()) {
    run_hosts(hosts, [&](const Group& group) {
      EXPECT_EQ(group.backend(), "hierarchical");
      for (const DType dtype : kTypes) {
        for (const auto& row : kReduceOps) {
          const ReduceOp op = row.op;
          if (!can_reduce(op, dtype)) continue;
          for (const std::size_t count : {0, 1, 67, 33'333}) {
            Bytes data = test::values(dtype, count, /*seed=*/count, group.rank());
            group.all_reduce({data.data(), count, dtype}, op);
            ASSERT_EQ(data, test::reduced_by_host(dtype, op, count, /*seed=*/count, hosts))
                << name_of(dtype) << ' ' << name_of(op) << ' ' << count;
          }
        }
      }
    });
  }
}

TEST(HierarchicalTest, hosts_that_are_nodes_of_the_tree_give_the_bits_of_one) {
  const std::vector<Hosts> aligned = {{0, 0, 2, 2, 4}, {0, 0, 0, 0, 4, 4, 4}, {0, 1, 2, 3, 4}};
  for (const Hosts& hosts : aligned) {
    run_hosts(hosts, [](const Group& group) {
      for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::product, ReduceOp::mean}) {
          for (const std::size_t count : {1, 67, 33'333}) {
            Bytes data = test::values(dtype, count, /*seed=*/count, group.rank());
            group.all_reduce({data.data(), count, dtype}, op);
            ASSERT_EQ(data, test::reduced(dtype, op, count, /*seed=*/count, group.size()))
                << name_of(dtype) << ' ' << name_of(op) << ' ' << count;
          }
        }
      }
    });
  }
}

TEST(HierarchicalTest, reduce_leaves_other_ranks_alone) {
  for (const Hosts& hosts : layouts()) {
    run_hosts(hosts, [&](const Group& group) {
      for (const DType dtype : {DType::i32, DType::bf16, DType::f32}) {
        for (int root = 0; root < group.size(); ++root) {
          for (const std::size_t count : {0, 5, 40'000}) {
            const Bytes before = test::values(dtype, count, /*seed=*/5, group.rank());
            Bytes data = before;
            group.reduce({data.data(), count, dtype}, root, ReduceOp::mean);
            ASSERT_EQ(data, root == group.rank() ? test::reduced_by_host(dtype, ReduceOp::mean,
                                                                         count, /*seed=*/5, hosts)
                                                 : before);
          }
        }
      }
    });
  }
}

TEST(HierarchicalTest, broadcast_from_every_root) {
  for (const Hosts& hosts : layouts()) {
    run_hosts(hosts, [&](const Group& group) {
      for (int root = 0; root < group.size(); ++root) {
        for (const std::size_t count : {1, 300, 400'000}) {
          Bytes data = test::values(DType::u8, count, /*seed=*/6, group.rank());
          group.broadcast({data.data(), count, DType::u8}, root);
          ASSERT_EQ(data, test::values(DType::u8, count, /*seed=*/6, root));
        }
      }
      group.barrier();
    });
  }
}

TEST(HierarchicalTest, messages_inside_and_between_hosts) {
  for (const Hosts& hosts : layouts()) {
    run_hosts(hosts, [&](const Group& group) {
      for (int from = 0; from < group.size(); ++from) {
        for (int to = 0; to < group.size(); ++to) {
          if (from == to) continue;
          std::int64_t value = from * 100 + to;
          if (group.rank() == from) group.send({&value, 1, DType::i64}, to);
          if (group.rank() != to) continue;
          std::int64_t got = -1;
          group.recv({&got, 1, DType::i64}, from);
          ASSERT_EQ(got, value);
        }
      }
    });
  }
}

/// Parts that are joined between hosts, and longer ones.
constexpr std::size_t kPartCounts[] = {0, 1, 1000, 10'000};

Bytes part_of(std::size_t count, int rank) {
  return test::values(DType::i32, count, /*seed=*/7, rank);
}
/// Every rank's part, in rank order.
Bytes all_parts(std::size_t count, int n_ranks) {
  Bytes all;
  for (int r = 0; r < n_ranks; ++r) test::append(all, part_of(count, r));
  return all;
}

TEST(HierarchicalTest, all_gather) {
  for (const Hosts& hosts : layouts()) {
    run_hosts(hosts, [](const Group& group) {
      for (const std::size_t count : kPartCounts) {
        const std::size_t n_all = count * static_cast<std::size_t>(group.size());
        const Bytes mine = part_of(count, group.rank());
        Bytes all(n_all * 4);
        group.all_gather({mine.data(), count, DType::i32}, {all.data(), n_all, DType::i32});
        ASSERT_EQ(all, all_parts(count, group.size()));
      }
    });
  }
}

TEST(HierarchicalTest, gather_and_scatter_of_every_root) {
  for (const Hosts& hosts : layouts()) {
    run_hosts(hosts, [](const Group& group) {
      for (const std::size_t count : kPartCounts) {
        const std::size_t n_all = count * static_cast<std::size_t>(group.size());
        for (int root = 0; root < group.size(); ++root) {
          const bool is_root = root == group.rank();
          const Bytes right = is_root ? all_parts(count, group.size()) : Bytes();
          const Bytes mine = part_of(count, group.rank());
          Bytes all(right.size());
          group.gather({mine.data(), count, DType::i32},
                       {all.data(), is_root ? n_all : 0, DType::i32}, root);
          ASSERT_EQ(all, right);
          Bytes part(mine.size());
          group.scatter({all.data(), is_root ? n_all : 0, DType::i32},
                        {part.data(), count, DType::i32}, root);
          ASSERT_EQ(part, mine);
        }
      }
    });
  }
}

TEST(HierarchicalTest, gather_of_unequal_parts) {
  for (const Hosts& hosts : layouts()) {
    run_hosts(hosts, [](const Group& group) {
      for (const int scale : {1, 100, 10'000}) {
        // Rank 1 has an empty part.
        const auto length = [scale](int r) {
          return static_cast<std::size_t>(r == 1 ? 0 : r + scale);
        };
        const std::vector<int> mine(length(group.rank()), group.rank());
        for (int root = 0; root < group.size(); ++root) {
          const auto parts = gather(mine, root, group);
          ASSERT_EQ(parts.empty(), root != group.rank());
          for (int r = 0; r < static_cast<int>(parts.size()); ++r) {
            ASSERT_EQ(parts[static_cast<std::size_t>(r)], std::vector<int>(length(r), r));
          }
        }
      }
    });
  }
}

TEST(HierarchicalTest, all_to_all) {
  for (const Hosts& hosts : layouts()) {
    run_hosts(hosts, [](const Group& group) {
      for (const std::size_t count : kPartCounts) {
        const std::size_t n_all = count * static_cast<std::size_t>(group.size());
        const Bytes outgoing = part_of(n_all, group.rank());
        Bytes incoming(outgoing.size());
        group.all_to_all({outgoing.data(), n_all, DType::i32},
                         {incoming.data(), n_all, DType::i32});
        Bytes right;
        for (int r = 0; r < group.size(); ++r) {
          test::append(right, test::piece(part_of(n_all, r), group.rank(), count * 4));
        }
        ASSERT_EQ(incoming, right);
      }
    });
  }
}

TEST(HierarchicalTest, reduce_scatter_of_every_type_and_reduction) {
  for (const Hosts& hosts : layouts()) {
    run_hosts(hosts, [&](const Group& group) {
      const auto check = [&](DType dtype, ReduceOp op, std::size_t count) {
        const std::size_t n_all = count * static_cast<std::size_t>(group.size());
        const Bytes all = test::values(dtype, n_all, /*seed=*/count, group.rank());
        Bytes part(count * size_of(dtype));
        group.reduce_scatter({all.data(), n_all, dtype}, {part.data(), count, dtype}, op);
        ASSERT_EQ(part, test::piece(test::reduced_by_host(dtype, op, n_all, /*seed=*/count, hosts),
                                    group.rank(), part.size()))
            << name_of(dtype) << ' ' << name_of(op) << ' ' << count;
      };
      for (const DType dtype : kTypes) {
        for (const auto& row : kReduceOps) {
          const ReduceOp op = row.op;
          if (!can_reduce(op, dtype)) continue;
          for (const std::size_t count : {0, 1, 67}) check(dtype, op, count);
        }
      }
      // In pieces.
      if (hosts == layouts().front()) check(DType::bf16, ReduceOp::mean, /*count=*/300'001);
    });
  }
}

TEST(HierarchicalTest, groups_across_and_inside_hosts) {
  for (const Hosts& hosts : layouts()) {
    run_hosts(hosts, [&](const Group& group) {
      const auto check = [](const Group& part, const std::vector<int>& members) {
        ASSERT_EQ(part.size(), static_cast<int>(members.size()));
        std::int64_t sum = members[static_cast<std::size_t>(part.rank())];
        part.all_reduce({&sum, 1, DType::i64});
        EXPECT_EQ(sum, std::accumulate(members.begin(), members.end(), 0));
        int root_value = part.rank() == part.size() - 1 ? 42 : 0;
        part.broadcast({&root_value, 1, DType::i32}, part.size() - 1);
        EXPECT_EQ(root_value, 42);
        part.barrier();
      };
      std::vector<int> all_ranks(static_cast<std::size_t>(group.size()));
      std::iota(all_ranks.begin(), all_ranks.end(), 0);
      check(group.duplicate(), all_ranks);
      // Backwards, so that the leaders change.
      check(group.split(/*color=*/0, /*key=*/group.size() - group.rank()),
            {all_ranks.rbegin(), all_ranks.rend()});
      std::vector<int> alike;
      for (const int r : all_ranks) {
        if (r % 2 == group.rank() % 2) alike.push_back(r);
      }
      const Group half = group.split(/*color=*/group.rank() % 2, /*key=*/group.rank());
      check(half, alike);
      check(half.duplicate(), alike);
      std::vector<int> here;
      for (const int r : all_ranks) {
        if (hosts[static_cast<std::size_t>(r)] == hosts[static_cast<std::size_t>(group.rank())]) {
          here.push_back(r);
        }
      }
      check(group.split(hosts[static_cast<std::size_t>(group.rank())], group.rank()), here);
      check(group, all_ranks);
    });
  }
}

/// Another engine, and what is split off it.
class Forwarding : public Engine {
 public:
  explicit Forwarding(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}
  std::string_view name() const noexcept override { return engine_->name(); }
  int rank() const noexcept override { return engine_->rank(); }
  int size() const noexcept override { return engine_->size(); }
  void run(const Call& call) override { engine_->run(call); }
  std::unique_ptr<Engine> split(const Call& call, int color, int key) override {
    auto part = engine_->split(call, color, key);
    return part ? wrap(std::move(part), color) : nullptr;
  }
  std::unique_ptr<SharedMemory> allocate(const Call& call) override {
    return engine_->allocate(call);
  }
  void abandon(std::string_view reason) noexcept override { engine_->abandon(reason); }
  void end_with(const Error& error) noexcept override { engine_->end_with(error); }
  void leave(std::string_view failure) noexcept override { engine_->leave(failure); }

 private:
  virtual std::unique_ptr<Engine> wrap(std::unique_ptr<Engine> part, int color) const = 0;

  std::unique_ptr<Engine> engine_;
};

/// Rank 1 is out of memory for the group 7 that is split off it, behind the last message.
class OutOfMemory final : public Forwarding {
 public:
  using Forwarding::Forwarding;

 private:
  std::unique_ptr<Engine> wrap(std::unique_ptr<Engine> part, int color) const override {
    if (color == 7 && rank() == 1) throw std::bad_alloc();
    return std::make_unique<OutOfMemory>(std::move(part));
  }
};

/// Notes the shortest limit of a call.
class Timed final : public Forwarding {
 public:
  using Shortest = std::atomic<std::chrono::milliseconds>;

  Timed(std::unique_ptr<Engine> engine, Shortest& shortest)
      : Forwarding(std::move(engine)), shortest_(shortest) {}
  void run(const Call& call) override {
    for (auto old = shortest_.load();
         call.timeout < old && !shortest_.compare_exchange_weak(old, call.timeout);) {
    }
    Forwarding::run(call);
  }

 private:
  std::unique_ptr<Engine> wrap(std::unique_ptr<Engine> part, int /*color*/) const override {
    return std::make_unique<Timed>(std::move(part), shortest_);
  }

  Shortest& shortest_;
};

TEST(HierarchicalTest, the_steps_of_a_call_share_its_limit) {
  Timed::Shortest shortest;
  run_hosts(
      {0, 0, 2, 2},
      [&](const Group& group) {
        group.barrier();
        shortest = std::chrono::hours(1);
        group.barrier();
        // In one of them at least the leaders wait for the other rank of their host.
        for (int i = 0; i < 20; ++i) {
          if (group.rank() % 2 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3));
          group.barrier(seconds(60));
        }
      },
      [&](std::unique_ptr<Engine> outer) {
        return std::make_unique<Timed>(std::move(outer), shortest);
      });
  // 0.7 s longer than what is left, so that the ranks of a late host report first.
  EXPECT_LT(shortest.load(), std::chrono::milliseconds(60'700));
}

TEST(HierarchicalTest, a_rank_out_of_memory_in_a_split_ends_it_on_all_ranks) {
  const Hosts hosts{0, 0, 2, 2};
  const auto wrap = [](std::unique_ptr<Engine> outer) {
    return std::make_unique<OutOfMemory>(std::move(outer));
  };
  run_hosts(
      hosts,
      [](const Group& group) {
        if (group.rank() == 1) {
          EXPECT_THROW(group.split(7), std::bad_alloc);
          return;
        }
        try {
          group.split(7);
          ADD_FAILURE() << "no error";
        } catch (const PeerFailed& error) {
          test::expect_contains(error.what(), "rank 1 failed: std::bad_alloc");
        }
      },
      wrap);
}

TEST(HierarchicalTest, all_reduce_in_shared_buffers) {
  for (const Hosts& hosts : layouts()) {
    run_hosts(hosts, [&](const Group& group) {
      constexpr std::size_t kCount = 50'000;
      const SharedBuffer buffer = group.allocate(kCount * 4);
      const Bytes mine = test::values(DType::f32, kCount, /*seed=*/8, group.rank());
      std::memcpy(buffer.data(), mine.data(), mine.size());
      group.all_reduce({buffer.data(), kCount, DType::f32}, ReduceOp::mean);
      const Bytes right =
          test::reduced_by_host(DType::f32, ReduceOp::mean, kCount, /*seed=*/8, hosts);
      EXPECT_EQ(std::memcmp(buffer.data(), right.data(), right.size()), 0);
    });
  }
}

using Operation = std::function<void(const Group&)>;

/// One operation of each family: begun inside a host, or between all ranks.
const std::map<std::string, Operation>& operations() {
  static std::array<std::int64_t, 64> unused{};
  const auto in = [](std::size_t count) { return ConstElements{unused.data(), count, DType::i64}; };
  const auto out = [](std::size_t count) {
    thread_local std::array<std::int64_t, 64> data{};
    return Elements{data.data(), count, DType::i64};
  };
  static const std::map<std::string, Operation> all = {
      {"barrier", [](const Group& group) { group.barrier(); }},
      {"all_reduce", [=](const Group& group) { group.all_reduce(out(4)); }},
      {"reduce", [=](const Group& group) { group.reduce(out(4)); }},
      {"broadcast", [=](const Group& group) { group.broadcast(out(4)); }},
      {"all_gather", [=](const Group& group) { group.all_gather(in(4), out(16)); }},
      {"gather", [=](const Group& group) { group.gather(in(4), out(16)); }},
      {"scatter", [=](const Group& group) { group.scatter(in(16), out(4)); }},
      {"reduce_scatter", [=](const Group& group) { group.reduce_scatter(in(16), out(4)); }},
      {"all_to_all", [=](const Group& group) { group.all_to_all(in(16), out(16)); }},
      {"split", [](const Group& group) { static_cast<void>(group.split(0)); }},
      {"allocate", [](const Group& group) { static_cast<void>(group.allocate(64)); }},
  };
  return all;
}

TEST(HierarchicalTest, a_wrong_operation_is_a_mismatch_on_every_rank) {
  // The one that calls it: a host's leader, another rank, and all of a host.
  const std::vector<std::vector<int>> victims = {{0}, {1}, {2}, {3}, {2, 3}};
  std::size_t turn = 0;
  std::vector<std::jthread> jobs;  // each waits more than it works
  for (const char* right : {"all_reduce", "all_gather"}) {
    for (const auto& [wrong, call_wrong] : operations()) {
      if (wrong == right) continue;
      const std::vector<int>& chosen = victims[turn++ % victims.size()];
      jobs.emplace_back([&chosen, right, &name = wrong, &call = call_wrong] {
        run_hosts({0, 0, 2, 2}, [&](const Group& group) {
          group.barrier();
          const bool is_victim = std::ranges::find(chosen, group.rank()) != chosen.end();
          try {
            is_victim ? call(group) : operations().at(right)(group);
            // It may already have all its data, and gets the error in its next call.
            group.barrier();
            ADD_FAILURE() << "no error";
          } catch (const MismatchError& error) {
            const std::string text = error.what();
            test::expect_contains(text, name + " ");
            test::expect_contains(text, "hierarchical_test.cpp:");
            EXPECT_EQ(error.context().rank, group.rank());
            for (const int peer : error.context().peers) {
              EXPECT_NE(std::ranges::find(chosen, peer), chosen.end()) << peer << "\n" << text;
            }
          } catch (const Error& error) {
            ADD_FAILURE() << name << " where others call " << right << ": " << error.what();
          }
        });
      });
    }
  }
}

TEST(HierarchicalTest, errors_of_a_host_name_ranks_by_their_numbers_in_the_group) {
  run_hosts({0, 1, 1, 1}, [](const Group& group) {
    group.barrier();
    try {
      group.rank() == 3 ? operations().at("all_gather")(group)
                        : operations().at("all_reduce")(group);
      group.barrier();
      ADD_FAILURE() << "no error";
    } catch (const MismatchError& error) {
      EXPECT_EQ(error.context().peers, std::vector{3}) << error.what();
      EXPECT_EQ(error.context().rank, group.rank());
      test::expect_contains(error.what(), "\n  3     all_gather ");
      test::expect_contains(error.what(), "\n  1, 2  all_reduce ");
    }
  });
}

TEST(HierarchicalTest, sizes_of_allocate_are_compared_between_hosts) {
  run_hosts({0, 0, 2, 2}, [](const Group& group) {
    EXPECT_THROW(static_cast<void>(group.allocate(group.rank() < 2 ? 4096 : 8192)), MismatchError);
  });
}

/// Each rank runs its part until the group fails; returns the ranks' error texts.
std::vector<std::string> timeouts_of(
    const Hosts& hosts, const std::function<void(const Group&, const test::SharedCount&)>& body) {
  std::vector<std::string> texts(hosts.size());
  const test::SharedCount n_given_up;
  run_hosts(hosts, [&](const Group& group) {
    group.barrier();
    try {
      body(group, n_given_up);
      group.barrier();
      ADD_FAILURE() << "no error on rank " << group.rank();
    } catch (const TimeoutError& error) {
      texts[static_cast<std::size_t>(group.rank())] = error.text();
    }
    n_given_up.raise();
  });
  return texts;
}

// The limit of the message is the group's, a minute.
TEST(HierarchicalTest, a_message_between_hosts_leaves_the_limits_of_other_ranks) {
  const auto texts = timeouts_of({0, 0, 2, 2}, [](const Group& group, const auto& n_given_up) {
    std::int64_t value = 1;
    const Elements whole{&value, 1, DType::i64};
    if (group.rank() == 0) group.recv(whole, 2);
    if (group.rank() == 1) group.barrier(Timeout(std::chrono::milliseconds(200)));
    if (group.rank() == 2) {
      EXPECT_TRUE(n_given_up.wait_for(2)) << "rank 1 waits for longer than its limit";
      group.send(whole, 0);
    }
  });
  for (const std::string& text : texts) {
    test::expect_contains(text, "rank 1 waited 0.2 s for rank 0 of ranks 0, 1");
    test::expect_contains(text, "recv from rank 2 on another host");
    test::expect_contains(text, "hierarchical_test.cpp:");
  }
}

// Rank 1 waits for a message of the other host, and rank 2 is late. The leader of their host waits
// for both, and the other leader for it.
TEST(HierarchicalTest, a_rank_that_waits_for_a_message_of_another_host_is_named_last) {
  const auto texts = timeouts_of({0, 0, 0, 3}, [](const Group& group, const auto& n_given_up) {
    std::int64_t value = 1;
    const Elements whole{&value, 1, DType::i64};
    if (group.rank() == 1) group.recv(whole, 3);
    if (group.rank() == 2) {
      EXPECT_TRUE(n_given_up.wait_for(3));
    }
    group.barrier(Timeout(std::chrono::milliseconds(500)));
  });
  for (const std::string& text : texts) {
    test::expect_contains(text, "rank 0 waited 0.5 s for ranks 1, 2 of ranks 0, 1, 2");
    EXPECT_LT(text.find("\n  rank 2"), text.find("\n  rank 1")) << text;
  }
}

TEST(HierarchicalTest, hosts_of_one_rank_each_need_no_hierarchy) {
  run_hosts({0, 1, 2}, [](const Group& group) { EXPECT_EQ(group.backend(), "shared"); });
}

TEST(HierarchicalTest, a_late_rank_is_named_on_all_hosts) {
  const test::SharedCount n_given_up;
  run_hosts({0, 0, 2, 2}, [&](const Group& group) {
    group.barrier();
    if (group.rank() == 3) {
      EXPECT_TRUE(n_given_up.wait_for(3));
      EXPECT_THROW(group.barrier(), Error);
      return;
    }
    try {
      group.barrier(Timeout(std::chrono::milliseconds(300)));
      ADD_FAILURE() << "no error";
    } catch (const TimeoutError& error) {
      // A level that records no calls does not report any.
      const std::string text = error.what();
      test::expect_contains(text, "rank 2 waited 0.3 s for rank 3 of ranks 2, 3; arrived: 2");
      test::expect_contains(text, "\n  rank 3 ");
      EXPECT_EQ(error.context().peers, std::vector{3});
      EXPECT_EQ(error.context().rank, group.rank());
      EXPECT_EQ(text.find("no call yet"), std::string::npos) << text;
      EXPECT_EQ(text.find("elsewhere"), std::string::npos) << text;
    }
    n_given_up.raise();
    EXPECT_THROW(group.barrier(), Error);
  });
}

/// Processes over one inherited segment, which stands for the network between hosts.
class HierarchicalProcessTest : public testing::Test {
 protected:
  /// separate_pids: each process is in a PID namespace of its own.
  std::vector<int> run(int n, const std::function<void(std::unique_ptr<Engine>)>& body,
                       bool separate_pids = false) {
    const base::UniqueFd here(::open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC));
    shared::Job job(n);
    std::fflush(nullptr);
    std::vector<pid_t> pids;
    for (int rank = 0; rank < n; ++rank) {
      EXPECT_EQ(separate_pids ? ::unshare(CLONE_NEWPID) : 0, 0);
      pids.push_back(::fork());
      if (pids.back() != 0) {
        EXPECT_EQ(separate_pids ? ::setns(here.get(), CLONE_NEWPID) : 0, 0);
      }
      if (pids.back() != 0) continue;
      ::alarm(60);
      int code = 0;
      try {
        body(shared::join_world(shared::inherit_world(job.environment()), rank, barrier_call()));
      } catch (const std::exception& error) {
        fmt::print(stderr, "rank {}: {}\n", rank, error.what());
        code = 3;
      }
      if (HasFailure()) code = 4;
      std::fflush(nullptr);
      ::_exit(code);
    }
    std::vector<int> statuses;
    for (const pid_t pid : pids) {
      int status = -1;
      ::waitpid(pid, &status, 0);
      statuses.push_back(status);
    }
    return statuses;
  }
};

TEST_F(HierarchicalProcessTest, processes_of_one_system_are_one_host) {
  const auto statuses = run(3, [](std::unique_ptr<Engine> outer) {
    EXPECT_EQ(find_hosts(*outer, barrier_call()), (Hosts{0, 0, 0}));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

TEST_F(HierarchicalProcessTest, more_ranks_than_connections_may_wait_are_one_host) {
  if (const auto why = test::missing_namespaces(); !why.empty()) GTEST_SKIP() << why;
  constexpr int kRanks = 7;
  const auto statuses = run(kRanks, [](std::unique_ptr<Engine> outer) {
    const int rank = outer->rank();
    const Call call = barrier_call();
    if (rank == 0) {  // of which all get the limit
      ASSERT_EQ(::unshare(CLONE_NEWNET), 0);
      std::ofstream("/proc/sys/net/core/somaxconn") << "1\n";
    }
    const auto pids = internal::gather_values(*outer, call, static_cast<int>(::getpid()));
    if (rank != 0) {
      const base::UniqueFd space(
          ::open(fmt::format("/proc/{}/ns/net", pids[0]).c_str(), O_RDONLY | O_CLOEXEC));
      ASSERT_EQ(::setns(space.get(), CLONE_NEWNET), 0);
    }
    int limit = 0;
    std::ifstream("/proc/sys/net/core/somaxconn") >> limit;
    ASSERT_EQ(limit, 1) << "this system does not let root set net.core.somaxconn";
    outer->run(call);
    EXPECT_EQ(find_hosts(*outer, call), Hosts(kRanks, 0));
  });
  EXPECT_EQ(statuses, std::vector<int>(kRanks, 0));
}

TEST_F(HierarchicalProcessTest, pid_namespaces_are_hosts) {
  if (const auto why = test::missing_namespaces(); !why.empty()) GTEST_SKIP() << why;
  const auto statuses = run(
      5,
      [](std::unique_ptr<Engine> outer) {
        EXPECT_EQ(::getpid(), 1);
        EXPECT_EQ(find_hosts(*outer, barrier_call()), (Hosts{0, 1, 2, 3, 4}));
      },
      /*separate_pids=*/true);
  EXPECT_EQ(statuses, std::vector<int>(5, 0));
}

TEST_F(HierarchicalProcessTest, network_namespaces_are_hosts) {
  if (const auto why = test::missing_namespaces(); !why.empty()) GTEST_SKIP() << why;
  const Hosts right = {0, 0, 2, 2, 4};
  const auto statuses = run(5, [&right](std::unique_ptr<Engine> outer) {
    const int rank = outer->rank();
    const Call call = barrier_call();
    if (rank == 2 || rank == 4) {
      ASSERT_EQ(::unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC), 0);
    }
    const auto pids = internal::gather_values(*outer, call, static_cast<int>(::getpid()));
    if (rank == 3) {
      const base::UniqueFd space(
          ::open(fmt::format("/proc/{}/ns/net", pids[2]).c_str(), O_RDONLY | O_CLOEXEC));
      ASSERT_EQ(::setns(space.get(), CLONE_NEWNET), 0);
    }
    outer->run(call);
    const Hosts hosts = find_hosts(*outer, call);
    EXPECT_EQ(hosts, right);
    const Group group(make(std::move(outer), hosts, call), "world", seconds(30));
    EXPECT_EQ(group.backend(), "hierarchical");
    Bytes data = test::values(DType::f32, 10'000, /*seed=*/9, rank);
    group.all_reduce({data.data(), 10'000, DType::f32});
    EXPECT_EQ(data, test::reduced_by_host(DType::f32, ReduceOp::sum, 10'000, /*seed=*/9, right));
  });
  EXPECT_EQ(statuses, std::vector<int>(5, 0));
}

TEST_F(HierarchicalProcessTest, a_death_on_one_host_ends_all) {
  for (const int victim : {2, 3}) {  // a leader, and one that is not
    const auto statuses = run(4, [victim](std::unique_ptr<Engine> outer) {
      const int rank = outer->rank();
      const Group group(make(std::move(outer), {0, 0, 2, 2}, barrier_call()), "world", seconds(50));
      group.barrier();
      if (rank == victim) ::raise(SIGKILL);
      try {
        group.barrier();
        ADD_FAILURE() << "no error";
      } catch (const PeerLost&) {
      }
    });
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(statuses[static_cast<std::size_t>(rank)], rank == victim ? SIGKILL : 0) << rank;
    }
  }
}

TEST_F(HierarchicalProcessTest, a_leader_stopped_between_hosts_is_late_at_the_limit) {
  const auto statuses = run(4, [](std::unique_ptr<Engine> outer) {
    const int rank = outer->rank();
    const auto pids = internal::gather_values(*outer, barrier_call(), static_cast<int>(::getpid()));
    // Only the call below may end by its limit. The leader's extension is longer than a test may
    // take: where it counts for a stopped rank, rank 3 waits for ever.
    const Group group(make(std::move(outer), {0, 0, 2, 2}, barrier_call()), "world",
                      std::chrono::hours(1));
    group.barrier();
    const pid_t leader = pids[2];
    const auto wait_until = [leader](auto... states) {
      const auto start_time = base::process_start_time(leader);
      for (;; std::this_thread::yield()) {
        const auto state = base::process_state(leader, start_time);
        if (((state == states) || ...)) return;
      }
    };
    using base::ProcessState;
    double value = 0;
    const Elements whole{&value, 1, DType::f64};
    if (rank == 2) {
      EXPECT_THROW(group.broadcast(whole, /*src=*/0), Error);  // rank 0 does not come
    } else if (rank == 3) {
      wait_until(ProcessState::sleeping);
      ::kill(leader, SIGSTOP);
      try {
        group.broadcast(whole, /*src=*/0, Timeout(std::chrono::milliseconds(500)));
        ADD_FAILURE() << "no error";
      } catch (const TimeoutError& error) {
        const std::string text = error.text();
        test::expect_contains(text, "waited 0.5 s for rank 2 of ranks 2, 3; arrived: 3");
        test::expect_contains(text, "is stopped by a signal");
      }
      ::kill(leader, SIGCONT);
    } else {
      wait_until(ProcessState::stopped);
      wait_until(ProcessState::running, ProcessState::sleeping, ProcessState::gone);
    }
  });
  EXPECT_EQ(statuses, std::vector<int>(4, 0));
}

// The deadline of rank 3 passes while its leader, rank 2, waits for the other host.
TEST(HierarchicalTest, a_leader_that_waits_for_another_host_is_not_late) {
  constexpr std::chrono::milliseconds kTimeout(1000);
  std::atomic<pid_t> leader{0};
  const test::SharedCount waiting;
  run_hosts({0, 0, 2, 2}, [&](const Group& group) {
    // No call before: it would extend the deadline too.
    std::int64_t sum = 1;
    const Elements whole{&sum, 1, DType::i64};
    if (group.rank() < 2) {
      EXPECT_TRUE(waiting.wait_for(1));
      test::outlast(kTimeout);
      group.all_reduce(whole);
    } else if (group.rank() == 2) {
      leader = ::gettid();
      group.all_reduce(whole);
    } else {
      EXPECT_TRUE(test::wait_until_asleep(leader));
      waiting.raise();
      group.all_reduce(whole, ReduceOp::sum, Timeout(kTimeout));
    }
    EXPECT_EQ(sum, 4);
  });
}

}  // namespace
}  // namespace lockstep::hierarchical
