// A training over several hosts whose ranks, launchers and links fail: it ends with the numbers of
// one rank that nothing disturbs, and all its ranks have the same bits. The hosts are network
// namespaces, with UCX between them.
//
// LOCKSTEP_FAULT_RUNS=200 for more events, LOCKSTEP_FAULT_SEED for others.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cli/command.hpp"
#include "support/hosts.hpp"
#include "support/namespaces.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {

constexpr int kHosts = 4, kRanksEach = 2, kRanks = kHosts * kRanksEach;
constexpr std::chrono::milliseconds kLeaseTime{2000};
constexpr std::chrono::minutes kNoHang{10};

unsigned setting(const char* name, unsigned otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : static_cast<unsigned>(std::atoi(value));
}

/// The processes that a launcher has started as ranks.
std::vector<pid_t> ranks_of(pid_t launcher) {
  std::ifstream children(fmt::format("/proc/{0}/task/{0}/children", launcher));
  std::vector<pid_t> ranks;
  for (pid_t child = 0; children >> child;) {
    std::string name;
    std::getline(std::ifstream(fmt::format("/proc/{}/comm", child)), name);
    if (name != "lockstep-guard") ranks.push_back(child);
  }
  return ranks;
}

std::vector<double> doubles_in(const std::string& file) {
  const std::string bytes = contents_of(file);
  std::vector<double> values(bytes.size() / sizeof(double));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

class ElasticHosts {
 public:
  ElasticHosts(std::vector<std::string> program, unsigned seed)
      : job_{.program = std::move(program),
             .options = {"--elastic", "1", "--elastic-lease",
                         fmt::format("{:g}", std::chrono::duration<double>(kLeaseTime).count()),
                         "--"},
             .watchdog = kNoHang,
             .ucx = UCX_MODULE,
             .n_ranks = kRanksEach},
        random_(seed),
        nodes_(start_on_machines(kHosts, job_)) {}

  /// Returns when all ranks are in one generation again.
  std::string disturb() {
    for (const auto& node : nodes_) node->read_available();
    const int before = last_generation().number;
    std::string what = cause_one();
    if (pick(4) == 0) what += ", " + cause_one();
    for (const auto& mend : std::exchange(mends_, {})) mend();
    nodes_[0]->read_until(
        [&] {
          const Generation last = last_generation();
          return last.number > before && last.n_ranks == kRanks;
        },
        fmt::format("a generation of {} ranks after {}", kRanks, what));
    return what;
  }
  /// The outputs of all launchers that have ended by themselves.
  std::vector<Ended> wait() { return wait_for(nodes_); }
  const std::string& err() const { return nodes_[0]->err(); }

 private:
  int pick(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  struct Generation {
    int number = 0, n_ranks = kRanks;
  };
  Generation last_generation() const {
    Generation last;
    for (const std::string& line : lines_of(nodes_[0]->err())) {
      const std::size_t at = line.find(" generation ");
      if (at == line.npos) continue;
      std::istringstream words(line.substr(at + std::strlen(" generation ")));
      char colon = ' ';
      words >> last.number >> colon >> last.n_ranks;
    }
    return last;
  }
  static std::string is_lost(int node) {
    return fmt::format("node {0} (machine{0}) is lost", node);
  }
  int n_losses(int node) const {
    const auto lines = lines_of(nodes_[0]->err());
    return static_cast<int>(std::ranges::count_if(
        lines, [&](const std::string& line) { return contains(line, is_lost(node)); }));
  }

  /// Of what ends is mended what does not come back by itself.
  std::string cause_one() {
    const int node = pick(kHosts);
    const int other = 1 + pick(kHosts - 1);  // node 0's launcher is the job
    const auto k = static_cast<std::size_t>(other);
    const bool is_whole = std::ranges::find(disturbed_, other) == disturbed_.end();
    switch (is_whole ? pick(4) : 0) {
      case 0: {
        const auto ranks = ranks_of(nodes_[static_cast<std::size_t>(node)]->pid());
        if (ranks.empty()) return "nothing";
        ::kill(ranks[static_cast<std::size_t>(pick(static_cast<int>(ranks.size())))], SIGKILL);
        return fmt::format("a rank of node {} is killed", node);
      }
      case 1:
        disturbed_.push_back(other);
        nodes_[k]->send(SIGKILL);
        mends_.emplace_back([this, other, k] {
          nodes_[k]->wait();
          nodes_[k] = start_on_machine(other, kHosts, job_);
          settled(other);
        });
        return fmt::format("the launcher of node {} is killed", other);
      case 2:
        disturbed_.push_back(other);
        nodes_[k]->send(SIGSTOP);
        mends_.emplace_back([this, other, k, n = n_losses(other) + 1] {
          nodes_[0]->read_until(is_lost(other), n);
          nodes_[k]->send(SIGCONT);
          settled(other);
        });
        return fmt::format("the launcher of node {} is stopped", other);
      default:
        disturbed_.push_back(other);
        Namespaces::cut(other);
        mends_.emplace_back([this, other, n = n_losses(other) + 1] {
          nodes_[0]->read_until(is_lost(other), n);
          Namespaces::connect(other);
          settled(other);
        });
        return fmt::format("the link of node {} is cut", other);
    }
  }
  void settled(int node) { std::erase(disturbed_, node); }

  const Namespaces machines_{kHosts};
  const NodesJob job_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Command>> nodes_;
  std::vector<std::function<void()>> mends_;
  std::vector<int> disturbed_;
};

TEST(ElasticHostsTest, hosts_and_ranks_that_are_lost_do_not_change_the_numbers) {
  const std::string missing = missing_namespaces();
  if (!missing.empty()) GTEST_SKIP() << missing;
  if (std::string(UCX_MODULE).empty()) GTEST_SKIP() << "built without UCX";
  const unsigned n_events = setting("LOCKSTEP_FAULT_RUNS", 10);
  const unsigned seed = setting("LOCKSTEP_FAULT_SEED", 1);
  const TemporaryFolder folder;
  const auto training = [&](const char* out, const std::string& n_steps) {
    return std::vector<std::string>{ELASTIC_TRAINING, LOCKSTEP_DIGITS, folder / out, n_steps};
  };
  std::vector<std::string> program = training("hosts", "0");
  program.insert(program.end(), {"until", folder / "end"});
  std::string events;
  std::set<std::string> bits;
  int n_ranks = 0;
  {
    ElasticHosts hosts(program, seed);
    std::mt19937 random(seed);
    for (unsigned i = 0; i < n_events; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 1000));
      events += "\n  " + hosts.disturb();
    }
    std::ofstream(folder / "end").close();
    for (const Ended& ended : hosts.wait()) {
      EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
      for (const std::string& line : lines_of(ended.out)) {
        const std::size_t at = line.find(": ");  // N steps, parameters BITS
        if (at == line.npos || !contains(line, " steps, parameters ")) continue;
        bits.insert(line.substr(at + 2));
        ++n_ranks;
      }
    }
  }
  EXPECT_EQ(n_ranks, kRanks) << events;
  ASSERT_EQ(bits.size(), 1U) << events;

  std::vector<std::string> alone{"-n", "1"};
  const std::vector<std::string> words =
      training("alone", bits.begin()->substr(0, bits.begin()->find(' ')));
  alone.insert(alone.end(), words.begin(), words.end());
  alone.emplace_back("alone");
  ASSERT_EQ(run(StartOptions{.arguments = alone, .watchdog = kNoHang}).exit_code, 0);
  const std::vector<double> expected = doubles_in(folder / "alone");
  const std::vector<double> got = doubles_in(folder / "hosts");
  ASSERT_EQ(got.size(), expected.size());
  ASSERT_FALSE(got.empty());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], expected[i], 1e-11 * std::max(1.0, std::abs(expected[i]))) << events;
  }
}

}  // namespace
}  // namespace lockstep::test
