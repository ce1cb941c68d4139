// go_on: 300 steps of 64 samples. Rank 1 of the first generation is killed in the middle; the
// others go on, and a replacement joins.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <thread>
#include <utility>

#include <lockstep/lockstep.hpp>

// [train]
using State = std::pair<int, double>;  // how many steps are complete; the sum over their samples

// Returns whether all steps are complete; false: a replacement waits.
bool train(State& state, bool is_first_generation) {
  state = std::ranges::max(lockstep::all_gather_object(state));  // the newest, to all ranks
  const int rank = lockstep::get_rank(), n_ranks = lockstep::get_world_size();
  while (state.first < 300) {
    double sum = 0;  // of this rank's part of the samples
    for (int sample = rank; sample < 64; sample += n_ranks) sum += sample;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // the work
    if (is_first_generation && rank == 1 && state.first == 50) std::raise(SIGKILL);
    sum = lockstep::all_reduce_value(sum);
    // The state changes after the step's last collective operation: a repeated step starts from the
    // old one.
    state = {state.first + 1, state.second + sum};
    lockstep::step_done();
    const int waits = lockstep::has_waiting_replacements() ? 1 : 0;
    if (lockstep::all_reduce_value(waits, lockstep::ReduceOp::max) != 0) return false;
  }
  lockstep::barrier();  // no rank leaves before all have finished
  return true;
}

int main() {
  lockstep::init_dist();
  State state{};
  bool is_first_generation = true;
  while (true) {
    try {
      if (train(state, is_first_generation)) break;
    } catch (const lockstep::PeerLost&) {
    } catch (const lockstep::PeerFailed&) {
    } catch (const lockstep::TimeoutError&) {
    }
    const lockstep::Regrouped world = lockstep::regroup();
    is_first_generation = false;
    if (world.rank != 0) continue;
    for (const lockstep::LostRank& lost : world.lost) {
      std::printf("lost rank %d, which %s\n", lost.rank, lost.why.c_str());
    }
    std::printf("generation %d: %d ranks\n", static_cast<int>(world.generation), world.size);
    std::fflush(stdout);
  }
  if (lockstep::is_main_process()) std::printf("%d steps, sum %g\n", state.first, state.second);
}
// [train]
