#include "record/recorder.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "support/temporary_folder.hpp"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

Call call_of(std::uint64_t sequence, Op op = Op::all_reduce) {
  return {.op = op,
          .dtype = DType::f32,
          .count = 3 * sequence,
          .sequence = sequence,
          .where = std::source_location::current()};
}

TEST(RecorderTest, keeps_the_last_1024_operations) {
  const auto recorder = Recorder::in_process(/*rank=*/1, /*world_size=*/4);
  GroupRecorder track(recorder, "world", 1, 4, /*engine_reports=*/false);
  constexpr std::uint64_t kCalls = 5000;
  for (std::uint64_t i = 1; i <= kCalls; ++i) {
    Call call = call_of(i);
    track.begin(call);
    track.end(call);
  }
  const auto operations = operations_of(recorder->record());
  ASSERT_GE(operations.size(), 1024U);
  for (std::size_t i = 0; i < operations.size(); ++i) {
    const Operation& operation = operations[i];
    EXPECT_EQ(operation.sequence, kCalls - operations.size() + 1 + i);
    EXPECT_EQ(operation.op, Op::all_reduce);
    EXPECT_EQ(operation.n_bytes, operation.sequence * 12);
    EXPECT_EQ(operation.state, Operation::State::finished);
    EXPECT_GE(operation.end_ns, operation.start_ns);
    EXPECT_TRUE(operation.where.starts_with("recorder_test.cpp:")) << operation.where;
  }
  const FlightGroup& group = recorder->record().groups[1];
  EXPECT_EQ(name_of(group), "world");
  EXPECT_EQ(group.n_calls, kCalls);
  EXPECT_EQ(group.n_bytes, kCalls * (kCalls + 1) / 2 * 12);
}

TEST(RecorderTest, a_call_is_under_way_until_it_ends_or_fails) {
  const auto recorder = Recorder::in_process(0, 2);
  GroupRecorder track(recorder, "world", 0, 2, /*engine_reports=*/true);
  const auto state = [&] { return operations_of(recorder->record()).back().state; };
  Call call = call_of(1);
  track.begin(call);
  EXPECT_TRUE(operations_of(recorder->record()).empty());
  ASSERT_EQ(call.progress, &track);
  call.progress->arrived(call);  // as an engine does
  EXPECT_EQ(state(), Operation::State::under_way);
  call.progress->slept(call);
  EXPECT_EQ(operations_of(recorder->record()).size(), 1U);
  track.end(call);
  EXPECT_EQ(state(), Operation::State::finished);
  call.sequence = 2;
  track.begin(call);
  track.fail(call);
  EXPECT_EQ(state(), Operation::State::failed);
}

TEST(RecorderTest, a_call_overtaken_by_a_whole_ring_changes_no_other_entry) {
  const auto recorder = Recorder::in_process(0, 2);
  GroupRecorder slow(recorder, "slow", 0, 2, false);
  GroupRecorder fast(recorder, "fast", 0, 2, false);
  Call first = call_of(1);
  slow.begin(first);
  for (std::uint64_t i = 1; i <= 3000; ++i) {
    Call call = call_of(i);
    fast.begin(call);
    if (i < 3000) fast.end(call);
  }
  slow.end(first);
  const auto operations = operations_of(recorder->record());
  for (const Operation& operation : operations) {
    EXPECT_EQ(name_of(recorder->record().groups[operation.group]), "fast");
  }
  EXPECT_EQ(operations.back().state, Operation::State::under_way);
}

TEST(RecorderTest, threads_write_while_another_reads) {
  const auto recorder = Recorder::in_process(0, 2);
  std::atomic<bool> stop = false;
  std::vector<std::thread> writers;
  for (int i = 0; i < 3; ++i) {
    writers.emplace_back([&, i] {
      GroupRecorder track(recorder, "group" + std::to_string(i), 0, 2, false);
      for (std::uint64_t s = 1; !stop; ++s) {
        Call call = call_of(s);
        track.begin(call);
        track.end(call);
      }
    });
  }
  std::size_t n_read = 0;
  std::size_t n_torn = 0;  // of two calls
  while (n_read < 100'000) {
    for (const Operation& operation : operations_of(recorder->record())) {
      n_torn += operation.count == 3 * operation.sequence ? 0 : 1;
      ++n_read;
    }
  }
  stop = true;
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(n_torn, 0U);
}

