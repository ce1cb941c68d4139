// A rank of the fault campaign: one of the ranks does something wrong, all others write to
// FOLDER/RANK which error they got, when, and its text.
//
//   faulty_rank BACKEND FAULT PLACE VICTIM FOLDER [N_THREADS]
//
// FAULT: kill stop exit exception op count type root missing slow refuse alike (all ranks refuse
// their calls) limit container cut join (the victim's init_dist fails), memory-N (the victim's Nth
// allocation fails), or VICTIMS:OTHERS, two operations. LOCKSTEP_FAULT_LOAD: see rank_loads.hpp.
// PLACE: before (the first call), between (two calls), in (a call of many phases; killed, stopped
// and ended ranks are inside the call then), step-N (N instructions after a call began; killed and
// stopped ranks).
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <lockstep/lockstep.hpp>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "faults/rank_loads.hpp"
#include "support/allocations.hpp"
#include "support/waiting.hpp"

namespace {

using lockstep::test::wait_until;
using lockstep::test::rank_loads::Room;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

/// The timeout of calls that a rank joins late, or never.
constexpr milliseconds kDeadline{2000};

struct Plan {
  std::string backend;
  std::string fault;
  std::string place;
  int victim = 0;
  std::string folder;

  bool is_any(std::initializer_list<const char*> faults) const {
    for (const char* other : faults) {
      if (fault == other) return true;
    }
    return false;
  }
  /// N of a fault or a place that is called `PREFIX-N`; 0 of others.
  int n_memory() const { return number(fault, "memory-"); }
  int n_steps() const { return number(place, "step-"); }

