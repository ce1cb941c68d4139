// A rank of a traced job.
//   traced steps N     N all_reduces, each in a region "step" around a region "add"
//   traced late R      the others wait in one all_reduce for rank R
//   traced die R       rank R is killed in its second all_reduce's place, inside a region
//   traced async       an all_reduce on the worker thread
//   traced threads N   ranks that are threads: one all_reduce
//   traced groups N    one all_reduce in each of N groups
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <lockstep/lockstep.hpp>
#include <span>
#include <string>
#include <vector>

#include "support/waiting.hpp"

namespace {

void add(std::int64_t& value) { lockstep::all_reduce(std::span(&value, 1)); }

/// Rank `late` comes to the call when the others wait in it: they have told it their pids before.
void come_late(int late) {
  std::int64_t value = ::getpid();
  const lockstep::Group& world = lockstep::default_group();
  if (world.rank() == late) {
    std::vector<pid_t> pids;
    for (int peer = 0; peer < world.size(); ++peer) {
      if (peer == late) continue;
      world.recv({&value, 1, lockstep::DType::i64}, peer);
      pids.push_back(static_cast<pid_t>(value));
    }
    for (const pid_t pid : pids) lockstep::test::wait_until_asleep(pid);
  } else {
    world.send({&value, 1, lockstep::DType::i64}, late);
  }
  add(value);
}

void die(int victim) {
  std::int64_t value = 1;
  add(value);
  const lockstep::TraceScope scope("last words");
  if (lockstep::get_rank() == victim) std::raise(SIGKILL);
  add(value);
}

void add_in_steps(int n) {
  for (std::int64_t value = 1; n > 0; --n) {
    const lockstep::TraceScope step("step \"1\"");
    const lockstep::TraceScope inner("add");
    add(value);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "steps";
  int number = argc > 2 ? std::atoi(argv[2]) : 1;
  std::signal(SIGTERM, SIG_IGN);  // each rank ends by its own error, however slow the machine
  try {
    if (mode == "threads") {
      lockstep::run_ranks(number, [](int) { add_in_steps(1); });
      return 0;
    }
    lockstep::init_dist();
    if (mode == "steps") add_in_steps(number);
    if (mode == "late") come_late(number);
    if (mode == "die") die(number);
    if (mode == "groups") {
      for (std::int64_t value = 1; number-- > 0;) {
        const lockstep::Group group = lockstep::default_group().duplicate();
        lockstep::all_reduce(std::span(&value, 1), lockstep::ReduceOp::sum, group);
      }
    }
    if (mode == "async") {
      double value = 1;
      lockstep::default_group().all_reduce_async({&value, 1, lockstep::DType::f64}).wait();
    }
  } catch (const lockstep::Error&) {
    return 3;
  }
}
