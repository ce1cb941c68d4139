#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include <fmt/format.h>

// What the failure campaign runs.
namespace lockstep::test {

struct Engine {
  std::string name;
  std::string backend;
  std::string program;
  bool is_launched_by_mpi = false;

  bool is_between_machines() const { return name == "machines"; }
  /// Its ranks are lockstep-train, which the campaign kills and stops from outside.
  bool trains() const { return name.starts_with("training-"); }
};

struct Trial {
  Engine engine;
  std::string fault;
  std::string place;
  int n_ranks;
  int victim;
  std::string load = {};
  int timeout_s = 0;  ///< of the calls of a training; 0: faulty_rank's own

  std::string name() const {
    return fmt::format("{} {} {} rank {} of {}{}{}", engine.name, fault, place, victim, n_ranks,
                       load.empty() ? "" : " load ", load);
  }
  bool is_any(std::initializer_list<const char*> faults) const {
    return std::find(faults.begin(), faults.end(), fault) != faults.end();
  }
  /// One of the victim's allocations fails; which, says the number behind it.
  bool is_memory() const { return fault.starts_with("memory-"); }
  bool is_hierarchical() const { return engine.backend == "hierarchical"; }
  /// How many steps of training come before the fault.
  int n_training_steps() const {
    return place.starts_with("after-") ? std::stoi(place.substr(std::strlen("after-"))) : 0;
  }
  /// The victim's operation, where that is another than the others'.
  std::string wrong_operation() const {
    const std::size_t colon = fault.find(':');
    return colon == std::string::npos ? "" : fault.substr(0, colon);
  }
};

/// Every fault at every place on every engine, and on every engine one under each load, in random
/// order; again when more are wanted. Where ranks are on several hosts, two or three, once in a
/// host's leader and once in another. None where LOCKSTEP_FAULT_ONLY leaves nothing.
std::vector<Trial> choose_runs(int n_runs, unsigned seed);

/// Of trainings over each engine a rank that is killed or stopped, in turn. None without libtorch,
/// or where LOCKSTEP_FAULT_ONLY leaves nothing.
std::vector<Trial> choose_trainings(int n_runs, unsigned seed);

}  // namespace lockstep::test
