#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <lockstep/error.hpp>
#include <lockstep/sync_master.hpp>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/waiting.hpp"

// Rounds with random delays and faults. A script, made before the threads start, says what goes
// wrong in which round, so that every participant knows the result of each of its calls without
// communicating.

namespace lockstep {
namespace {

using namespace std::chrono_literals;

enum class Fault {
  none,
  slave_fails,        // the culprit calls fail()
  slave_is_late,      // the culprit calls after the watcher's short deadline has passed
  slave_leaves,       // the culprit drops its pipe; the rounds after go on without it
  slave_throws,       // ... while an exception unwinds its thread
  master_fails,       //
  callback_throws,    //
  callback_loses_id,  // no reply for the culprit
  callback_is_slow,   // slower than the culprit's deadline
};
constexpr int kFaults = 9;

struct Round {
  Fault fault = Fault::none;
  int culprit = 0;
  int watcher = 0;         // whose deadline is short where the culprit is late
  std::vector<int> alive;  // slaves that take part, or leave in this round
};

struct Message {
  int round;
  int id;
};

struct Planned : std::runtime_error {
  explicit Planned(int round) : std::runtime_error("planned in round " + std::to_string(round)) {}
};

using TextMaster = SyncMaster<std::unique_ptr<Message>, std::string>;
using TextPipe = SlavePipe<std::unique_ptr<Message>, std::string>;

class Batch {
 public:
  Batch(int n_slaves, int n_rounds, double fault_rate, std::uint32_t seed) : seed_(seed) {
    std::mt19937 random(seed);
    std::vector<int> alive;
    for (int id = 1; id <= n_slaves; ++id) alive.push_back(id * 3);
    const auto one_of = [&](const std::vector<int>& ids) {
      return ids[std::uniform_int_distribution<std::size_t>(0, ids.size() - 1)(random)];
    };
    for (int r = 0; r < n_rounds && !alive.empty(); ++r) {
      Round round{.alive = alive};
      round.culprit = one_of(alive);
      if (std::bernoulli_distribution(fault_rate)(random)) {
        round.fault = static_cast<Fault>(std::uniform_int_distribution(1, kFaults - 1)(random));
      }
      std::vector<int> others = alive;
      std::erase(others, round.culprit);
      if (round.fault == Fault::slave_leaves || round.fault == Fault::slave_throws) alive = others;
      others.push_back(0);
      round.watcher = one_of(others);
      rounds_.push_back(round);
    }
    ended_ = std::vector<std::atomic<bool>>(rounds_.size());
  }

  // Registers the slaves, runs the script with one thread per slave, and returns its length.
  int run(TextMaster& master) {
    std::vector<TextPipe> pipes;  // all before the first thread starts: round 1 may fail at once
    for (const int id : rounds_.front().alive) pipes.push_back(master.register_slave(id));
    std::vector<std::jthread> threads;
    for (TextPipe& registered : pipes) {
      threads.emplace_back([this, pipe = std::move(registered)]() mutable {
        std::mt19937 random(seed_ + static_cast<std::uint32_t>(pipe.id()));
        for (int r = 0; r < n_rounds(); ++r) {
          if (!slave_round(pipe, r, random)) return;
        }
      });
    }
    std::mt19937 random(seed_);
    for (int r = 0; r < n_rounds(); ++r) master_round(master, r, random);
    return n_rounds();
  }

  std::vector<ReplyTo<std::string>> callback(
      std::span<MessageFrom<std::unique_ptr<Message>>> messages) {
    const int r = messages[0].message->round;
    const Round& round = at(r);
    EXPECT_EQ(messages.size(), round.alive.size() + 1);
    std::vector<ReplyTo<std::string>> replies;
    for (auto& [id, message] : messages) {
      EXPECT_EQ(message->round, r) << "a message of another round from " << id;
      EXPECT_EQ(message->id, id);
      if (round.fault != Fault::callback_loses_id || id != round.culprit) {
        replies.push_back({id, reply(r, id)});
      }
    }
    if (round.fault == Fault::callback_throws) throw Planned(r);
    if (round.fault == Fault::callback_is_slow) wait_for_end(r);
    std::shuffle(replies.begin(), replies.end(), std::mt19937(seed_));
    return replies;
  }

 private:
  int n_rounds() const { return static_cast<int>(rounds_.size()); }
  const Round& at(int r) const { return rounds_[static_cast<std::size_t>(r)]; }
  static std::string reply(int r, int id) {
    return "the reply of round " + std::to_string(r) + " to " + std::to_string(id);
  }

  /// Varies the order of events, on which no expectation depends.
  static void dawdle(std::mt19937& random) {
    switch (std::uniform_int_distribution(0, 19)(random)) {
      case 0: std::this_thread::sleep_for(50us); break;
      case 1: std::this_thread::yield(); break;
      default: break;
    }
  }

  void wait_for_end(int r) const { ended_[static_cast<std::size_t>(r)].wait(false); }
  void note_end(int r) {
    ended_[static_cast<std::size_t>(r)] = true;
    ended_[static_cast<std::size_t>(r)].notify_all();
  }

