#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <regex>
#include <string>

#include "cli/command.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {

Ended doctor(const std::string& dir) {
  Command command(StartOptions{.arguments = {"doctor", "--record", dir}});
  return command.wait();
}

void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

/// A job of four ranks of which rank 2 is killed, with records in `dir`.
Ended lose_rank_2(const std::string& dir) {
  Command command(StartOptions{.arguments = {"run", "-n", "4", COLLECTIVES_PROGRAM, "lose", "2"},
                               .variables = {{"LOCKSTEP_RECORD_DIR", dir}}});
  command.read_until("joined", 4);
  const std::regex of_rank_2(R"(rank 2 is pid (\d+)\.)");
  std::smatch match;
  EXPECT_TRUE(std::regex_search(command.out(), match, of_rank_2)) << command.out();
  kill(std::stoi(match[1].str()), SIGKILL);
  return command.wait();
}

TEST(DoctorRecordTest, names_the_rank_that_was_killed_and_the_call_it_missed) {
  const TemporaryFolder folder;
  const Ended job = lose_rank_2(folder.path());
  EXPECT_TRUE(contains(job.err, "lockstep doctor --record")) << job.err;
  const Ended ended = doctor(folder.path());
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(contains(ended.out, "of 4 ranks on ")) << ended.out;
  EXPECT_TRUE(contains(ended.out, "records of ranks 0, 1, 2, 3")) << ended.out;
  EXPECT_TRUE(contains(ended.out,
                       "Culprit: rank 2, which never reached collective 2 of group 'world': "
                       "all_reduce of 1 i64, sum"))
      << ended.out;
  EXPECT_TRUE(std::regex_search(
      ended.out, std::regex(R"(2     missing    its last: all_reduce of 1 i64, sum at )"
                            R"(collectives\.cpp:\d+ on group 'world' \(finished\))")))
      << ended.out;
  EXPECT_TRUE(contains(ended.out, "rank 2: the rank was killed by signal 9 (SIGKILL)"))
      << ended.out;
  for (const char* rank : {"0", "1", "3"}) {  // whose call threw
    EXPECT_TRUE(contains(ended.out, fmt::format("\n  {}     failed ", rank))) << ended.out;
  }
}

TEST(DoctorRecordTest, names_the_rank_that_called_something_else) {
  const TemporaryFolder folder;
  Command command(StartOptions{.arguments = {"run", "-n", "3", COLLECTIVES_PROGRAM, "differ", "1"},
                               .variables = {{"LOCKSTEP_RECORD_DIR", folder.path()}}});
  EXPECT_EQ(command.wait().exit_code, 2);
  const Ended ended = doctor(folder.path());
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(contains(ended.out,
                       "Culprit: rank 1, which made another call as collective 2 of group 'world'"))
      << ended.out;
  EXPECT_TRUE(contains(ended.out, "The ranks first called from different lines at collective 2"))
      << ended.out;
}

TEST(DoctorRecordTest, names_the_rank_that_refused_a_call) {
  const TemporaryFolder folder;
  Command command(StartOptions{.arguments = {"run", "-n", "3", COLLECTIVES_PROGRAM, "refuse", "1"},
                               .variables = {{"LOCKSTEP_RECORD_DIR", folder.path()}}});
  EXPECT_EQ(command.wait().exit_code, 2);
  const Ended ended = doctor(folder.path());
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(contains(ended.out,
                       "Culprit: rank 1, which refused its call of collective 2 of group 'world': "
                       "all_reduce of 1 i64, sum"))
      << ended.out;
}

TEST(DoctorRecordTest, nothing_is_written_where_nothing_fails) {
  const TemporaryFolder folder;
  Command command(StartOptions{.arguments = {"run", "-n", "2", COLLECTIVES_PROGRAM, "sum"},
                               .variables = {{"LOCKSTEP_RECORD_DIR", folder.path()}}});
  EXPECT_EQ(command.wait().exit_code, 0);
  const Ended ended = doctor(folder.path());
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.err, "holds no rank-N.json")) << ended.err;
}

TEST(DoctorRecordTest, rejects_non_records) {
  const TemporaryFolder folder;
  lose_rank_2(folder.path());
  const std::string good = contents_of(folder / "rank-1.json");
  const auto expect_refused = [&](const std::string& text, const std::string& why) {
    write(folder / "rank-1.json", text);
    const Ended ended = doctor(folder.path());
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_TRUE(contains(ended.err, "rank-1.json'")) << ended.err;
    EXPECT_TRUE(contains(ended.err, why)) << ended.err;
  };
  expect_refused(good.substr(0, good.size() / 2), "is truncated or damaged");
  expect_refused("", "is truncated or damaged");
  expect_refused("{\"a\": 1}", "is not a flight record of lockstep");
  expect_refused("{\"lockstep_record\": 2}", "has format 2, this command reads 1");
  expect_refused("{\"lockstep_record\": 1}", "is damaged");
  expect_refused(contents_of(folder / "rank-2.json"), "is the record of rank 2");
  std::string foreign = good;
  foreign.replace(foreign.find("\"job\": \"") + 8, 8, "00000000");
  expect_refused(foreign, "is of another job");
}