 private:
  static int number(const std::string& name, const std::string& prefix) {
    return name.starts_with(prefix) ? std::atoi(name.c_str() + prefix.size()) : 0;
  }
};

long long now_ns() { return steady_clock::now().time_since_epoch().count(); }

/// Written atomically.
void write_file(const Plan& plan, const std::string& name, const std::string& text) {
  const std::string path = plan.folder + "/" + name;
  const Room room;
  {
    std::ofstream file(path + "~", std::ios::binary);
    file << text;
  }
  std::filesystem::rename(path + "~", path);
}

void report(const Plan& plan, int rank, const std::string& error, const std::string& text) {
  write_file(plan, std::to_string(rank), error + "\n" + std::to_string(now_ns()) + "\n" + text);
}

/// A rank that leaves may end the others (mpirun does): every rank reports first.
void wait_for_reports(const Plan& plan, int n_ranks, bool is_victim_waited_for) {
  const auto have_all_reported = [&] {
    for (int rank = 0; rank < n_ranks; ++rank) {
      if (rank == plan.victim && !is_victim_waited_for) continue;
      if (!std::filesystem::exists(plan.folder + "/" + std::to_string(rank))) return false;
    }
    return true;
  };
  wait_until(have_all_reported, seconds(60));
}

void note_fault(const Plan& plan) { write_file(plan, "fault", std::to_string(now_ns())); }

/// Waits until the victim has exited or is stopped: its process, if the file with its pid exists.
void wait_for_fault(const Plan& plan) {
  const auto has_come = [&] {
    const Room room;
    pid_t pid = 0;
    std::ifstream(plan.folder + "/pid") >> pid;
    return std::filesystem::exists(plan.folder + "/fault") &&
           (pid == 0 || std::strchr("TZX", lockstep::test::thread_state(pid)) != nullptr);
  };
  wait_until(has_come, seconds(60));
}

void end_this_process(const Plan& plan) {
  write_file(plan, "pid", std::to_string(::getpid()));
  note_fault(plan);
  if (plan.fault == "kill") ::raise(SIGKILL);
  if (plan.fault == "stop") ::kill(::getpid(), SIGSTOP);
  if (plan.fault != "exit") return;
  // exit() with another thread in a call would have MPI_Finalize wait for that call.
  if (plan.place == "in") ::_exit(0);
  std::exit(0);
}

/// Ends or stops this process n_steps() instructions from here, wherever its thread is then:
/// another process traces it to there.
void end_by_steps(const Plan& plan) {
  const pid_t rank = ::getpid();
  const pid_t thread = ::gettid();
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
  int ready[2];
  if (::pipe(ready) != 0) std::abort();
  if (::fork() == 0) {
    const auto traced = [thread](auto request, std::intptr_t value) {
      if (::ptrace(request, thread, nullptr, value) != 0) std::_Exit(1);
    };
    traced(PTRACE_SEIZE, 0);
    if (::write(ready[1], "", 1) != 1) std::_Exit(1);
    int status = 0;
    ::waitpid(thread, &status, __WALL);  // at its SIGUSR2
    for (int i = 0; i < plan.n_steps(); ++i) {
      traced(PTRACE_SINGLESTEP, 0);
      if (::waitpid(thread, &status, __WALL) != thread || !WIFSTOPPED(status)) std::_Exit(1);
    }
    note_fault(plan);
    if (plan.fault == "kill") ::kill(rank, SIGKILL);
    ::syscall(SYS_tgkill, rank, thread, SIGSTOP);
    ::ptrace(PTRACE_DETACH, thread, nullptr, nullptr);
    std::_Exit(0);
  }
  ::close(ready[1]);
  char byte = 0;
  if (::read(ready[0], &byte, 1) != 1) std::abort();  // it may not trace this process
  ::syscall(SYS_tgkill, rank, thread, SIGUSR2);
}

/// Three mistakes, which this rank's own arguments show.
void refuse_calls() {
  const lockstep::Group group = lockstep::default_group();
  double value = 0;
  const lockstep::Elements one{&value, 1, lockstep::DType::f64};
  const auto expect_refusal = [](const auto& call) {
    try {
      call();
    } catch (const lockstep::UsageError&) {
      return;
    }
    std::abort();
  };
  expect_refusal([&] { group.broadcast(one, group.size()); });
  expect_refusal([&] { group.all_reduce({nullptr, 1, lockstep::DType::f64}); });
  expect_refusal([&] { group.all_gather(one, one); });
}

/// Calls that allocate, of which lockstep's nth allocation fails; 0: none does. They fail in one
/// group alone: after a failure behind the last message of a call the victim's next call would be
/// in another group than that of the others, who could only wait for their limit.
void allocate_in_calls(int nth) {
  const struct Disarm {
    ~Disarm() { lockstep::test::fail_allocation(0); }
  } disarm;
  const std::string text(100, 'x');
  std::array<double, 4> parts{1, 1, 1, 1};
  lockstep::test::fail_allocation(nth);
  for (int i = 0; i < 3; ++i) {
    const lockstep::Group group = lockstep::default_group();
    {
      const lockstep::Group part = group.split(0);
      const int left = lockstep::test::fail_allocation(0);
      part.barrier();
      lockstep::test::fail_allocation(left);
    }
    static_cast<void>(lockstep::all_gather_object(text));
    static_cast<void>(lockstep::all_gather(std::span<const double>(parts)));
    static_cast<void>(group.allocate(1000));
    lockstep::all_reduce(std::span(parts));
  }
}

/// That operation, of all the data where its ranks have data of one size.
void call(const std::string& operation, std::vector<double>& data) {
  const lockstep::Group group = lockstep::default_group();
  const auto n = static_cast<std::size_t>(group.size());
  const std::size_t count = data.size();
  std::vector<double> larger(n * count);
  const lockstep::Elements whole{data.data(), count, lockstep::DType::f64};
  const lockstep::Elements all{larger.data(), n * count, lockstep::DType::f64};
  if (operation == "barrier") group.barrier();
  if (operation == "all_reduce") group.all_reduce(whole);
  if (operation == "reduce") group.reduce(whole);
  if (operation == "broadcast") group.broadcast(whole);
  if (operation == "all_gather") group.all_gather(whole, all);
  if (operation == "gather") group.gather(whole, all);
  if (operation == "scatter") group.scatter(all, whole);
  if (operation == "reduce_scatter") group.reduce_scatter(all, whole);
  if (operation == "all_to_all") {
    std::vector<double> other(n * count);
    group.all_to_all({other.data(), n * count, lockstep::DType::f64}, all);
  }
  if (operation == "split") static_cast<void>(group.split(0));
  if (operation == "allocate") static_cast<void>(group.allocate(count * sizeof(double)));
}

/// What the victim does where the others make one plain call; returns whether it made it already.
bool misbehave(const Plan& plan, std::vector<double>& data, lockstep::Timeout timeout,
               bool is_thread) {
  const lockstep::Group group = lockstep::default_group();
  const auto whole = std::span(data);
  if (plan.n_steps() != 0) {
    end_by_steps(plan);
    return false;
  }
  if (plan.is_any({"kill", "stop", "exit"})) {
    if (is_thread) {  // of which only `exit` exists
      note_fault(plan);
      lockstep::destroy_dist();
      return true;
    }
    if (plan.place != "in") end_this_process(plan);
    // From another thread, while this one waits in the call for the rank that comes late to it.
    std::thread([plan, caller = ::gettid()] {
      // MPI waits without sleep. The outcome is the same if the call has not begun yet.
      const auto is_asleep = [caller] {
        const Room room;
        return lockstep::test::is_asleep(caller);
      };
      wait_until(is_asleep, milliseconds(100));
      end_this_process(plan);
    }).detach();
    return false;
  }
  if (plan.fault == "exception") {
    lockstep::Work work;
    if (plan.place == "in") {  // with a call under way on the group's own thread
      work = group.all_reduce_async({data.data(), data.size(), lockstep::DType::f64});
    }
    note_fault(plan);
    throw std::runtime_error("no more sheets");
  }
  if (plan.fault == "slow") {
    note_fault(plan);
    wait_for_reports(plan, group.size(),
                     /*is_victim_waited_for=*/false);  // and comes when the others have given up
    return false;
  }
  if (plan.fault == "limit") lockstep::test::rank_loads::limit_address_space(8U << 20U);
  // Of this machine, which is a network namespace of the campaign's; elsewhere there is no such
  // link.
  if (plan.fault == "cut" && std::system("ip link set cable down") != 0) std::abort();
  note_fault(plan);
  if (plan.is_any({"limit", "container", "cut", "alike"}) || plan.n_memory() != 0) {
    return false;
  }
  if (plan.fault == "refuse") {
    refuse_calls();
    return false;
  }
  if (plan.fault == "missing") return true;
  if (const auto colon = plan.fault.find(':'); colon != std::string::npos) {
    call(plan.fault.substr(0, colon), data);
  }
  if (plan.fault == "op") {
    lockstep::broadcast(whole, 0, group, timeout);
  } else if (plan.fault == "count") {
    lockstep::all_reduce(whole.first(data.size() - 1), lockstep::ReduceOp::sum, group, timeout);
  } else if (plan.fault == "type") {
    group.all_reduce({data.data(), data.size(), lockstep::DType::i64}, lockstep::ReduceOp::sum,
                     timeout);
  } else if (plan.fault == "root") {
    lockstep::broadcast(whole, 1, group, timeout);
  }
  return true;
}

void run_calls(const Plan& plan, bool is_thread) {
  const lockstep::Group group = lockstep::default_group();
  const bool is_victim = group.rank() == plan.victim;
  // Whoever throws leaves its buffers behind, and a call may still be under way on them.
  auto& data = *new std::vector<double>(plan.place == "in" ? 1U << 18U : 4, 1.0);
  if (plan.place != "before") {
    for (int i = 0; i < 5; ++i) {
      lockstep::all_reduce(data);
      lockstep::broadcast(data);
      lockstep::barrier();
    }
  }
  lockstep::Timeout timeout;
  if (plan.is_any({"slow", "stop", "cut"})) timeout = kDeadline;
  if (plan.fault == "alike") refuse_calls();
  const bool is_done = is_victim && misbehave(plan, data, timeout, is_thread);
  const bool is_next = group.rank() == (plan.victim + 1) % group.size();
  if (plan.is_any({"kill", "stop", "exit"}) && plan.place == "in" && is_next) wait_for_fault(plan);
  // All ranks share the container's memory: whoever asks first fails.
  if (plan.fault == "container" && !is_victim) wait_for_fault(plan);
  if (is_done && plan.fault == "exit") return;
  if (!is_done) {
    if (const auto colon = plan.fault.find(':'); colon != std::string::npos) {
      call(plan.fault.substr(colon + 1), data);
    } else if (plan.is_any({"limit", "container"})) {
      static_cast<void>(group.allocate(plan.fault == "limit" ? 64U << 20U : 1U << 30U));
    } else if (plan.fault == "root") {
      lockstep::broadcast(data, 0, group, timeout);
    } else if (plan.n_memory() != 0) {
      allocate_in_calls(is_victim ? plan.n_memory() : 0);
    } else if (plan.n_steps() != 0) {
      for (;;) lockstep::all_reduce(data, lockstep::ReduceOp::sum, group, timeout);
    } else {
      lockstep::all_reduce(data, lockstep::ReduceOp::sum, group, timeout);
    }
  }
  lockstep::barrier(group, timeout);
}

/// Runs it and reports; only what the plan has the victim throw comes out.
template <class Run>
int be_rank(const Plan& plan, int rank, int n_ranks, const Run& run) {
  std::string error = "none";
  std::string text;
  try {
    run();
  } catch (const lockstep::Error& e) {
    text = e.text();
    error = dynamic_cast<const lockstep::MismatchError*>(&e)  ? "MismatchError"
            : dynamic_cast<const lockstep::TimeoutError*>(&e) ? "TimeoutError"
            : dynamic_cast<const lockstep::PeerLost*>(&e)     ? "PeerLost"
            : dynamic_cast<const lockstep::PeerFailed*>(&e)   ? "PeerFailed"
            : dynamic_cast<const lockstep::SystemError*>(&e)  ? "SystemError"
            : dynamic_cast<const lockstep::EngineError*>(&e)  ? "EngineError"
                                                              : "UsageError";
  } catch (const std::bad_alloc&) {
    error = "bad_alloc";
  }
  if (plan.n_memory() != 0 && error != "none") {
    try {
      lockstep::barrier();  // the program goes on
    } catch (const std::exception&) {
    }
  }
  report(plan, rank, error, text);
  wait_for_reports(plan, n_ranks, !plan.is_any({"kill", "stop", "exit", "exception"}));
  return 1;
}

/// As its rank of the world.
int be_rank(const Plan& plan, bool is_thread) {
  if (is_thread && plan.fault == "exit" && lockstep::get_rank() == plan.victim) {
    run_calls(plan, is_thread);
    return 0;
  }
  return be_rank(plan, lockstep::get_rank(), lockstep::get_world_size(),
                 [&] { run_calls(plan, is_thread); });
}

/// What the launcher says, before there is a world.
int launchers_number(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const char* const text = std::getenv(name)) return std::atoi(text);
  }
  std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) return 64;
  const Plan plan{argv[1], argv[2], argv[3], std::atoi(argv[4]), argv[5]};
  if (argc > 6) {
    lockstep::run_ranks(std::atoi(argv[6]), [&](int) { be_rank(plan, /*is_thread=*/true); });
    return 0;
  }
  lockstep::test::rank_loads::apply_before_init();
  const lockstep::InitOptions options{.backend = plan.backend, .timeout = seconds(60)};
  if (plan.fault == "join") {
    const int rank = launchers_number({"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"});
    if (rank == plan.victim) {
      note_fault(plan);
      ::setenv("LOCKSTEP_TRACE", "/proc", 1);  // no files are made there
    }
    std::signal(SIGTERM, SIG_IGN);
    return be_rank(plan, rank, launchers_number({"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}),
                   [&] {
                     lockstep::init_dist(options);
                     lockstep::barrier();
                   });
  }
  lockstep::init_dist(options);
  // A launcher that ends the others must not end them before they have reported their errors.
  if (lockstep::get_rank() != plan.victim) std::signal(SIGTERM, SIG_IGN);
  // Once one has returned from init_dist, another's may still be under way, and end with the fault.
  write_file(plan, "joined" + std::to_string(lockstep::get_rank()), "");
  const auto have_all_joined = [&] {
    for (int rank = 0; rank < lockstep::get_world_size(); ++rank) {
      if (!std::filesystem::exists(plan.folder + "/joined" + std::to_string(rank))) return false;
    }
    return true;
  };
  wait_until(have_all_joined, seconds(60));
  if (lockstep::test::rank_loads::waits_for_go()) {
    wait_until([&] { return std::filesystem::exists(plan.folder + "/go"); }, seconds(60));
  }
  lockstep::test::rank_loads::apply();
  return be_rank(plan, /*is_thread=*/false);
}