  // A call of round r, which must give what the script says.
  template <class Call>
  void expect_planned(int id, int r, const Call& call) {
    const Round& round = at(r);
    const std::string culprit = "slave " + std::to_string(round.culprit);
    const std::string planned = Planned(r).what();
    Timeout timeout = Timeout(60s);  // only a hang takes as long
    const bool is_short = (round.fault == Fault::slave_is_late && id == round.watcher) ||
                          (round.fault == Fault::callback_is_slow && id == round.culprit);
    if (is_short) timeout = Timeout(1ms);
    std::string got;
    std::string text;
    try {
      text = call(std::make_unique<Message>(r, id), timeout);
      got = "reply";
    } catch (const TimeoutError& error) {
      got = "TimeoutError";
      text = error.what();
    } catch (const PeerLost& error) {
      got = "PeerLost";
      text = error.what();
    } catch (const PeerFailed& error) {
      got = "PeerFailed";
      text = error.what();
    } catch (const UsageError& error) {
      got = "UsageError";
      text = error.what();
    } catch (const Planned& error) {
      got = "Planned";
      text = error.what();
    }
    if (is_short) note_end(r);
    const auto expect = [&](const std::string& outcome, const std::string& part) {
      EXPECT_EQ(got, outcome) << "id " << id << ", round " << r << ": " << text;
      EXPECT_NE(text.find(part), std::string::npos)
          << "id " << id << ", round " << r << ": " << text << "\nwithout: " << part;
    };
    switch (round.fault) {
      case Fault::none: expect("reply", reply(r, id)); break;
      case Fault::slave_fails: expect("PeerFailed", culprit + " failed: " + planned); break;
      case Fault::slave_is_late: expect("TimeoutError", culprit); break;
      case Fault::slave_leaves: expect("PeerLost", culprit + " left"); break;
      case Fault::slave_throws: expect("PeerFailed", culprit + " left"); break;
      case Fault::master_fails: expect("PeerFailed", "the master failed: " + planned); break;
      case Fault::callback_throws: expect(id == 0 ? "Planned" : "PeerFailed", planned); break;
      case Fault::callback_loses_id:
        expect("UsageError", "no reply for " + std::to_string(round.culprit));
        break;
      case Fault::callback_is_slow: expect("TimeoutError", "within 1 ms"); break;
    }
  }

  void master_round(TextMaster& master, int r, std::mt19937& random) {
    dawdle(random);
    if (at(r).fault == Fault::master_fails) {
      master.fail(std::make_exception_ptr(Planned(r)));
      return;
    }
    expect_planned(0, r, [&](auto message, Timeout timeout) {
      return master.run_master(std::move(message), timeout);
    });
  }

  // False where the slave has left.
  bool slave_round(TextPipe& pipe, int r, std::mt19937& random) {
    const int id = pipe.id();
    dawdle(random);
    const Round& round = at(r);
    if (round.culprit == id) {
      switch (round.fault) {
        case Fault::slave_fails: pipe.fail(std::make_exception_ptr(Planned(r))); return true;
        case Fault::slave_is_late: wait_for_end(r); break;
        case Fault::slave_leaves: pipe = TextPipe(); return false;
        case Fault::slave_throws:
          try {
            const TextPipe mine = std::move(pipe);
            throw Planned(r);
          } catch (const Planned&) {
            return false;
          }
        case Fault::none:
        case Fault::master_fails:
        case Fault::callback_throws:
        case Fault::callback_loses_id:
        case Fault::callback_is_slow: break;
      }
    }
    expect_planned(id, r, [&](auto message, Timeout timeout) {
      return pipe.run_slave(std::move(message), timeout);
    });
    return true;
  }

  std::uint32_t seed_;
  std::vector<Round> rounds_;
  std::vector<std::atomic<bool>> ended_;
};

long status_field(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(name)) return std::stol(line.substr(name.size() + 1));
  }
  throw std::runtime_error("no " + name + " in /proc/self/status");
}

// LOCKSTEP_STRESS_ROUNDS=100000 is the long form.
int n_stress_rounds() {
  const char* text = std::getenv("LOCKSTEP_STRESS_ROUNDS");
  return text != nullptr ? std::stoi(text) : 4000;
}

TEST(SyncMasterStress, random_delays_and_faults) {
  const int n_rounds = n_stress_rounds();
  Batch* batch = nullptr;
  TextMaster master([&](auto messages) { return batch->callback(messages); });
  std::mt19937 random(20240229);
  std::thread([] {}).join();  // with the first one, ThreadSanitizer starts a thread of its own
  const long n_threads = status_field("Threads:");
  long warm_memory_kb = 0;
  for (int done = 0, n_batches = 0; done < n_rounds && !HasFailure(); ++n_batches) {
    const int n_slaves = std::uniform_int_distribution(2, n_batches % 8 == 7 ? 32 : 8)(random);
    Batch next(n_slaves, std::uniform_int_distribution(1, 200)(random), /*fault_rate=*/0.15,
               static_cast<std::uint32_t>(random()));
    batch = &next;
    done += next.run(master);
    if (warm_memory_kb == 0 && done >= n_rounds / 4) warm_memory_kb = status_field("VmRSS:");
  }
  // The kernel lets a join return a little before it counts the thread out.
  EXPECT_TRUE(test::wait_until([&] { return status_field("Threads:") <= n_threads; }))
      << status_field("Threads:") << " threads, at first " << n_threads;
  // Three times as many rounds as at the first look. A leak of one message a participant would
  // show as over 100 MB in the long form.
  RecordProperty("grown_kb", std::to_string(status_field("VmRSS:") - warm_memory_kb));
  EXPECT_LT(status_field("VmRSS:") - warm_memory_kb, 32 << 10);
}

}  // namespace
}  // namespace lockstep
