// Parts that are memory of their own, as the layers above give them. Not over an engine that has
// the installed headers alone.

#ifndef LOCKSTEP_CONFORMANCE_ENGINE
#include <gtest/gtest.h>

#include <source_location>
#include <vector>

#include "conformance/conformance.hpp"
#include "group/native_engine.hpp"

namespace lockstep::test {
namespace {

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
void run_lists(const Group& group, Call call, std::vector<Bytes>* ins, std::vector<Bytes>* outs,
               std::source_location where = std::source_location::current()) {
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
  call.where = where;
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
    const auto where = std::source_location::current();  // of all ranks
    if (rank % 2 == 0) {
      run_lists(group,
                {.op = Op::all_gather,
                 .dtype = DType::i32,
                 .count = in.count,
                 .in = mine.data(),
                 .counts = counts,
                 .where = {}},
                nullptr, &outs.all(), where);
    } else {
      group.all_gather(in, {all.data(), all.size() / 4, DType::i32}, counts, {}, where);
    }
    EXPECT_EQ(rank % 2 == 0 ? outs.joined() : all, expected);
  });
}

}  // namespace
}  // namespace lockstep::test
#endif