/// A record of one call on the world.
std::string record_of(int rank, const std::string& world_size, const std::string& reason) {
  return fmt::format(
      R"({{"lockstep_record":1,"job":"1","host":"h","rank":{},"world_size":{},"pid":1,)"
      R"("reason":"{}","groups":[{{"name":"world","rank":{},"size":2}}],"operations":[{{)"
      R"("number":1,"group":"world","sequence":1,"operation":"barrier","where":"a.cpp:1",)"
      R"("collective":1,"state":"finished","start_ns":1,"end_ns":2}}]}})",
      rank, world_size, reason, rank);
}

TEST(DoctorRecordTest, names_the_generation_of_an_elastic_world) {
  const TemporaryFolder folder;
  Command command(StartOptions{
      .arguments = {"run", "-n", "3", "--elastic", "2", ELASTIC_PROGRAM, "steps", "kill", "1"},
      .variables = {{"LOCKSTEP_RECORD_DIR", folder.path()}}});
  EXPECT_EQ(command.wait().exit_code, 0);
  const Ended ended = doctor(folder.path());
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(contains(ended.out, "of 3 ranks, generation 0, on ")) << ended.out;
  EXPECT_TRUE(contains(ended.out, "Culprit: rank 1, which never reached collective ")) << ended.out;
  EXPECT_TRUE(contains(ended.out, "rank 1: the rank was killed by signal 9 (SIGKILL)"))
      << ended.out;
}

TEST(DoctorRecordTest, takes_the_newest_generation) {
  const TemporaryFolder folder;
  const auto write_of = [&](int rank, const std::string& world_size,
                            const std::string& generation) {
    std::string text = record_of(rank, world_size, "r");
    text.insert(1, "\"generation\":" + generation + ",");
    write(folder / fmt::format("rank-{}.json", rank), text);
  };
  write_of(0, "2", "4");
  write_of(1, "2", "4");
  write_of(2, "4", "3");
  write_of(3, "4", "3");
  const Ended ended = doctor(folder.path());
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(contains(ended.out, "of 2 ranks, generation 4, on h: records of ranks 0, 1"))
      << ended.out;
  EXPECT_TRUE(
      contains(ended.out, "Left out, because they are of generation 3: records of ranks 2, 3"))
      << ended.out;
  EXPECT_FALSE(contains(ended.out, "No record of")) << ended.out;
  write_of(1, "3", "4");
  EXPECT_TRUE(contains(doctor(folder.path()).err, "is of another job"));
}

TEST(DoctorRecordTest, a_record_nested_without_end) {
  const TemporaryFolder folder;
  constexpr std::size_t kDepth = 200'000;
  write(folder / "rank-0.json", std::string(kDepth, '[') + std::string(kDepth, ']'));
  write(folder / "rank-1.json", R"({"lockstep_record":1,"host":)" + std::string(kDepth, '[') +
                                    std::string(kDepth, ']') + "}");
  for (const char* const name : {"rank-0.json", "rank-1.json"}) {
    const Ended ended = doctor(folder.path());
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_TRUE(contains(ended.err, std::string(name) + "'")) << ended.err;
    EXPECT_TRUE(contains(ended.err, "nested more than 16 deep")) << ended.err;
    std::filesystem::remove(folder / name);
  }
}

TEST(DoctorRecordTest, a_world_larger_than_memory) {
  const TemporaryFolder folder;
  write(folder / "rank-1.json", record_of(1, "2147483647", "r"));
  const Ended ended = doctor(folder.path());
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(contains(ended.out, "No record of ranks 0, 2, 3, ")) << ended.out;
  EXPECT_TRUE(contains(ended.out, ", 16 and 2147483630 more")) << ended.out;
  write(folder / "rank-1.json", record_of(1, "1", "r"));
  EXPECT_TRUE(contains(doctor(folder.path()).err, "it is of rank 1 of 1"));
}

TEST(DoctorRecordTest, rejects_non_regular_files) {
  const TemporaryFolder folder;
  for (const char* const name : {"rank-0.json", "rank-0.flight"}) {
    ASSERT_EQ(mkfifo((folder / name).c_str(), 0600), 0);
  }
  Ended ended = doctor(folder.path());
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.err, "rank-0.json': it is not a regular file")) << ended.err;
  std::filesystem::remove(folder / "rank-0.json");
  std::filesystem::create_directory(folder / "rank-0.json");
  ended = doctor(folder.path());
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.err, "rank-0.json': it is not a regular file")) << ended.err;
}

TEST(DoctorRecordTest, control_characters_do_not_reach_the_terminal) {
  const TemporaryFolder folder;
  write(folder / "rank-0.json", record_of(0, "2", R"(\u001b]0;title\u0007 \u009b31m)"));
  const Ended ended = doctor(folder.path());
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(contains(ended.out, R"(\x1b]0;title\x07 \x9b31m)")) << ended.out;
  EXPECT_FALSE(contains(ended.out, "\x1b")) << ended.out;
}

TEST(DoctorRecordTest, missing_folder) {
  const Ended ended = doctor("/nonexistent");
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.err, "cannot read the folder '/nonexistent'")) << ended.err;
  Command command(StartOptions{.arguments = {"run", "-n", "2", COLLECTIVES_PROGRAM},
                               .variables = {{"LOCKSTEP_RECORD_DIR", "/nonexistent"}}});
  const Ended job = command.wait();
  EXPECT_EQ(job.exit_code, 2);
  EXPECT_TRUE(contains(job.err, "LOCKSTEP_RECORD_DIR is '/nonexistent'")) << job.err;
}

}  // namespace
}  // namespace lockstep::test
