// Required of every engine, at every world size. To add an engine, add a line to `settings`.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <lockstep/lockstep.hpp>
#include <numeric>
#include <optional>
#include <random>
#include <source_location>

#include "conformance/reference.hpp"
#ifndef LOCKSTEP_CONFORMANCE_ENGINE
#include "group/native_engine.hpp"
#endif
#if !defined(LOCKSTEP_CONFORMANCE_ENGINE) && !defined(LOCKSTEP_CONFORMANCE_GLOO)
#include "support/allocations.hpp"
#endif
#include "support/expect.hpp"
#include "support/ranks.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

class Conformance : public ::testing::TestWithParam<Setting> {
 protected:
  void run(const std::function<void()>& body) { run_as(GetParam(), body); }
};

std::vector<Setting> settings() {
#ifdef LOCKSTEP_CONFORMANCE_GLOO  // in nn_tests: not in core_tests
  return {{Form::gloo, 1}, {Form::gloo, 2},       {Form::gloo, 3},      {Form::gloo, 4},
          {Form::gloo, 8}, {Form::gloo_hosts, 3}, {Form::gloo_hosts, 4}};
#endif
#ifdef LOCKSTEP_CONFORMANCE_ENGINE  // in tests/consumer: over the engine of examples/engine
  return {{Form::threads, 1}, {Form::threads, 2}, {Form::threads, 3}, {Form::threads, 4}};
#endif
  // Under mpirun: `LOCKSTEP_TEST_BACKEND=mpi mpirun -n 3 core_tests --gtest_filter=*/launched`.
  if (std::getenv("LOCKSTEP_TEST_BACKEND") != nullptr) return {{Form::launched, 0}};
  std::vector<Setting> all = {{Form::solo, 1}};
  for (const int n : {1, 2, 3, 4, 8}) {
    all.push_back({Form::threads, n});
    all.push_back({Form::processes, n});
    if (n > 1) all.push_back({Form::hosts, n});
  }
  // Without levels, and with two of them, in which a part has one rank.
  for (const int n : {3, 9}) all.push_back({Form::messages, n});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Engines, Conformance, ::testing::ValuesIn(settings()),
                         [](const auto& setting) { return name_of(setting.param); });

/// Of ranks that are in a world and share memory beside the engine.
class LocalConformance : public Conformance {};
std::vector<Setting> local_settings() {
#ifdef LOCKSTEP_CONFORMANCE_ENGINE  // whose ranks have a group and no world
  return {};
#endif
  std::vector<Setting> all = settings();
  std::erase_if(all, [](const Setting& setting) { return setting.form == Form::launched; });
  return all;
}
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LocalConformance);
INSTANTIATE_TEST_SUITE_P(Engines, LocalConformance, ::testing::ValuesIn(local_settings()),
                         [](const auto& setting) { return name_of(setting.param); });

constexpr DType kTypes[] = {DType::boolean, DType::u8,  DType::i8,  DType::u16, DType::i16,
                            DType::u32,     DType::i32, DType::u64, DType::i64, DType::f16,
                            DType::bf16,    DType::f32, DType::f64};
