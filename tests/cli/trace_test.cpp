#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cli/command.hpp"
#include "cli/nodes.hpp"
#include "support/expect.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

Ended trace(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "trace");
  Command command(StartOptions{.arguments = std::move(arguments)});
  return command.wait();
}

class TraceTest : public testing::Test {
 protected:
  Ended run_traced(const std::string& n, std::vector<std::string> rest) const {
    rest.insert(rest.begin(), {"-n", n, "--trace", file_});
    return run(rest);
  }
  json read() const { return json::parse(contents_of(file_)); }
  std::size_t n_files() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(folder_.path()), fs::directory_iterator()));
  }
  std::string summary() const {
    const Ended ended = trace({"summary", file_});
    EXPECT_EQ(ended.exit_code, 0) << ended.err;
    return ended.out;
  }

  const TemporaryFolder folder_;
  const std::string file_ = folder_ / "t.json";
};

/// Events of one row, by name.
std::vector<json> events_of(const json& trace, int pid, const std::string& name) {
  std::vector<json> events;
  for (const json& event : trace["traceEvents"]) {
    if (event["pid"] == pid && event["name"] == name) events.push_back(event);
  }
  return events;
}

/// 1: a lies in b.
bool lies_in(const json& a, const json& b) {
  const auto start = [](const json& event) { return event["ts"].get<double>(); };
  const auto end = [&](const json& event) { return start(event) + event["dur"].get<double>(); };
  constexpr double kRounding = 1e-4;  // of nanoseconds as decimals
  return start(b) <= start(a) && end(a) <= end(b) + kRounding && a["tid"] == b["tid"];
}

TEST_F(TraceTest, holds_every_call_and_region_of_every_rank) {
  const Ended job = run_traced("3", {TRACED_PROGRAM, "steps", "4"});
  ASSERT_EQ(job.exit_code, 0) << job.err;
  expect_contains(job.err, "t.json has 36 events");
  EXPECT_EQ(n_files(), 1U);  // no folder is left
  const json trace = read();
  EXPECT_EQ(trace["otherData"]["ranks"].size(), 3U);
  for (int rank = 0; rank < 3; ++rank) {
    const auto name = events_of(trace, rank, "process_name");
    ASSERT_EQ(name.size(), 1U);
    EXPECT_EQ(name[0]["args"]["name"].get<std::string>().find("rank " + std::to_string(rank)), 0U);
    const auto calls = events_of(trace, rank, "all_reduce");
    const auto steps = events_of(trace, rank, "step \"1\"");
    const auto inner = events_of(trace, rank, "add");
    ASSERT_EQ(calls.size(), 4U);
    ASSERT_EQ(steps.size(), 4U);
    ASSERT_EQ(inner.size(), 4U);
    for (std::size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(calls[i]["ph"], "X");
      const json& call = calls[i]["args"];
      EXPECT_EQ(call["group"], "world");
      EXPECT_EQ(call["sequence"], i + 1);
      EXPECT_EQ(call["bytes"], 8);
      EXPECT_EQ(call["type"], "i64");
      EXPECT_EQ(call["where"].get<std::string>().find("traced.cpp:"), 0U) << call;
      EXPECT_TRUE(lies_in(calls[i], inner[i])) << calls[i] << inner[i];
      EXPECT_TRUE(lies_in(inner[i], steps[i])) << inner[i] << steps[i];
    }
    for (const json& wait : events_of(trace, rank, "wait")) {
      EXPECT_TRUE(std::any_of(calls.begin(), calls.end(), [&](const json& call) {
        return lies_in(wait, call);
      })) << wait;
    }
  }
  const std::string text = summary();
  expect_contains(text, "3 ranks on 1 host, 36 events in ");
  expect_contains(text, "\nall_reduce                      12       96 B ");
  expect_contains(text, "\nstep \"1\"                        12 ");
  expect_contains(text, "\nrank 2 ");
}

TEST_F(TraceTest, shows_who_waited_for_the_late_rank) {
  ASSERT_EQ(run_traced("3", {TRACED_PROGRAM, "late", "1"}).exit_code, 0);
  const json trace = read();
  std::map<std::string, int> n_waited_for;
  for (const int rank : {0, 2}) {
    for (const json& wait : events_of(trace, rank, "wait")) {
      ++n_waited_for[wait["args"]["for"].get<std::string>()];
      EXPECT_GT(wait["dur"], 0);
    }
  }
  EXPECT_EQ(n_waited_for, (std::map<std::string, int>{{"rank 1", 2}}));
  EXPECT_TRUE(events_of(trace, 1, "wait").empty());
  expect_contains(summary(), "Slowest: rank 1. The others waited ");
  EXPECT_EQ(events_of(trace, 1, "recv").size(), 2U);
  EXPECT_EQ(events_of(trace, 0, "send").at(0)["args"]["root"], 1);
}

