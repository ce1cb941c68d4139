// support/ranks.hpp over the engine of examples/engine, so that the conformance suite runs over it.

#include "support/ranks.hpp"

#include <gtest/gtest.h>

#include <lockstep/lockstep.hpp>
#include <thread>

#include "thread_engine.hpp"

namespace lockstep::test {

std::string name_of(const Setting& setting) { return "threads_" + std::to_string(setting.n_ranks); }

std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  return out << name_of(setting);
}

const std::vector<int>& hosts() {
  static const std::vector<int> none;
  return none;
}

void run_as(const Setting& setting, const std::function<void()>& body,
            std::chrono::seconds watchdog) {
  const auto state = example::make_shared_state(setting.n_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < setting.n_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const GroupScope scope(Group(example::join(state, rank), "world", watchdog));
        body();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace lockstep::test
