// A program that goes on after lost ranks.
//   elastic steps MODE PLACES   the processes of PLACES (as 1,2) end in their third step, unless
//                               they are replacements: MODE is kill, exit, throw, stop or finish.
//                               The others go on until the world is full again, or alone: `finish`
//   elastic until FILE          steps until FILE is there, however many ranks are lost and return
//   elastic soak N FILE         all but one end again and again, at random times and in random
//                               ways, two at once among them, until N have; fails if the memory or
//                               the descriptors of that one or of the launcher grow. FILE holds
//                               what the processes share
//   elastic soak N FILE stop    some of them stop, and the limit is a second
//   elastic group               a group of the first generation is used in the second
//   elastic linger FILE         the process of place 1 is lost, and its replacement makes FILE but
//                               does not join; the others wait for FILE, regroup again, and wait
//   elastic boundary            all ranks regroup without a loss
//   elastic fork                a fork of a rank asks for the next generation
//   elastic refused             ranks go on after a regroup() that failed
//   elastic newcomers HOW       the first process of place 1 is lost, and three replacements of it:
//                               HOW is fail (each ends when it has joined) or unfit (the others
//                               have changed their rounding, which a replacement has not)
//   elastic hang FILE           the same, but the first replacement makes FILE and does not join
//   elastic end [finish]        at the end rank 2 is killed, and rank 0 works alone for longer than
//                               the limit; `finish`: they have told the launcher that they are done
//   elastic left                a rank that has left the world works on while the others regroup
//   elastic outside             regroup without --elastic
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <lockstep/elastic.hpp>
#include <lockstep/lockstep.hpp>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "world/session.hpp"

