#include "group/mismatch.hpp"

#include <gtest/gtest.h>

#include <array>
#include <string>

#include "support/expect.hpp"

namespace lockstep::internal {
namespace {

using test::expect_contains;

MismatchTable::Row row_of(int rank, Op op = Op::all_reduce) {
  return {.rank = rank,
          .op = op,
          .dtype = DType::f32,
          .reduce = ReduceOp::sum,
          .root = -1,
          .count = "8",
          .where = op == Op::all_reduce ? "step.cpp:39" : "step.cpp:28"};
}

TEST(MismatchTableTest, ranks_that_agree_share_a_line_behind_the_one_that_does_not) {
  MismatchTable table;
  for (int rank = 0; rank < 399; ++rank) table.add(row_of(rank));
  table.add(row_of(399, Op::barrier));
  EXPECT_EQ(table.text({}),
            "the ranks made different calls; all ranks must make the same calls in the same order\n"
            "  rank   operation       type  count       root  reduction  where\n"
            "  399    barrier         -     -           -     -          step.cpp:28\n"
            "  0-398  all_reduce      f32   8           -     sum        step.cpp:39");
}

TEST(MismatchTableTest, absent_ranks_are_listed_last) {
  MismatchTable table;
  table.add_absent(0, "none");
  table.add(row_of(1, Op::barrier));
  table.add(row_of(2));
  table.add(row_of(3));
  table.add_absent(4, "none");
  EXPECT_EQ(table.text({}),
            "the ranks made different calls; all ranks must make the same calls in the same order\n"
            "  rank  operation       type  count       root  reduction  where\n"
            "  1     barrier         -     -           -     -          step.cpp:28\n"
            "  2, 3  all_reduce      f32   8           -     sum        step.cpp:39\n"
            "  0, 4  not arrived; last call: none");
}

TEST(MismatchTableTest, calls_of_different_layers) {
  MismatchTable table;
  for (int rank = 0; rank < 3; ++rank) {
    auto row = row_of(rank);
    row.root = rank == 1 ? 0x12345678 : 0x12340042;
    table.add(row);
  }
  EXPECT_EQ(table.text({}),
            "the ranks made different calls; all ranks must make the same calls in the same order\n"
            "  rank  operation       type  count       root  reduction  where\n"
            "  1     all_reduce      f32   8           -     sum        step.cpp:39, layer 5678\n"
            "  0, 2  all_reduce      f32   8           -     sum        step.cpp:39, layer 0042\n"
            "  layer: a hash of its name in the module, or of the line that made it");
}

TEST(MismatchTableTest, difference_without_column) {
  MismatchTable table;
  for (int rank = 0; rank < 3; ++rank) {
    auto row = row_of(rank);
    row.count = count_by_rank(0x12345678);
    row.fingerprint = rank == 1 ? 7 : 8;
    table.add(row);
  }
  const std::string text = table.text({});
  expect_contains(text, "\n  1     all_reduce      f32   by rank 5678  ");
  expect_contains(text, "\n  0, 2  all_reduce      f32   by rank 5678  ");
  expect_contains(text, "lines that look equal differ");
  expect_contains(text, "by rank: a hash of the counts");
}

TEST(MismatchTableTest, ranks_that_differ_in_refused_calls_only_share_a_line) {
  MismatchTable table;
  for (int rank = 0; rank < 3; ++rank) {
    auto row = row_of(rank);
    row.fingerprint = rank == 1 ? 7 : 8;
    table.add(row);
  }
  for (int i = 0; i < 2; ++i) table.add_refused(1, "refused barrier #2: two threads");
  EXPECT_EQ(
      table.text({}),
      "the ranks made different calls; all ranks must make the same calls in the same order\n"
      "  rank     operation       type  count       root  reduction  where\n"
      "  1        refused barrier #2: two threads\n"
      "  0, 1, 2  all_reduce      f32   8           -     sum        step.cpp:39\n"
      "  a call that throws UsageError counts as a call: afterwards all ranks must continue with "
      "the same calls");
  EXPECT_EQ(table.minority(), std::vector{1});
}

// The text of a refused call is the program's.
TEST(MismatchTableTest, a_line_that_reads_like_a_column_has_no_footer) {
  MismatchTable table;
  table.add(row_of(0));
  table.add_refused(1, "refused all_reduce #2: give it by rank , layer by layer: by  by rank 0");
  EXPECT_EQ(table.text({}).find("a hash of"), std::string::npos) << table.text({});
}

TEST(MismatchTableTest, empty_broadcast_hint) {
  const auto text_of = [](const char* count, const char* other) {
    MismatchTable table;
    for (int rank = 0; rank < 2; ++rank) {
      auto row = row_of(rank, Op::broadcast);
      row.count = rank == 0 ? count : other;
      row.root = 0;
      table.add(row);
    }
    return table.text({});
  };
  expect_contains(text_of("8", "0"), "\n  broadcast does not resize: ");
  expect_contains(text_of("8", "0"), "or call broadcast_object");
  EXPECT_EQ(text_of("8", "7").find("resize"), std::string::npos);
}

TEST(ListOfTest, consecutive_ranks_are_merged) {
  EXPECT_EQ(list_of({}), "");
  EXPECT_EQ(list_of(std::array{3}), "3");
  EXPECT_EQ(list_of(std::array{0, 1, 2}), "0, 1, 2");
  EXPECT_EQ(list_of(std::array{0, 1, 2, 3, 5, 7, 8, 9, 10}), "0-3, 5, 7-10");
}

}  // namespace
}  // namespace lockstep::internal