TEST(RecorderTest, a_block_in_which_another_thread_writes_is_passed_over) {
  const auto recorder = Recorder::in_process(0, 2);
  GroupRecorder track(recorder, "world", 0, 2, false);
  FlightEntry& entry = recorder->record().entries[20];
  const auto wrap_around = [&] {
    for (std::uint64_t i = 1; i <= FlightRecord::kEntries; ++i) {
      Call call = call_of(i);
      track.begin(call);
      track.end(call);
    }
  };
  entry.begun = 21;  // by a thread that the kernel preempted here
  entry.count = 17;
  for (int turn = 0; turn < 3; ++turn) {
    wrap_around();
    EXPECT_EQ(entry.begun, 21U);
    EXPECT_EQ(entry.count, 17U);
    for (const Operation& operation : operations_of(recorder->record())) {
      EXPECT_NE((operation.number - 1) % FlightRecord::kEntries, 20U);
      EXPECT_EQ(operation.count, 3 * operation.sequence);
    }
  }
  entry.complete = 21;
  wrap_around();
  EXPECT_GT(entry.begun, 21U);
  for (FlightEntry& each : recorder->record().entries) each.begun = each.complete + 1;  // damaged
  wrap_around();
  EXPECT_FALSE(operations_of(recorder->record()).empty());
}

// What two threads leave that write one entry at once: one began it last, the other completed it.
TEST(RecorderTest, an_entry_that_two_calls_wrote_is_hidden) {
  const auto recorder = Recorder::in_process(0, 2);
  GroupRecorder track(recorder, "world", 0, 2, false);
  for (std::uint64_t i = 1; i <= 3; ++i) {
    Call call = call_of(i);
    track.begin(call);
    track.end(call);
  }
  FlightRecord& record = recorder->record();
  FlightEntry& entry = record.entries[1];
  const auto expect_hidden_by = [&](auto& field) {
    field ^= 1U;
    const auto operations = operations_of(record);
    EXPECT_EQ(operations.size(), 2U);
    field ^= 1U;
    EXPECT_EQ(operations_of(record).size(), 3U);
  };
  expect_hidden_by(entry.begun);
  expect_hidden_by(entry.complete);
}

TEST(RecorderTest, more_groups_and_places_than_there_is_room_for) {
  const auto recorder = Recorder::in_process(0, 2);
  std::uint32_t last = 1;
  for (int i = 0; i < 200; ++i) last = recorder->add_group(fmt::format("g{}", i), 0, 2);
  EXPECT_EQ(last, 0U);
  EXPECT_EQ(name_of(recorder->record().groups[0]), "(one of too many groups)");
  EXPECT_EQ(n_groups_of(recorder->record()), FlightRecord::kMaxGroups);
}

TEST(RecorderTest, written_once_atomically) {
  const test::TemporaryFolder folder;
  const auto recorder = Recorder::in_process(/*rank=*/3, /*world_size=*/8);
  recorder->write_to(folder.path());
  GroupRecorder track(recorder, "world", 3, 8, false);
  Call call = call_of(1, Op::broadcast);
  call.root = 2;
  track.begin(call);
  recorder->write_on_failure("the \"first\" reason \xff");
  recorder->write_on_failure("the second");
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    names.push_back(entry.path().filename().string());
  }
  ASSERT_EQ(names, std::vector<std::string>{"rank-3.json"});
  std::ifstream file(folder / names[0]);
  const auto json = nlohmann::json::parse(file);
  EXPECT_EQ(json["lockstep_record"], 1);
  EXPECT_EQ(json["rank"], 3);
  EXPECT_EQ(json["world_size"], 8);
  EXPECT_EQ(json["reason"], "the \"first\" reason \xef\xbf\xbd");
  ASSERT_EQ(json["operations"].size(), 1U);
  const auto& operation = json["operations"][0];
  EXPECT_EQ(operation["operation"], "broadcast");
  EXPECT_EQ(operation["root"], 2);
  EXPECT_EQ(operation["bytes"], 12);
  EXPECT_EQ(operation["state"], "under way");
  EXPECT_TRUE(operation["end_ns"].is_null());
}

TEST(RecorderTest, unwritable_folder_keeps_the_error) {
  const auto recorder = Recorder::in_process(0, 2);
  recorder->write_to("/nonexistent");
  recorder->write_on_failure("reason");  // throws nothing
  EXPECT_EQ(recorder->record().is_written, 0U);
}

}  // namespace
}  // namespace lockstep::internal