namespace {

using std::chrono::milliseconds;

bool is_replacement() {
  return std::string_view(std::getenv("LOCKSTEP_SEGMENT")).ends_with(":next");
}

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

void say_error(const lockstep::Error& error) { say(error.what()); }

/// Joins the next generation, whatever is lost meanwhile. Rank 0 is a survivor: its step is right.
void go_on(int& step, milliseconds limit = milliseconds(60'000)) {
  while (true) {
    try {
      const lockstep::Regrouped world = lockstep::regroup(limit);
      std::string lost;
      for (const lockstep::LostRank& rank : world.lost) {
        lost += fmt::format(" {}.{} {};", rank.generation, rank.rank, rank.why);
      }
      lockstep::broadcast(std::span(&step, 1));
      say(fmt::format("generation {}: rank {} of {}, lost:{} joined: {}", world.generation,
                      world.rank, world.size, lost, fmt::join(world.joined, " ")));
      return;
    } catch (const lockstep::PeerLost&) {
    } catch (const lockstep::PeerFailed&) {
    }
  }
}

void end_as(const std::string& mode) {
  if (mode == "kill") std::raise(SIGKILL);
  if (mode == "stop") std::raise(SIGSTOP);
  if (mode == "exit") std::_Exit(3);
  if (mode == "throw") throw std::runtime_error("no more paper");
  if (mode == "finish") std::exit(0);
}

void steps(const std::string& mode, const std::string& places) {
  const int place = std::atoi(std::getenv("RANK"));
  const int n_places = std::atoi(std::getenv("WORLD_SIZE"));
  const bool is_victim = !is_replacement() &&
                         ("," + places + ",").find(fmt::format(",{},", place)) != std::string::npos;
  const milliseconds limit(mode == "stop" ? 2000 : 60'000);
  lockstep::init_dist({.timeout = limit / 4});
  int step = 0;
  if (is_replacement()) lockstep::broadcast(std::span(&step, 1));
  const auto is_done = [&] {
    if (mode == "finish") return step >= 6;
    return step > 3 && lockstep::get_world_size() == n_places;
  };
  while (!is_done()) {
    try {
      if (is_victim && step == 3) end_as(mode);
      const int n = lockstep::get_world_size();
      const int sum = lockstep::all_reduce_value(lockstep::get_rank() + 1);
      if (sum != n * (n + 1) / 2) throw std::logic_error("a wrong sum");
      const int waits = lockstep::all_reduce_value(lockstep::has_waiting_replacements() ? 1 : 0,
                                                   lockstep::ReduceOp::max);
      ++step;
      lockstep::step_done();
      if (waits != 0) go_on(step, limit);
    } catch (const lockstep::PeerLost&) {
      go_on(step, limit);
    } catch (const lockstep::PeerFailed&) {
      go_on(step, limit);
    } catch (const lockstep::TimeoutError&) {
      go_on(step, limit);
    }
  }
  say(fmt::format("rank {} of {} is done", lockstep::get_rank(), lockstep::get_world_size()));
  if (mode != "finish") lockstep::barrier();
}

std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

void until(const std::string& file) {
  lockstep::init_dist({.timeout = milliseconds(20'000)});
  int step = 0;
  if (is_replacement()) lockstep::broadcast(std::span(&step, 1));
  for (bool is_done = false; !is_done;) {
    try {
      const int n = lockstep::get_world_size();
      std::vector<int> sums(1000, lockstep::get_rank() + step);
      lockstep::all_reduce(std::span(sums));
      for (const int sum : sums) {
        if (sum != n * (n - 1) / 2 + n * step) throw std::logic_error("a wrong sum");
      }
      std::array<int, 2> flags{lockstep::has_waiting_replacements() ? 1 : 0,
                               std::filesystem::exists(file) ? 1 : 0};
      lockstep::all_reduce(std::span(flags), lockstep::ReduceOp::max);
      ++step;
      lockstep::step_done();
      if (step % 20 == 0) say(fmt::format("step {} of {} ranks", step, n));
      is_done = flags[1] != 0;
      if (flags[0] != 0 && !is_done) go_on(step);
    } catch (const lockstep::Error& error) {
      say(fmt::format("step {} ended at {}: {}", step, now_ns(), error.what()));
      go_on(step);
    }
    std::this_thread::sleep_for(milliseconds(5));
  }
  say(fmt::format("rank {} of {} is done after step {}", lockstep::get_rank(),
                  lockstep::get_world_size(), step));
  lockstep::internal::finish_elastic();
}

/// What all processes of a soak share.
struct Shared {
  std::atomic<std::int64_t> last_death;
  std::array<std::atomic<pid_t>, 64> process_of;  ///< of each place
};

Shared& shared_in(const char* file) {
  const int fd = ::open(file, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ::ftruncate(fd, 4096) != 0) throw std::runtime_error("cannot open the file");
  void* const page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  return *static_cast<Shared*>(page);
}

/// Ends this process at a random time, unless it is disarmed before.
class Fate {
 public:
  Fate(Shared& shared, std::size_t place, bool may_stop) {
    shared.process_of.at(place) = ::getpid();
    std::thread([this, &shared, place, may_stop] {
      std::random_device random;
      // Longer than a stop takes: three generations in a row without a step would end the job.
      std::this_thread::sleep_for(milliseconds(random() % (may_stop ? 4000 : 150)));
      const std::lock_guard lock(mutex_);
      if (is_disarmed_) return;
      if (may_stop && random() % 8 == 0) std::raise(SIGSTOP);
      shared.process_of[place] = 0;  // before another process has this number
      shared.last_death.store(now_ns());
      const unsigned how = random() % 6;
      if (how == 0) std::_Exit(3);
      if (how == 1) std::raise(SIGSEGV);
      if (how == 2) throw std::runtime_error("a rank that cannot go on");
      for (std::size_t other = 0; how == 3 && other < shared.process_of.size(); ++other) {
        const pid_t pid = shared.process_of[other].exchange(0);
        if (pid == 0) continue;
        ::kill(pid, SIGKILL);
        break;
      }
      ::kill(::getpid(), SIGKILL);
    }).detach();
  }
  void disarm() {
    const std::lock_guard lock(mutex_);
    is_disarmed_ = true;
  }

 private:
  std::mutex mutex_;
  bool is_disarmed_ = false;
};

std::string distribution(const char* name, std::vector<double> ms) {
  if (ms.empty()) return "";
  std::ranges::sort(ms);
  return fmt::format("{}: {} times, median {:.2f} ms, 99 % {:.2f} ms, longest {:.2f} ms\n", name,
                     ms.size(), ms[ms.size() / 2], ms[ms.size() * 99 / 100], ms.back());
}

/// Of this process and of the launcher.
struct Usage {
  std::array<long, 2> memory_kib{}, n_files{};

  Usage() {
    for (const std::size_t i : {0U, 1U}) {
      const std::string process = fmt::format("/proc/{}/", i == 0 ? ::getpid() : ::getppid());
      std::ifstream statm(process + "statm");
      statm >> memory_kib[i] >> memory_kib[i];
      memory_kib[i] *= ::sysconf(_SC_PAGESIZE) / 1024;
      const std::filesystem::directory_iterator files(process + "fd");
      n_files[i] = std::distance(begin(files), end(files));
    }
  }
};

int soak(std::size_t n_deaths, const char* file, bool may_stop) {
  constexpr std::size_t kDeathsBefore = 100;  // memory and descriptors may grow until then
  const auto place = static_cast<std::size_t>(std::atoi(std::getenv("RANK")));
  const bool survives = place == 0;
  Shared& shared = shared_in(file);
  static std::optional<Fate> fate;
  if (!survives) fate.emplace(shared, place, may_stop);
  std::vector<double> to_error, to_sum;
  std::size_t n_lost = 0;
  std::optional<Usage> before;
  lockstep::init_dist({.timeout = may_stop ? milliseconds(1000) : milliseconds(60'000)});
  const auto add_up = [&] {
    const int n = lockstep::get_world_size();
    if (lockstep::all_reduce_value(lockstep::get_rank() + 1) != n * (n + 1) / 2) {
      throw std::logic_error("a wrong sum");
    }
  };
  const auto join_next = [&] {
    n_lost += lockstep::regroup().lost.size();
    if (!before && n_lost >= kDeathsBefore) before.emplace();
  };
  enum class Next { regroup, enter, take_steps };
  enum Wish { none, let_in, end };  // the largest is everybody's
  Next next = is_replacement() ? Next::enter : Next::take_steps;
  bool is_disarmed = false;
  while (true) {
    try {
      const std::int64_t begin = now_ns();
      if (next == Next::regroup) join_next();
      lockstep::step_done();  // of so many deaths, three may come before a step of the program
      if (next != Next::take_steps) {  // the same calls, whatever brought each rank here
        next = Next::regroup;
        const auto last = lockstep::all_reduce_value(begin, lockstep::ReduceOp::max);
        add_up();
        to_sum.push_back(static_cast<double>(now_ns() - last) / 1e6);
        next = Next::take_steps;
      }
      while (true) {
        add_up();
        int wish = lockstep::has_waiting_replacements() ? let_in : none;
        if (survives && n_lost >= n_deaths) wish = end;
        wish = lockstep::all_reduce_value(wish, lockstep::ReduceOp::max);
        lockstep::step_done();
        if (wish == let_in) next = Next::regroup;
        if (wish != none) break;
      }
      if (next == Next::regroup) continue;
      if (fate && !is_disarmed) fate->disarm();
      is_disarmed = true;
      lockstep::barrier();
      break;
    } catch (const lockstep::PeerLost&) {
      if (next == Next::take_steps) {
        to_error.push_back(static_cast<double>(now_ns() - shared.last_death.load()) / 1e6);
      }
      next = Next::regroup;
    } catch (const lockstep::PeerFailed&) {
      next = Next::regroup;
    } catch (const lockstep::TimeoutError&) {
      next = Next::regroup;
    }
  }
  if (!survives) return 0;
  say(fmt::format("{} deaths\n", n_lost) + distribution("death to error", to_error) +
      distribution("request to sum", to_sum));
  if (!before) return 0;
  const Usage after;
  bool grows = false;
  for (const std::size_t i : {0U, 1U}) {
    say(fmt::format("{}: {} KiB, {} KiB after {} deaths; {} descriptors, {} after {}",
                    i == 0 ? "a survivor" : "the launcher", after.memory_kib[i],
                    before->memory_kib[i], kDeathsBefore, after.n_files[i], before->n_files[i],
                    kDeathsBefore));
    // Descriptors of processes that have just ended come and go.
    grows |= after.memory_kib[i] > before->memory_kib[i] + 2048 ||
             after.n_files[i] > before->n_files[i] + 16;
  }
  return grows ? 1 : 0;
}

void use_old_group() {
  lockstep::init_dist();
  const lockstep::Group world = lockstep::default_group();
  const lockstep::Group pair = world.duplicate();
  int step = 0;
  go_on(step);
  for (const lockstep::Group& group : {world, pair}) {
    try {
      group.barrier();
    } catch (const lockstep::PeerLost& error) {
      say_error(error);
    }
  }
  lockstep::barrier();
}

[[noreturn]] void stay() {
  while (true) ::pause();
}

void linger(const char* file) {
  if (is_replacement()) {
    say(fmt::format("the replacement is pid {}.", ::getpid()));
    ::close(::open(file, O_RDWR | O_CREAT, 0600));
    stay();
  }
  const bool is_victim = std::atoi(std::getenv("RANK")) == 1;
  lockstep::init_dist();
  if (is_victim) std::raise(SIGKILL);
  int step = 0;
  try {
    lockstep::barrier();
  } catch (const lockstep::PeerLost&) {
    go_on(step);
  }
  while (!std::filesystem::exists(file)) std::this_thread::sleep_for(milliseconds(1));
  go_on(step);
  say("lingers");
  if (lockstep::get_rank() == 1) stay();
  lockstep::barrier();
}

/// Takes steps until so many ranks were lost, the first of them the first process of place 1.
void take_steps(
    std::size_t n_losses, const std::function<void()>& before_step = [] {}) {
  const bool is_victim = !is_replacement() && std::getenv("RANK") == std::string("1");
  std::size_t n_lost = 0;
  enum Wish { none, let_in, end };  // the largest is everybody's
  for (int step = 0; true; ++step) {
    try {
      before_step();
      const bool is_full = lockstep::get_world_size() == std::atoi(std::getenv("WORLD_SIZE"));
      int wish = lockstep::has_waiting_replacements() ? let_in : none;
      if (n_lost >= n_losses && (n_losses > 1 || is_full)) wish = end;
      wish = lockstep::all_reduce_value(wish, lockstep::ReduceOp::max);
      lockstep::step_done();
      if (wish == end) break;
      if (is_victim && step == 3) std::raise(SIGKILL);
      if (wish == none) continue;
    } catch (const lockstep::PeerLost&) {
    } catch (const lockstep::PeerFailed&) {
    }
    n_lost += lockstep::regroup().lost.size();
  }
  lockstep::barrier();
}

void meet_newcomers(const std::string& how) {
  lockstep::init_dist();
  if (is_replacement()) std::_Exit(7);
  take_steps(/*n_losses=*/4, [&] {
    if (how == "unfit") std::fesetround(FE_UPWARD);
  });
  say("done");
}

void replace_a_hanging_process(const char* file) {
  if (is_replacement() && !std::filesystem::exists(file)) {
    std::ofstream(file) << "hangs";
    stay();
  }
  lockstep::init_dist();
  take_steps(/*n_losses=*/1);
  say("done");
}

void work_after_the_end(bool finishes) {
  lockstep::init_dist({.timeout = milliseconds(500)});
  lockstep::barrier();
  lockstep::step_done();
  lockstep::barrier();
  if (finishes) lockstep::internal::finish_elastic();
  if (std::getenv("RANK") == std::string("2")) std::raise(SIGKILL);
  if (lockstep::get_rank() != 0) return;
  std::this_thread::sleep_for(milliseconds(3000));
  say("the work is done");
}

/// The first process of place 1 ends; the others see it.
void lose_place_1(bool is_killed = true) {
  lockstep::init_dist();
  if (std::getenv("RANK") == std::string("1")) {
    if (is_replacement()) std::_Exit(3);
    lockstep::barrier();
    if (!is_killed) std::_Exit(0);
    std::raise(SIGKILL);
  }
  lockstep::barrier();
  try {
    lockstep::barrier();
  } catch (const lockstep::PeerLost&) {
  }
}

void ask_from_fork() {
  lose_place_1();
  if (lockstep::get_rank() == 0) {
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        lockstep::destroy_dist();
        lockstep::init_dist();
        say("the fork is a rank");
      } catch (const lockstep::Error& error) {
        say_error(error);
      }
      std::_Exit(0);
    }
    ::waitpid(child, nullptr, 0);
  }
  int step = 0;
  go_on(step);
  lockstep::barrier();
}

void go_on_after_refusal() {
  lose_place_1(/*is_killed=*/false);  // it gets no replacement then
  try {
    lockstep::regroup();
  } catch (const lockstep::EngineError& error) {
    say_error(error);
  }
  try {
    lockstep::all_reduce_value(1);
    say("a world of one");
  } catch (const lockstep::UsageError& error) {
    say_error(error);
  }
  lockstep::destroy_dist();
  say(fmt::format("alone: {} rank", lockstep::get_world_size()));
}

void leave_and_work() {
  lockstep::init_dist({.timeout = milliseconds(500)});
  const int rank = lockstep::get_rank();
  if (is_replacement()) return;
  lockstep::barrier();
  if (rank == 0) {
    lockstep::destroy_dist();
    // Until the others have gone on without it, which they tell by ending.
    while (::getppid() > 1 && std::getenv("LEFT_FILE") != nullptr &&
           !std::filesystem::exists(std::getenv("LEFT_FILE"))) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    return say("the work is done");
  }
  if (rank == 1) std::raise(SIGKILL);
  int step = 0;
  go_on(step, milliseconds(2000));
  std::ofstream(std::getenv("LEFT_FILE")) << "done";
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argv[1];
  try {
    if (mode == "steps" && argc > 3) steps(argv[2], argv[3]);
    if (mode == "until" && argc > 2) until(argv[2]);
    if (mode == "soak" && argc > 3) {
      return soak(static_cast<std::size_t>(std::atoi(argv[2])), argv[3], argc > 4);
    }
    if (mode == "group") use_old_group();
    if (mode == "linger" && argc > 2) linger(argv[2]);
    if (mode == "fork") ask_from_fork();
    if (mode == "refused") go_on_after_refusal();
    if (mode == "left") leave_and_work();
    if (mode == "newcomers" && argc > 2) meet_newcomers(argv[2]);
    if (mode == "hang" && argc > 2) replace_a_hanging_process(argv[2]);
    if (mode == "end") work_after_the_end(argc > 2);
    if (mode == "boundary") {
      lockstep::init_dist();
      int step = lockstep::get_rank();
      for (int i = 0; i < 20; ++i) go_on(step);
    }
    if (mode == "outside") {
      lockstep::init_dist();
      lockstep::regroup();
    }
  } catch (const lockstep::Error& error) {
    say_error(error);
    return 1;
  }
}