TEST_F(TraceTest, keeps_what_a_killed_rank_did_until_its_death) {
  EXPECT_EQ(run_traced("3", {TRACED_PROGRAM, "die", "1"}).exit_code, 128 + SIGKILL);
  const json trace = read();
  ASSERT_EQ(events_of(trace, 1, "all_reduce").size(), 1U);
  const auto last = events_of(trace, 1, "last words");
  ASSERT_EQ(last.size(), 1U);
  EXPECT_EQ(last[0]["ph"], "B");  // and no end
  const auto calls = events_of(trace, 0, "all_reduce");
  ASSERT_EQ(calls.size(), 2U);
  EXPECT_FALSE(calls[0]["args"].contains("failed"));
  EXPECT_EQ(calls[1]["args"]["failed"], true);
  expect_contains(summary(), "rank 1: 1 call or region never ended");
}

TEST_F(TraceTest, shows_calls_of_the_worker_thread_and_who_waits_for_it) {
  ASSERT_EQ(run_traced("2", {TRACED_PROGRAM, "async"}).exit_code, 0);
  const json trace = read();
  const auto call = events_of(trace, 0, "all_reduce");
  const auto wait = events_of(trace, 0, "Work::wait");
  ASSERT_EQ(call.size(), 1U);
  ASSERT_EQ(wait.size(), 1U);
  EXPECT_NE(call[0]["tid"], wait[0]["tid"]);
  std::map<int, std::string> names;
  for (const json& name : events_of(trace, 0, "thread_name")) {
    names[name["tid"].get<int>()] = name["args"]["name"].get<std::string>();
  }
  EXPECT_EQ(names[call[0]["tid"].get<int>()], "lockstep-comm");
  EXPECT_EQ(names[wait[0]["tid"].get<int>()], "main");
}

TEST_F(TraceTest, names_each_of_many_groups) {
  const Ended job = run_traced("2", {TRACED_PROGRAM, "groups", "40"});
  ASSERT_EQ(job.exit_code, 0) << job.err;
  const auto calls = events_of(read(), 0, "all_reduce");
  ASSERT_EQ(calls.size(), 40U);
  std::set<std::string> groups;
  for (const json& call : calls) groups.insert(call["args"]["group"].get<std::string>());
  EXPECT_EQ(groups.size(), calls.size());
}

TEST_F(TraceTest, shows_ranks_that_are_threads) {
  ASSERT_EQ(run_traced("1", {TRACED_PROGRAM, "threads", "3"}).exit_code, 0);
  const json trace = read();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(events_of(trace, rank, "all_reduce").size(), 1U);
    EXPECT_EQ(events_of(trace, rank, "thread_name").at(0)["args"]["name"],
              "lockstep-" + std::to_string(rank));
  }
}

TEST_F(TraceTest, keeps_each_start_of_the_ranks_apart) {
  run_traced("2", {"--max-restarts", "1", TRACED_PROGRAM, "die", "1"});
  const json trace = read();
  std::set<std::string> names;
  for (const json& row : trace["otherData"]["ranks"]) {
    const int pid = row["pid"].get<int>();
    names.insert(events_of(trace, pid, "process_name").at(0)["args"]["name"].get<std::string>());
    EXPECT_GE(events_of(trace, pid, "all_reduce").size(), 1U);
  }
  EXPECT_EQ(names.size(), 4U);
  expect_contains(summary(), "\nrank 1, restart 1 ");
}

TEST_F(TraceTest, names_that_cannot_be_are_errors_before_anything_starts) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"/nonexistent/t.json", "cannot make a file in '/nonexistent': No such file"},
      {folder_.path(), "is a folder"},
      {"", "name is empty"}};
  for (const auto& [name, text] : cases) {
    const Ended ended = run({"-n", "1", "--trace", name, "echo", "started"});
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_EQ(ended.out, "");
    expect_contains(ended.err, "lockstep run: --trace: ");
    expect_contains(ended.err, text);
  }
  EXPECT_EQ(run({"-n", "1", "--trace", file_, "/nonexistent"}).exit_code, 127);
  EXPECT_EQ(n_files(), 0U);
}

