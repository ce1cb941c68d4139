#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/command.hpp"

namespace lockstep::test {
namespace {

using Json = nlohmann::json;

const std::string kSources = LOCKSTEP_SOURCES;

/// What `./dev bench --check` says of this record; empty where there is no Python.
std::string check(const Json& record, const std::string& goals) {
  const TemporaryFolder folder;
  std::ofstream(folder / "record.json") << record;
  const std::string command = "python3 " + kSources + "/scripts/performance.py check " +
                              folder / "record.json" + " " + goals + " 2>&1";
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  std::string text;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) text += static_cast<char>(c);
  const int status = ::pclose(pipe);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) return {};
  EXPECT_EQ(status, 0) << text;
  return text;
}

std::string check(const Json& record, const Json& goals) {
  const TemporaryFolder folder;
  std::ofstream(folder / "goals.json") << goals;
  return check(record, folder / "goals.json");
}

Json row(const std::string& entrant, int n_bytes, const Json& medians) {
  Json row = {
      {"verb", "all_reduce"}, {"bytes", n_bytes}, {"entrant", entrant}, {"family", entrant}};
  for (const auto& [placement, us] : medians.items()) {
    row["placement"] = placement;
    row["p50_us"] = us;
    row["placements"][placement] = {{"blocks", 5}, {"p50_us", us}};
  }
  return row;
}

Json goal(Json more) {
  more.update({{"goal", "the goal"}, {"run", "small"}});
  if (!more.contains("rows")) more.update({{"from", 4}, {"to", 64}});
  return Json::array({more});
}

Json record(Json rows) { return {{"runs", {{"small", {{"rows", std::move(rows)}}}}}}; }

TEST(BenchGoalsTest, least_ratio_of_the_best_peer_counts) {
  const Json rows = {row("lockstep", 4, {{"near", 1.0}}),  row("openmpi", 4, {{"near", 3.0}}),
                     row("mpich", 4, {{"near", 4.0}}),     row("floor", 4, {{"near", 0.1}}),
                     row("lockstep", 64, {{"near", 1.0}}), row("openmpi", 64, {{"near", 9.0}}),
                     row("mpich", 64, {{"near", 2.5}})};
  const std::string aim = check(record(rows), goal({{"must", 2}, {"aim", 2.5}}));
  if (aim.empty()) GTEST_SKIP() << "no python3";
  EXPECT_EQ(aim.rfind("aim ", 0), 0U) << aim;
  EXPECT_TRUE(contains(aim, "2.50x at 64 B")) << aim;
  EXPECT_TRUE(contains(aim, "0 of 1 goals fall short")) << aim;
  const std::string missed = check(record(rows), goal({{"must", 2.6}, {"aim", 3}}));
  EXPECT_EQ(missed.rfind("short ", 0), 0U) << missed;
  const Json floor = goal({{"against", "floor"}, {"at_most", true}, {"must", 11}, {"aim", 9}});
  const std::string limit = check(record(rows), floor);
  EXPECT_EQ(limit.rfind("must ", 0), 0U) << limit;
  EXPECT_TRUE(contains(limit, "10.00x at 4 B (1 of 2 not seen)")) << limit;
}

TEST(BenchGoalsTest, only_blocks_of_its_placement_count) {
  Json rows = {row("lockstep", 4, {{"far", 2.0}, {"near", 1.0}}),
               row("mpich", 4, {{"far", 3.0}, {"near", 9.0}})};
  const Json far = goal({{"placement", "far"}, {"must", 2}, {"aim", 3}});
  const std::string found = check(record(rows), far);
  if (found.empty()) GTEST_SKIP() << "no python3";
  EXPECT_TRUE(contains(found, "1.50x at 4 B")) << found;
  const Json near = goal({{"must", 2}, {"aim", 3}});
  EXPECT_TRUE(contains(check(record(rows), near), "9.00x at 4 B"));
  rows.push_back(row("openmpi", 4, {{"near", 5.0}}));  // who may have been the best when far
  const std::string unseen = check(record(rows), far);
  EXPECT_EQ(unseen.rfind("not seen in this record ", 0), 0U) << unseen;
  EXPECT_TRUE(contains(unseen, "0 of 1 goals fall short")) << unseen;
  // Whose blocks were all elsewhere than most has no figure of its own.
  rows.back() = row("openmpi", 4, {{"far", 5.0}});
  rows.back().erase("placement");
  rows.back().erase("p50_us");
  const std::string apart = check(record(rows), near);
  EXPECT_EQ(apart.rfind("not seen in this record ", 0), 0U) << apart;
}

TEST(BenchGoalsTest, programs_of_their_own) {
  const Json rows = {{{"name", "composed x"}, {"ratio", 0.1}},
                     {{"name", "step: not hidden"}, {"ratio", 0.02}},
                     {{"name", "other step: not hidden"}, {"ratio", 0.031}}};
  Json share = {{"rows", ".*step.*"}, {"at_most", true}, {"unit", "%"}, {"must", 0.03}, {"aim", 0}};
  const std::string found = check(record(rows), goal(share));
  if (found.empty()) GTEST_SKIP() << "no python3";
  EXPECT_EQ(found.rfind("short ", 0), 0U) << found;
  EXPECT_TRUE(contains(found, "3.1 % other step: not hidden")) << found;
  EXPECT_TRUE(contains(found, "must <= 3 %")) << found;
  share["rows"] = "step.*";
  EXPECT_EQ(check(record(rows), goal(share)).rfind("must ", 0), 0U);
}

TEST(BenchGoalsTest, every_goal_of_the_repository_is_judged) {
  std::ifstream file(kSources + "/bench/goals.json");
  const std::size_t n_goals = Json::parse(file).size();
  const std::string text = check(record(Json::array()), kSources + "/bench/goals.json");
  if (text.empty()) GTEST_SKIP() << "no python3";
  const auto lines = lines_of(text);
  ASSERT_EQ(lines.size(), n_goals + 1) << text;
  for (std::size_t i = 0; i < n_goals; ++i) EXPECT_EQ(lines[i].rfind("not measured", 0), 0U);
}

}  // namespace
}  // namespace lockstep::test
