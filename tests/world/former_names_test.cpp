// A program of the previous minor version: the former names of headers and functions.

#include <gtest/gtest.h>

#include <vector>

#include <lockstep/control.hpp>
#include <lockstep/elastic.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/sync.hpp>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace lockstep {
namespace former_names_test {
namespace {

TEST(FormerNamesTest, compile_and_do_the_same) {
  run_ranks(2, [](int rank) {
    EXPECT_EQ(get_rank(), rank);
    EXPECT_EQ(main_process_first([] { return 3; }), 3);
  });
  EXPECT_EQ(replacements_wait(), has_waiting_replacements());
  count_step();
  SyncMaster<int, int> master([](std::span<MessageFrom<int>> messages) {
    return std::vector<ReplyTo<int>>{{messages[0].id, messages[0].message}};
  });
  EXPECT_EQ(master.run_master(7), 7);
}

}  // namespace
}  // namespace former_names_test
}  // namespace lockstep