TEST_F(TraceTest, a_program_without_lockstep_leaves_an_empty_trace) {
  const Ended ended = run_traced("2", {"true"});
  EXPECT_EQ(ended.exit_code, 0);
  expect_contains(ended.err,
                  "t.json is empty: no rank has joined a world by init_dist or run_ranks");
  EXPECT_TRUE(read()["traceEvents"].empty());
  expect_contains(summary(), "0 ranks");
}

TEST_F(TraceTest, what_is_no_trace_is_rejected) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"hello", "syntax error"},
      {"{}", "otherData"},
      {"[1, 2]", "is not a trace written by lockstep"},
      {R"({"traceEvents":[{"ph":"X"}],"otherData":{}})", "pid"},
      {R"({"traceEvents":[],"otherData":{"lockstep_trace":9}})", "another version"}};
  for (const auto& [content, text] : cases) {
    std::ofstream(file_) << content;
    const Ended ended = trace({"summary", file_});
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_EQ(ended.out, "");
    expect_contains(ended.err, "t.json' is not a trace written by lockstep");
    expect_contains(ended.err, text);
  }
  std::ofstream(file_) << std::string(200'000, '[') << std::string(200'000, ']');
  expect_contains(trace({"summary", file_}).err, "nested more than 16 deep");
  expect_contains(trace({"summary", "/nonexistent"}).err, "No such file");
  expect_contains(trace({"merge", folder_ / "new", folder_.path()}).err,
                  "contains no traces of ranks");
  expect_contains(trace({"merge", file_, file_}).err,
                  "t.json' exists");  // the output was forgotten
  EXPECT_EQ(trace({}).exit_code, 2);
}

TEST_F(TraceTest, inputs_that_are_not_regular_files_are_refused) {
  const std::string fifo = folder_ / "fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (const Ended& ended : {trace({"summary", fifo}), trace({"merge", file_, fifo})}) {
    EXPECT_EQ(ended.exit_code, 2);
    expect_contains(ended.err, "cannot read '" + fifo + "': it is not a regular file");
  }
  const Ended folder = trace({"summary", folder_.path()});
  EXPECT_EQ(folder.exit_code, 2);
  expect_contains(folder.err, "cannot read '" + folder_.path() + "': it is not a regular file");
}

TEST_F(TraceTest, what_is_no_file_is_not_replaced) {
  const std::string fifo = folder_ / "fifo";
  const std::string link = folder_ / "link";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  fs::create_symlink(fifo, link);
  for (const std::string& name : {fifo, link}) {
    for (const Ended& ended :
         {run({"-n", "1", "--trace", name, "echo", "ran"}), trace({"merge", name, file_})}) {
      EXPECT_EQ(ended.exit_code, 2);
      EXPECT_EQ(ended.out, "");
      expect_contains(ended.err, name + "' is not a regular file, and would be replaced by one");
    }
  }
  EXPECT_TRUE(fs::is_fifo(fifo));
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(n_files(), 2U);
}

TEST_F(TraceTest, a_trace_larger_than_files_may_be_is_an_error) {
  Command command(StartOptions{.arguments = {"run", "-n", "1", "--trace", file_, "true"},
                               .shell = "ulimit -f 8192; exec \"$@\""});
  EXPECT_EQ(command.wait().exit_code, 0) << command.err();
  // 3 names of 2 MB each are written, and read again.
  json trace_of_names = read();
  trace_of_names["otherData"]["ranks"] = json::array();
  for (const int pid : {0, 1, 2}) {
    trace_of_names["otherData"]["ranks"].push_back({{"pid", pid},
                                                    {"rank", pid},
                                                    {"world", 0},
                                                    {"restart", 0},
                                                    {"system_pid", 1},
                                                    {"host", std::string(2'000'000, 'h')},
                                                    {"lost_events", 0},
                                                    {"why_lost", ""}});
  }
  const std::string large = folder_ / "large.json";
  std::ofstream(large) << trace_of_names.dump();
  Command merge(StartOptions{.arguments = {"trace", "merge", folder_ / "new", large},
                             .shell = "ulimit -f 8192; exec \"$@\""});
  EXPECT_EQ(merge.wait().exit_code, 1);
  expect_contains(merge.err(), "File too large");
}

TEST_F(TraceTest, control_characters_do_not_reach_the_terminal) {
  ASSERT_EQ(run_traced("1", {TRACED_PROGRAM, "steps", "1"}).exit_code, 0);
  json changed = read();
  for (json& event : changed["traceEvents"]) {
    if (event["ph"] == "X") event["name"] = "\x1b]0;title\x07";
  }
  std::ofstream(file_) << changed.dump();
  expect_contains(summary(), R"(\x1b]0;title\x07)");
  EXPECT_EQ(summary().find('\x1b'), std::string::npos);
}