/// The result of a reduction over a whole group, by hosts where it has several.
Bytes all_reduced(DType dtype, ReduceOp op, std::size_t count, std::uint64_t seed, int n_ranks) {
  return hosts().empty() ? reduced(dtype, op, count, seed, n_ranks)
                         : reduced_by_host(dtype, op, count, seed, hosts());
}
/// Around the limits of the inline payload, a slot, a slice; zero; one; odd.
constexpr std::size_t kCounts[] = {0, 1, 7, 31, 62, 63, 1000, 4097, 70'001};

TEST_P(Conformance, all_reduce_of_every_type_and_reduction) {
  run([] {
    const Group group = default_group();
    for (const DType dtype : kTypes) {
      for (const auto& row : kReduceOps) {
        const ReduceOp op = row.op;
        if (!can_reduce(op, dtype)) continue;
        for (const std::size_t count : {std::size_t{1}, std::size_t{67}, std::size_t{33'333}}) {
          Bytes data = values(dtype, count, /*seed=*/count, group.rank());
          group.all_reduce({data.data(), count, dtype}, op);
          ASSERT_EQ(data, all_reduced(dtype, op, count, /*seed=*/count, group.size()))
              << name_of(dtype) << ' ' << name_of(op) << ' ' << count;
        }
      }
    }
  });
}

// In nightly.
TEST_P(Conformance, all_reduce_of_64_mebibytes) {
  run([] {
    const Group group = default_group();
    constexpr std::size_t kCount = (64UL << 20) / sizeof(float);
    Bytes data = values(DType::f32, kCount, /*seed=*/1, group.rank());
    group.all_reduce({data.data(), kCount, DType::f32});
    ASSERT_EQ(data, all_reduced(DType::f32, ReduceOp::sum, kCount, /*seed=*/1, group.size()));
  });
}

TEST_P(Conformance, all_reduce_of_every_length) {
  run([] {
    const Group group = default_group();
    for (const std::size_t count : kCounts) {
      for (const DType dtype : {DType::u8, DType::f32, DType::f64}) {
        Bytes data = values(dtype, count, /*seed=*/1, group.rank());
        group.all_reduce({data.data(), count, dtype});
        ASSERT_EQ(data, all_reduced(dtype, ReduceOp::sum, count, /*seed=*/1, group.size()))
            << count;
      }
    }
  });
}

TEST_P(Conformance, all_reduce_of_many_chunks) {
  run([] {
    const Group group = default_group();
    const std::size_t count = 1'000'003;
    Bytes data = values(DType::f32, count, /*seed=*/2, group.rank());
    group.all_reduce({data.data(), count, DType::f32}, ReduceOp::mean);
    ASSERT_EQ(data, all_reduced(DType::f32, ReduceOp::mean, count, /*seed=*/2, group.size()));
  });
}

TEST_P(Conformance, all_reduce_in_shared_buffers) {
  run([] {
    const Group group = default_group();
    SharedBuffer buffer = group.allocate(1'000'000);
    ASSERT_EQ(buffer.size(), 1'000'000U);
    for (const std::size_t count : {1, 100, 5'000, 250'000}) {
      const Bytes mine = values(DType::f32, count, /*seed=*/3, group.rank());
      std::memcpy(buffer.data(), mine.data(), mine.size());
      group.all_reduce({buffer.data(), count, DType::f32});
      const Bytes expected =
          all_reduced(DType::f32, ReduceOp::sum, count, /*seed=*/3, group.size());
      ASSERT_EQ(std::memcmp(buffer.data(), expected.data(), expected.size()), 0) << count;
    }
    // At another offset in the buffer, and with ordinary memory on one rank.
    const std::size_t count = 20'000;
    Bytes ordinary = values(DType::f32, count, /*seed=*/4, group.rank());
    std::memcpy(buffer.data() + 4096, ordinary.data(), ordinary.size());
    void* data = group.rank() == 0 ? ordinary.data() : buffer.data() + 4096;
    group.all_reduce({data, count, DType::f32}, ReduceOp::max);
    const Bytes expected = all_reduced(DType::f32, ReduceOp::max, count, /*seed=*/4, group.size());
    ASSERT_EQ(std::memcmp(data, expected.data(), expected.size()), 0);
    // A second buffer, after the first is freed.
    buffer = group.allocate(64);
    EXPECT_EQ(buffer.as<double>().size(), 8U);
    EXPECT_EQ(buffer.as<double>()[7], 0.0);
  });
}

#ifndef LOCKSTEP_CONFORMANCE_ENGINE  // which need not reduce them
TEST_P(Conformance, moments_of_all_ranks) {
  struct Moments {
    double count, mean, m2, unused;
  };
  run([] {
    const Group group = default_group();
    for (const std::size_t count : {1, 64, 5'000}) {
      // Rank r has r values, in sample i all i + r.
      const auto of = [](std::size_t i, int r) {
        return Moments{static_cast<double>(r), static_cast<double>(i) + r, 0, 0};
      };
      std::vector<Moments> data;
      for (std::size_t i = 0; i < count; ++i) data.push_back(of(i, group.rank()));
      group.all_reduce({data.data(), count, detail::kMoments});
      for (std::size_t i = 0; i < count; ++i) {
        double n = 0, sum = 0, m2 = 0;
        for (int r = 0; r < group.size(); ++r) {
          n += r;
          sum += r * of(i, r).mean;
        }
        for (int r = 0; r < group.size(); ++r) {
          m2 += r * (of(i, r).mean - sum / n) * (of(i, r).mean - sum / n);
        }
        ASSERT_EQ(data[i].count, n);
        if (n == 0) continue;
        ASSERT_NEAR(data[i].mean, sum / n, 1e-12 * sum);
        ASSERT_NEAR(data[i].m2, m2, 1e-12 * (1 + m2));
      }
      // The same bits on all ranks.
      std::vector<Moments> of_last = data;
      group.broadcast({of_last.data(), count, detail::kMoments}, group.size() - 1);
      ASSERT_EQ(std::memcmp(data.data(), of_last.data(), count * sizeof(Moments)), 0);
    }
    EXPECT_THROW(group.all_reduce({nullptr, 0, detail::kMoments}, ReduceOp::mean), UsageError);
  });
}
#endif

TEST_P(Conformance, reduce_leaves_other_ranks_alone) {
  run([] {
    const Group group = default_group();
    for (const std::size_t count : kCounts) {
      for (int root = 0; root < group.size(); ++root) {
        const Bytes before = values(DType::i32, count, /*seed=*/5, group.rank());
        Bytes data = before;
        group.reduce({data.data(), count, DType::i32}, root, ReduceOp::sum);
        const bool is_root = root == group.rank();
        ASSERT_EQ(data, is_root ? all_reduced(DType::i32, ReduceOp::sum, count, 5, group.size())
                                : before);
      }
    }
  });
}

TEST_P(Conformance, broadcast_from_every_root) {
  run([] {
    const Group group = default_group();
    for (const std::size_t count : kCounts) {
      for (int root = 0; root < group.size(); ++root) {
        Bytes data = values(DType::f64, count, /*seed=*/6, group.rank());
        group.broadcast({data.data(), count, DType::f64}, root);
        ASSERT_EQ(data, values(DType::f64, count, /*seed=*/6, root));
      }
    }
  });
}

TEST_P(Conformance, all_gather_of_equal_parts) {
  run([] {
    const Group group = default_group();
    for (const std::size_t count : kCounts) {
      const Bytes mine = values(DType::i32, count, /*seed=*/7, group.rank());
      Bytes all(mine.size() * static_cast<std::size_t>(group.size()));
      group.all_gather({mine.data(), count, DType::i32},
                       {all.data(), count * static_cast<std::size_t>(group.size()), DType::i32});
      Bytes expected;
      for (int r = 0; r < group.size(); ++r) append(expected, values(DType::i32, count, 7, r));
      ASSERT_EQ(all, expected);
    }
  });
}

TEST_P(Conformance, gathers_of_unequal_parts) {
  run([] {
    // Rank 1 has an empty part; the part of rank 0 alone exceeds a slot.
    const int rank = get_rank();
    const auto length = [](int r) { return r == 1 ? 0 : 100'000 / (r + 1) + r; };
    std::vector<int> mine(static_cast<std::size_t>(length(rank)));
    std::iota(mine.begin(), mine.end(), 1000 * rank);
    for (const auto& parts : {all_gather(mine), gather(mine, /*dst=*/0)}) {
      if (parts.empty()) continue;  // gather, on another rank
      ASSERT_EQ(parts.size(), static_cast<std::size_t>(get_world_size()));
      for (int r = 0; r < get_world_size(); ++r) {
        const auto& part = parts[static_cast<std::size_t>(r)];
        ASSERT_EQ(part.size(), static_cast<std::size_t>(length(r)));
        for (std::size_t i = 0; i < part.size(); ++i) {
          ASSERT_EQ(part[i], 1000 * r + static_cast<int>(i));
        }
      }
    }
    EXPECT_EQ(gather(mine, get_world_size() - 1).empty(), rank != get_world_size() - 1);
    const auto name_of_rank = [](int r) { return std::string(static_cast<std::size_t>(r), 'x'); };
    const std::vector<std::string> names = all_gather(name_of_rank(rank));
    for (int r = 0; r < get_world_size(); ++r) {
      EXPECT_EQ(names[static_cast<std::size_t>(r)], name_of_rank(r));
    }
  });
}

TEST_P(Conformance, scatter_from_every_root) {
  run([] {
    const Group group = default_group();
    const auto n = static_cast<std::size_t>(group.size());
    for (const std::size_t count : kCounts) {
      for (int root = 0; root < group.size(); ++root) {
        const Bytes all = values(DType::i64, count * n, /*seed=*/8, root);
        const bool is_root = root == group.rank();
        Bytes part(count * 8);
        group.scatter({is_root ? all.data() : nullptr, is_root ? count * n : 0, DType::i64},
                      {part.data(), count, DType::i64}, root);
        ASSERT_EQ(part, piece(all, group.rank(), count * 8));
      }
    }
  });
}

TEST_P(Conformance, reduce_scatter_of_every_length) {
  run([] {
    const Group group = default_group();
    const auto n = static_cast<std::size_t>(group.size());
    for (const std::size_t count : kCounts) {
      for (const DType dtype : {DType::i8, DType::bf16, DType::f64}) {
        const Bytes all = values(dtype, count * n, /*seed=*/9, group.rank());
        Bytes part(count * size_of(dtype));
        group.reduce_scatter({all.data(), count * n, dtype}, {part.data(), count, dtype},
                             ReduceOp::sum);
        ASSERT_EQ(part, piece(all_reduced(dtype, ReduceOp::sum, count * n, 9, group.size()),
                              group.rank(), part.size()));
      }
    }
  });
}

TEST_P(Conformance, all_to_all_of_every_length) {
  run([] {
    const Group group = default_group();
    const auto n = static_cast<std::size_t>(group.size());
    for (const std::size_t count : kCounts) {
      const Bytes sent = values(DType::f32, count * n, /*seed=*/10, group.rank());
      Bytes received(sent.size());
      group.all_to_all({sent.data(), count * n, DType::f32},
                       {received.data(), count * n, DType::f32});
      Bytes expected;
      for (int r = 0; r < group.size(); ++r) {
        append(expected, piece(values(DType::f32, count * n, 10, r), group.rank(), count * 4));
      }
      ASSERT_EQ(received, expected);
    }
  });
}

#ifndef LOCKSTEP_CONFORMANCE_ENGINE  // which has the installed headers alone
/// One part for each rank, in memory of its own.
class Parts {
 public:
  Parts(int n_ranks, std::size_t n_bytes)
      : parts_(static_cast<std::size_t>(n_ranks), Bytes(n_bytes)) {}
  /// The parts of `all`, whose part r has n_bytes(r).
  template <class F>
  Parts(const Bytes& all, int n_ranks, F n_bytes) {
    for (int r = 0; r < n_ranks; ++r) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(joined().size());
      parts_.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(n_bytes(r)));
    }
  }

  std::vector<Bytes>& all() { return parts_; }
  Bytes joined() const {
    Bytes all;
    for (const Bytes& part : parts_) append(all, part);
    return all;
  }

 private:
  std::vector<Bytes> parts_;
};

/// A call with a list of parts, as the layers above make it.
void run_lists(const Group& group, Call call, std::vector<Bytes>* ins, std::vector<Bytes>* outs) {
  std::vector<const void*> from;
  std::vector<void*> to;
  if (ins != nullptr) {
    for (const Bytes& part : *ins) from.push_back(part.data());
  }
  if (outs != nullptr) {
    for (Bytes& part : *outs) to.push_back(part.data());
  }
  call.ins = from;
  call.outs = to;
  call.where = std::source_location::current();
  internal::NativeGroup::run(group, call, {});
}

// Ranks of even numbers give lists, the others one block of memory.
TEST_P(Conformance, lists_of_parts_as_one_block) {
  constexpr DType kType = DType::f32;
  run([] {
    const Group group = default_group();
    const int n_ranks = group.size(), rank = group.rank();
    const bool has_lists = rank % 2 == 0;
    const auto n = static_cast<std::size_t>(n_ranks);
    for (const std::size_t count : kCounts) {
      const std::size_t n_bytes = count * size_of(kType);
      const auto same = [&](int) { return n_bytes; };
      Bytes mine = values(kType, count, /*seed=*/40, rank);
      Bytes whole = values(kType, count * n, /*seed=*/41, rank), all(whole.size());
      Bytes gathered, exchanged;
      for (int r = 0; r < n_ranks; ++r) {
        append(gathered, values(kType, count, /*seed=*/40, r));
        append(exchanged, piece(values(kType, count * n, 41, r), rank, n_bytes));
      }
      Parts ins(whole, n_ranks, same), outs(n_ranks, n_bytes);
      const ConstElements in{mine.data(), count, kType}, block{whole.data(), count * n, kType};
      const Elements out{mine.data(), count, kType}, result{all.data(), count * n, kType};
      const auto call = [&](Op op, int root, const void* from, void* to) {
        return Call{.op = op,
                    .dtype = kType,
                    .root = root,
                    .count = count,
                    .in = from,
                    .out = to,
                    .where = {}};
      };

      if (has_lists) {
        run_lists(group, call(Op::all_gather, -1, mine.data(), nullptr), nullptr, &outs.all());
      } else {
        group.all_gather(in, result);
      }
      ASSERT_EQ(has_lists ? outs.joined() : all, gathered) << count;

      if (has_lists) {
        run_lists(group, call(Op::all_to_all, -1, nullptr, nullptr), &ins.all(), &outs.all());
      } else {
        group.all_to_all(block, result);
      }
      ASSERT_EQ(has_lists ? outs.joined() : all, exchanged) << count;

      for (int root = 0; root < n_ranks; ++root) {
        const bool is_root = root == rank;
        if (is_root && has_lists) {
          run_lists(group, call(Op::gather, root, mine.data(), nullptr), nullptr, &outs.all());
        } else {
          group.gather(in, result, root);
        }
        if (is_root) {
          ASSERT_EQ(has_lists ? outs.joined() : all, gathered) << count;
        }
      }
      for (int root = 0; root < n_ranks; ++root) {
        if (root == rank && has_lists) {
          run_lists(group, call(Op::scatter, root, nullptr, mine.data()), &ins.all(), nullptr);
        } else {
          group.scatter(block, out, root);
        }
        ASSERT_EQ(mine, piece(values(kType, count * n, 41, root), rank, n_bytes)) << count;
      }

      if (has_lists) {
        run_lists(group, call(Op::reduce_scatter, -1, nullptr, mine.data()), &ins.all(), nullptr);
      } else {
        group.reduce_scatter(block, out);
      }
      ASSERT_EQ(mine,
                piece(all_reduced(kType, ReduceOp::sum, count * n, 41, n_ranks), rank, n_bytes));
    }
  });
}

TEST_P(Conformance, lists_of_unequal_parts) {
  run([] {
    const Group group = default_group();
    const int n_ranks = group.size(), rank = group.rank();
    // Rank 1 has an empty part; that of rank 0 is longer than a slot.
    const auto count_of = [](int r) {
      return r == 1 ? std::size_t{0} : static_cast<std::size_t>(100'000 / (r + 1));
    };
    Bytes expected;
    std::vector<std::size_t> counts;
    for (int r = 0; r < n_ranks; ++r) {
      append(expected, values(DType::i32, count_of(r), /*seed=*/42, r));
      counts.push_back(count_of(r));
    }
    const Bytes mine = values(DType::i32, count_of(rank), /*seed=*/42, rank);
    const ConstElements in{mine.data(), count_of(rank), DType::i32};
    Parts outs(Bytes(expected.size()), n_ranks, [&](int r) { return 4 * count_of(r); });
    Bytes all(expected.size());
    if (rank % 2 == 0) {
      run_lists(group,
                {.op = Op::all_gather,
                 .dtype = DType::i32,
                 .count = in.count,
                 .in = mine.data(),
                 .counts = counts,
                 .where = {}},
                nullptr, &outs.all());
    } else {
      group.all_gather(in, {all.data(), all.size() / 4, DType::i32}, counts);
    }
    EXPECT_EQ(rank % 2 == 0 ? outs.joined() : all, expected);
  });
}
#endif

/// Sizes at which engines change from one algorithm to another.
TEST_P(Conformance, every_operation_around_4_8_and_16_KiB) {
  run([] {
    const Group group = default_group();
    const int n_ranks = group.size(), root = n_ranks - 1;
    const bool is_root = group.rank() == root;
    const auto n = static_cast<std::size_t>(n_ranks);
    constexpr DType kType = DType::i32;
    for (const std::size_t count : {1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097}) {
      const Bytes mine = values(kType, count, /*seed=*/30, group.rank());
      const Bytes whole = values(kType, count * n, /*seed=*/31, group.rank());
      const Bytes sum = all_reduced(kType, ReduceOp::sum, count, /*seed=*/30, n_ranks);
      Bytes gathered, exchanged;
      for (int r = 0; r < n_ranks; ++r) {
        append(gathered, values(kType, count, /*seed=*/30, r));
        append(exchanged, piece(values(kType, count * n, 31, r), group.rank(), mine.size()));
      }
      Bytes data = mine, all(whole.size());
      const Elements one{data.data(), count, kType}, many{all.data(), count * n, kType};
      const ConstElements from_one{mine.data(), count, kType};
      const ConstElements from_many{whole.data(), count * n, kType};
      group.all_reduce(one);
      ASSERT_EQ(data, sum) << count;
      data = mine;
      group.reduce(one, root);
      ASSERT_EQ(data, is_root ? sum : mine) << count;
      data = mine;
      group.broadcast(one, root);
      ASSERT_EQ(data, piece(gathered, root, mine.size())) << count;
      group.all_gather(from_one, many);
      ASSERT_EQ(all, gathered) << count;
      std::ranges::fill(all, std::byte{1});
      group.gather(from_one, many, root);
      ASSERT_EQ(all, is_root ? gathered : Bytes(all.size(), std::byte{1})) << count;
      group.scatter(is_root ? from_many : ConstElements{nullptr, 0, kType}, one, root);
      ASSERT_EQ(data, piece(values(kType, count * n, 31, root), group.rank(), mine.size()))
          << count;
      group.reduce_scatter(from_many, one);
      ASSERT_EQ(data, piece(all_reduced(kType, ReduceOp::sum, count * n, 31, n_ranks), group.rank(),
                            mine.size()))
          << count;
      group.all_to_all(from_many, many);
      ASSERT_EQ(all, exchanged) << count;
    }
  });
}

TEST_P(Conformance, send_and_recv_around_a_ring) {
  run([] {
    const Group group = default_group();
    if (group.size() == 1) {
      int nothing = 0;
      EXPECT_THROW(group.send({&nothing, 1, DType::i32}, 0), UsageError);
      EXPECT_THROW(group.recv({&nothing, 1, DType::i32}, 0), UsageError);
      return;
    }
    const int next = (group.rank() + 1) % group.size();
    const int previous = (group.rank() + group.size() - 1) % group.size();
    for (const std::size_t count : kCounts) {
      const Bytes sent = values(DType::f32, count, /*seed=*/11, group.rank());
      Bytes received(sent.size());
      const auto send = [&] { group.send({sent.data(), count, DType::f32}, next); };
      const auto recv = [&] { group.recv({received.data(), count, DType::f32}, previous); };
      // Long messages wait for their receiver: one rank must begin by receiving.
      if (group.rank() == 0) {
        send();
        recv();
      } else {
        recv();
        send();
      }
      ASSERT_EQ(received, values(DType::f32, count, /*seed=*/11, previous));
    }
  });
}

TEST_P(Conformance, messages_of_one_sender_to_many) {
  run([] {
    const Group group = default_group();
    for (int turn = 0; turn < 50; ++turn) {
      if (group.rank() == 0) {
        for (int r = 1; r < group.size(); ++r) send(std::vector<int>{turn, r}, r);
      } else {
        std::vector<int> got(2);
        recv(got, 0);
        ASSERT_EQ(got, (std::vector<int>{turn, group.rank()}));
      }
    }
  });
}

TEST_P(Conformance, split_orders_by_key_and_groups_are_apart) {
  run([] {
    const Group world = default_group();
    const int color = world.rank() % 2;
    const Group half = world.split(color, /*key=*/-world.rank());
    const int n_half = (world.size() + 1 - color) / 2;
    ASSERT_EQ(half.size(), n_half);
    ASSERT_EQ(half.rank(), n_half - 1 - world.rank() / 2);  // keys descend with the rank
    EXPECT_EQ(half.backend(), world.backend());
    EXPECT_EQ(all_reduce_value(1, ReduceOp::sum, half), n_half);
    int expected = 0;
    for (int r = color; r < world.size(); r += 2) expected += r;
    EXPECT_EQ(all_reduce_value(world.rank(), ReduceOp::sum, half), expected);
    const Group again = half.split(half.rank());
    EXPECT_EQ(again.size(), 1);
    EXPECT_EQ(all_reduce_value(5, ReduceOp::sum, again), 5);
    EXPECT_EQ(all_reduce_value(1), world.size());  // the world remains usable
  });
}

TEST_P(Conformance, a_duplicate_has_a_channel_of_its_own) {
  run([] {
    const Group world = default_group();
    const Group other = world.duplicate();
    std::vector<double> slow(100'000, 1.0);
    Work work = other.all_reduce_async({slow.data(), slow.size(), DType::f64});
    for (int i = 0; i < 20; ++i) ASSERT_EQ(all_reduce_value(1), world.size());
    work.wait();
    EXPECT_TRUE(work.done());
    EXPECT_EQ(slow.back(), world.size());
  });
}

TEST_P(Conformance, asynchronous_calls_run_in_order) {
  run([] {
    const Group group = default_group();
    const auto n = static_cast<std::size_t>(group.size());
    std::vector<float> data(1000, 1.0F);
    std::vector<float> part(1000);
    std::vector<float> all(1000 * n);
    std::vector<Work> works;
    const Elements elements{data.data(), data.size(), DType::f32};
    works.push_back(group.all_reduce_async(elements));
    works.push_back(group.barrier_async());
    works.push_back(group.all_reduce_async(elements));
    works.push_back(group.broadcast_async(elements, group.size() - 1));
    works.push_back(group.all_gather_async(elements, {all.data(), all.size(), DType::f32}));
    works.push_back(group.scatter_async({all.data(), all.size(), DType::f32},
                                        {part.data(), part.size(), DType::f32}));
    works.push_back(group.reduce_scatter_async({all.data(), all.size(), DType::f32},
                                               {part.data(), part.size(), DType::f32}));
    const float sum = static_cast<float>(n) * static_cast<float>(n);
    // A blocking call waits for the calls started before.
    EXPECT_EQ(all_reduce_value(1), group.size());
    for (Work& work : works) {
      EXPECT_TRUE(work.done());
      work.wait();
    }
    EXPECT_EQ(data[999], sum);
    EXPECT_EQ(part[0], sum * static_cast<float>(n));
  });
}

/// Neither the group nor the Work exists any longer to wait for it.
TEST_P(LocalConformance, a_detached_call_ends_before_its_rank_leaves) {
  const SharedCount tid;
  const SharedCount n_left;
  run([&] {
    const int n = get_world_size();
    const Group other = default_group().duplicate();
    std::vector<double> data(1000, 1.0);
    if (get_rank() == 0) {
      other.all_reduce_async({data.data(), data.size(), DType::f64}).detach();
      tid.store(::gettid());
      destroy_dist();
      n_left.raise();
    } else {
      EXPECT_TRUE(wait_until(
          [&] { return n_left.value() > 0 || (tid.value() != 0 && is_asleep(tid.value())); }));
      other.all_reduce({data.data(), data.size(), DType::f64});
    }
    EXPECT_EQ(data.front(), n);
    EXPECT_EQ(data.back(), n);
  });
}

TEST_P(LocalConformance, a_failing_departure_ends_the_ranks_own_pending_calls) {
  SKIP_UNLESS_RANKS(2, GetParam());
  const SharedCount n_left;
  run([&] {
    if (get_world_size() == 1) return;  // launched alone
    const Group world = default_group();
    const Group other = world.duplicate();
    if (get_rank() == 0) {
      Work pending = other.barrier_async(std::chrono::seconds(20));
      other.barrier_async(std::chrono::seconds(20)).detach();
      destroy_dist("the disk is full");
      expect_contains(thrown<PeerFailed>([&] { pending.wait(); }),
                      "rank 0 failed: the disk is full");
      n_left.raise();
    } else {
      expect_contains(thrown<PeerFailed>([&] { world.barrier(); }), "the disk is full");
      EXPECT_TRUE(n_left.wait_for(1));  // otherwise the pending call ends because this rank leaves
      // The first ends well over messages where rank 0 had sent its own before it left.
      expect_contains(thrown<PeerFailed>([&] {
                        other.barrier();
                        other.barrier();
                      }),
                      "the disk is full");
    }
  });
}

TEST_P(Conformance, typed_asynchronous_calls) {
  run([] {
    const auto n = static_cast<std::size_t>(get_world_size());
    std::vector<std::uint32_t> data(100, 1);
    std::vector<std::uint16_t> part(10, static_cast<std::uint16_t>(get_rank()));
    std::vector<std::uint16_t> all(10 * n);
    std::vector<std::uint16_t> parts(10 * n);
    std::array<bool, 3> flags = {get_rank() == 0, true, false};
    std::array<int, 1> highest = {get_rank()};
    std::vector<Work> works;
    works.push_back(all_reduce_async(data));
    works.push_back(all_reduce_async(highest, ReduceOp::max));
    works.push_back(broadcast_async(flags, 0));
    works.push_back(all_gather_async(part, all));
    works.push_back(all_to_all_async(all, parts));
    works.push_back(scatter_async(all, part, /*src=*/0));
    works.push_back(reduce_scatter_async(all, part, ReduceOp::max));
    works.push_back(reduce_async(data, /*dst=*/0, ReduceOp::max));
    works.push_back(barrier_async());
    works.back().wait();
    EXPECT_EQ(highest[0], get_world_size() - 1);
    EXPECT_EQ(data, std::vector<std::uint32_t>(100, static_cast<std::uint32_t>(n)));
    EXPECT_EQ(flags, (std::array<bool, 3>{true, true, false}));
    EXPECT_EQ(parts, std::vector<std::uint16_t>(10 * n, static_cast<std::uint16_t>(get_rank())));
    EXPECT_EQ(part, std::vector<std::uint16_t>(10, static_cast<std::uint16_t>(get_rank())));
    if (n > 1 && get_rank() < 2) {
      std::vector<float> message(5, static_cast<float>(get_rank()));
      Work work = get_rank() == 0 ? send_async(message, 1) : recv_async(message, 0);
      work.wait();
      EXPECT_EQ(message, std::vector<float>(5, 0.F));
    }
  });
}

TEST_P(Conformance, all_gather_of_bool) {
  run([] {
    const std::array<bool, 2> mine = {get_rank() == 0, true};
    const std::vector<std::vector<bool>> all = all_gather(mine);
    for (std::size_t r = 0; r < all.size(); ++r) {
      EXPECT_EQ(all[r], (std::vector<bool>{r == 0, true}));
    }
  });
}

TEST_P(Conformance, barrier_waits_for_every_rank) {
  run([] {
    // Each rank in turn is late; a rank that passes must have seen the late one's message.
    for (int late = 0; late < get_world_size(); ++late) {
      std::int64_t mark = 0;
      if (get_rank() == late) mark = late + 1;
      EXPECT_EQ(all_reduce_value(mark, ReduceOp::max), late + 1);
      barrier();
    }
  });
}

TEST_P(Conformance, values_and_seed_are_alike_on_all_ranks) {
  run([] {
    EXPECT_EQ(all_reduce_value(get_rank(), ReduceOp::max), get_world_size() - 1);
    EXPECT_EQ(all_reduce_value(-3, ReduceOp::mean), -3);
    const std::uint64_t seed = sync_random_seed();
    EXPECT_EQ(all_reduce_value(seed, ReduceOp::min), all_reduce_value(seed, ReduceOp::max));
    EXPECT_EQ(all_reduce_value(get_rank() == 0, ReduceOp::bor), true);
    EXPECT_EQ(all_reduce_value(get_rank() == 0, ReduceOp::band), get_world_size() == 1);
    EXPECT_NE(sync_random_seed(), sync_random_seed());
  });
}

TEST_P(Conformance, ten_thousand_mixed_collectives) {
  // A call over TCP or over several levels takes milliseconds if there are more ranks than cores.
  const Form form = GetParam().form;
  bool is_slow = form != Form::solo && form != Form::threads && form != Form::processes;
#ifdef LOCKSTEP_CONFORMANCE_ENGINE
  is_slow = true;  // it sleeps in every call
#endif
  const int n_calls = is_slow ? 300 : GetParam().n_ranks > 4 ? 2'500 : 10'000;
  run([n_calls] {
    const Group group = default_group();
    const auto n = static_cast<std::size_t>(group.size());
    std::mt19937_64 random(20);  // the same on every rank
    for (int call = 0; call < n_calls; ++call) {
      const auto kind = random() % 8;
      const DType dtype = kTypes[random() % std::size(kTypes)];
      const ReduceOp any = kReduceOps[random() % kReduceOps.size()].op;
      const ReduceOp op = is_floating(dtype)       ? ReduceOp::sum
                          : can_reduce(any, dtype) ? any
                                                   : ReduceOp::bor;
      const std::size_t count = random() % (call % 100 == 0 ? 40'000 : 300);
      const int root = static_cast<int>(random() % n);
      const std::uint64_t seed = random() % 1000;
      const std::size_t n_bytes = count * size_of(dtype);
      const Bytes mine = values(dtype, count, seed, group.rank());
      Bytes data = mine;
      Bytes all(n_bytes * n);
      switch (kind) {
        case 0: group.barrier(); break;
        case 1:
          group.all_reduce({data.data(), count, dtype}, op);
          ASSERT_EQ(data, all_reduced(dtype, op, count, seed, group.size())) << call;
          break;
        case 2:
          group.reduce({data.data(), count, dtype}, root, op);
          ASSERT_EQ(data, root == group.rank() ? all_reduced(dtype, op, count, seed, group.size())
                                               : mine);
          break;
        case 3:
          group.broadcast({data.data(), count, dtype}, root);
          ASSERT_EQ(data, values(dtype, count, seed, root)) << call;
          break;
        case 4:
          group.all_gather({mine.data(), count, dtype}, {all.data(), count * n, dtype});
          for (int r = 0; r < group.size(); ++r) {
            ASSERT_EQ(piece(all, r, n_bytes), values(dtype, count, seed, r)) << call;
          }
          break;
        case 5:
          group.gather({mine.data(), count, dtype}, {all.data(), count * n, dtype}, root);
          for (int r = 0; root == group.rank() && r < group.size(); ++r) {
            ASSERT_EQ(piece(all, r, n_bytes), values(dtype, count, seed, r)) << call;
          }
          break;
        case 6: {
          const Bytes whole = values(dtype, count * n, seed, group.rank());
          group.reduce_scatter({whole.data(), count * n, dtype}, {data.data(), count, dtype}, op);
          ASSERT_EQ(data, piece(all_reduced(dtype, op, count * n, seed, group.size()), group.rank(),
                                n_bytes));
          break;
        }
        case 7: {
          const Bytes whole = values(dtype, count * n, seed, group.rank());
          group.all_to_all({whole.data(), count * n, dtype}, {all.data(), count * n, dtype});
          for (int r = 0; r < group.size(); ++r) {
            ASSERT_EQ(piece(all, r, n_bytes),
                      piece(values(dtype, count * n, seed, r), group.rank(), n_bytes));
          }
          break;
        }
        default: break;
      }
    }
  });
}

#ifndef LOCKSTEP_CONFORMANCE_ENGINE  // which need not report refused calls
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

double sum_of_ones(const Group& group) {
  double one = 1;
  group.all_reduce({&one, 1, DType::f64});
  return one;
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
        expect_contains(text, "conformance_test.cpp:");
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
#endif

}  // namespace
}  // namespace lockstep::test