/// The rows with these pids, as a file of a node whose clock is ahead.
void write_node(const json& trace, const std::set<int>& pids, const std::string& clock,
                std::int64_t ahead_ns, const std::string& path) {
  json node = trace;
  node["traceEvents"].clear();
  node["otherData"]["ranks"].clear();
  for (const json& event : trace["traceEvents"]) {
    if (pids.count(event["pid"].get<int>()) != 0) node["traceEvents"].push_back(event);
  }
  for (const json& row : trace["otherData"]["ranks"]) {
    if (pids.count(row["pid"].get<int>()) != 0) node["otherData"]["ranks"].push_back(row);
  }
  json& head = node["otherData"];
  head["clock"] = clock;
  head["origin_ns"] = head["origin_ns"].get<std::int64_t>() + ahead_ns;
  std::ofstream(path) << node.dump(1);
}

TEST_F(TraceTest, merges_nodes_and_corrects_their_clocks) {
  ASSERT_EQ(run_traced("3", {TRACED_PROGRAM, "steps", "50"}).exit_code, 0);
  const json whole = read();
  constexpr std::int64_t kAhead = 5'000'000'000;
  write_node(whole, {0, 1}, "one", 0, folder_ / "0.json");
  write_node(whole, {2}, "other", kAhead, folder_ / "1.json");
  const std::string merged_file = folder_ / "merged.json";
  const Ended ended = trace({"merge", merged_file, folder_ / "0.json", folder_ / "1.json"});
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  const json merged = json::parse(contents_of(merged_file));
  const json& correction = merged["otherData"]["clock_corrections"].at(0);
  EXPECT_EQ(correction["clock"], "other");
  const auto within_ns = correction["within_ns"].get<std::int64_t>();
  const auto error_ns = correction["added_ns"].get<std::int64_t>() + kAhead;
  EXPECT_GE(within_ns, 0);
  EXPECT_LE(std::abs(error_ns), within_ns + 1);
  const auto absolute_ns = [](const json& of, std::size_t i) {
    return of["otherData"]["origin_ns"].get<double>() +
           events_of(of, 2, "all_reduce").at(i)["ts"].get<double>() * 1000;
  };
  EXPECT_NEAR(absolute_ns(merged, 49) - absolute_ns(whole, 49), static_cast<double>(error_ns), 1e3);
  const Ended text = trace({"summary", merged_file});
  expect_contains(text.out, "3 ranks on ");
  expect_contains(text.out, "a clock corrected by -");
  const Ended twice =
      trace({"merge", folder_ / "twice.json", folder_ / "0.json", folder_ / "0.json"});
  EXPECT_EQ(twice.exit_code, 2);
  expect_contains(twice.err, "rank 0 is in two of the traces");
}

TEST_F(TraceTest, each_node_writes_a_file_of_its_own) {
  const std::string rendezvous = free_rendezvous();
  std::vector<std::unique_ptr<Command>> nodes;
  for (const char* const node : {"0", "1"}) {
    nodes.push_back(std::make_unique<Command>(
        StartOptions{.arguments = {"run", "--nnodes", "2", "--node-rank", node, "--rdzv",
                                   rendezvous, "-n", "1", "--trace", file_, "true"}}));
  }
  for (const auto& node : nodes) EXPECT_EQ(node->wait().exit_code, 0) << node->err();
  EXPECT_TRUE(fs::exists(folder_ / "t.node-0.json"));
  EXPECT_TRUE(fs::exists(folder_ / "t.node-1.json"));
  EXPECT_EQ(n_files(), 2U);
}

TEST_F(TraceTest, merge_after_launcher_killed) {
  Command job(StartOptions{
      .arguments = {"run", "-n", "2", "--trace", file_, COLLECTIVES_PROGRAM, "lose", "1"}});
  job.read_until("joined", 2);
  job.send(SIGKILL);
  job.wait();
  job.wait_for_processes(0);
  ASSERT_EQ(n_files(), 1U);
  const std::string left = fs::directory_iterator(folder_.path())->path();
  EXPECT_EQ(left.find(file_ + "."), 0U);
  EXPECT_EQ(fs::status(left).permissions(), fs::perms::owner_all);
  const Ended ended = trace({"merge", file_, left});
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  for (const int rank : {0, 1}) EXPECT_GE(events_of(read(), rank, "all_reduce").size(), 1U);
}

}  // namespace
}  // namespace lockstep::test
