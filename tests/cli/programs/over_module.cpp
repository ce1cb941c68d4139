// A rank of ModuleTest: makes the fault that its first argument names, over the engine that
// LOCKSTEP_TEST_BACKEND or a third argument names, and says how its own calls ended in a file of
// its own, in the folder of the second argument: mpirun may lose what a rank prints just before it
// fails. mpirun also ends all ranks when the first fails, so each waits until all have left their
// file. "long" is no fault: messages past 2^31 bytes.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <lockstep/lockstep.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engines/mpi/mpi_abi.hpp"
#include "engines/shared/bootstrap/launcher_socket.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/ucx/ucx_abi.hpp"
#include "support/waiting.hpp"

namespace {

using lockstep::message::Message;

int n_said(const std::string& folder) {
  int n = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    n += file.path().extension() == ".said" ? 1 : 0;
  }
  return n;
}

void wait_until_said(const std::string& folder, int n_ranks) {
  lockstep::test::wait_until([&] { return n_said(folder) >= n_ranks; }, std::chrono::seconds(30));
}

/// Into a file that is whole, or not there.
void say(const std::string& folder, int rank, const std::string& text) {
  const std::string path = folder + "/" + std::to_string(rank);
  std::ofstream(path + ".part") << "rank " << rank << ": " << text << "\n";
  std::filesystem::rename(path + ".part", path + ".said");
}

/// What the launcher says: by the first of these variables that is set.
int number_of(std::initializer_list<const char*> variables) {
  for (const char* const variable : variables) {
    if (const char* const number = std::getenv(variable)) return std::atoi(number);
  }
  return 0;
}
int rank_by_launcher() { return number_of({"OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"}); }
int size_by_launcher() { return number_of({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"}); }

/// More bytes in one message than MPI's int counts.
constexpr std::size_t kLong = (std::size_t{1} << 31) + 5;

std::uint8_t byte_at(std::size_t i, int rank) {
  return static_cast<std::uint8_t>((i * 2654435761U >> 24) + static_cast<std::size_t>(rank) * 89);
}
void fill(std::span<std::uint8_t> data, int rank) {
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = byte_at(i, rank);
}
template <class Expected>
void expect(const char* what, std::span<const std::uint8_t> data, Expected expected) {
  for (std::size_t i = 0; i < data.size(); ++i) {
    if (data[i] == expected(i)) continue;
    throw std::runtime_error(std::string(what) + ": byte " + std::to_string(i) + " is " +
                             std::to_string(data[i]));
  }
  std::printf("%s of %zu bytes\n", what, data.size());
}

/// Two ranks, 6 GiB each.
void send_long_messages(int rank) {
  const auto bytes_of = [](int r) { return [r](std::size_t i) { return byte_at(i, r); }; };
  std::vector<std::uint8_t> mine(kLong);
  if (rank == 1) fill(mine, 1);
  lockstep::broadcast(mine, /*src=*/1);
  expect("broadcast", mine, bytes_of(1));

  if (rank == 0) fill(mine, 0);
  rank == 0 ? lockstep::send(mine, /*dst=*/1) : lockstep::recv(mine, /*src=*/0);
  if (rank == 1) expect("recv", mine, bytes_of(0));

  fill(mine, rank);
  {
    std::vector<std::uint8_t> all(2 * kLong);
    lockstep::all_gather(mine, all);
    expect("all_gather, rank 0's", std::span(all).first(kLong), bytes_of(0));
    expect("all_gather, rank 1's", std::span(all).last(kLong), bytes_of(1));
  }
  lockstep::all_reduce(mine);
  expect("all_reduce", mine,
         [](std::size_t i) { return static_cast<std::uint8_t>(byte_at(i, 0) + byte_at(i, 1)); });
}

void require(bool holds, const char* text) {
  if (!holds) throw std::runtime_error(text);
}

/// The module itself, and its group of all ranks.
struct Started {
  const LockstepTransport& module;
  int rank = 0;
  void* group = nullptr;
};

template <class Module>
const Module& load(const char* variable, const char* symbol) {
  void* const library = ::dlopen(std::getenv(variable), RTLD_NOW | RTLD_GLOBAL);
  require(library != nullptr, "cannot load the module");
  return *reinterpret_cast<const Module* (*)()>(::dlsym(library, symbol))();
}

Started start_mpi() {
  const auto& mpi = load<LockstepMpi>("LOCKSTEP_MPI", kLockstepMpiSymbol);
  Started started{mpi.transport};
  int n_ranks = 0;
  std::int32_t last_number = 0;
  require(mpi.start(&started.rank, &n_ranks) == 0 &&
              mpi.world(/*number=*/1, &started.group, &last_number) == 0,
          "cannot start MPI");
  return started;
}

Started start_ucx() {
  const auto& ucx = load<LockstepUcx>("LOCKSTEP_UCX", kLockstepUcxSymbol);
  require(ucx.start("^sm,self") == 0, "cannot start UCX");
  Started started{ucx.transport, rank_by_launcher()};
  std::array<void*, 2> workers{};
  std::array<LockstepUcxAddress, 2> own{};
  for (const std::size_t i : {0U, 1U}) {
    require(ucx.open(&workers[i]) == 0 && ucx.address(workers[i], &own[i]) == 0,
            "cannot start UCX");
  }
  const int size = size_by_launcher();
  lockstep::Call barrier;
  barrier.timeout = std::chrono::seconds(30);
  const auto all = lockstep::shared::exchange_addresses(
      lockstep::shared::launcher_socket(std::getenv("LOCKSTEP_SEGMENT")), started.rank, size,
      /*world=*/0, std::string(reinterpret_cast<const char*>(own.data()), sizeof own), barrier);
  std::array<std::vector<LockstepUcxAddress>, 2> addresses;
  for (const std::string& bytes : all.by_rank) {
    std::array<LockstepUcxAddress, 2> given{};
    bytes.copy(reinterpret_cast<char*>(given.data()), sizeof given);
    for (const std::size_t i : {0U, 1U}) addresses[i].push_back(given[i]);
  }
  require(ucx.world(workers[0], workers[1], addresses[0].data(), addresses[1].data(),
                    all.by_rank.size(), started.rank, all.key, /*number=*/1, &started.group) == 0,
          "cannot make the group");
  return started;
}

Started start_module() {
  return std::getenv("LOCKSTEP_UCX") != nullptr ? start_ucx() : start_mpi();
}

/// On the module itself: rank 0 ends an exchange before rank 1 sends what it was to receive, in two
/// messages, one short and one long. They must not come into the memory of that exchange, but into
/// that of the next.
void end_an_exchange_of_receives() {
  const Started started = start_module();
  const LockstepTransport& module = started.module;
  const int rank = started.rank, peer = 1 - rank;

  constexpr std::size_t kShort = 1000;
  constexpr std::size_t kLongEnough = std::size_t{4} << 20;  // waits for its receive
  constexpr std::uint8_t kUntouched = 7, kSent = 9;
  const auto exchange_of = [&](Message::Direction way, std::vector<std::uint8_t>& data) {
    return std::array{Message{way, peer, data.data(), kShort},
                      Message{way, peer, data.data() + kShort, data.size() - kShort}};
  };
  const auto begin = [&](const std::array<Message, 2>& messages) {
    void* exchange = nullptr;
    require(module.begin(started.group, messages.data(), messages.size(), &exchange) == 0,
            "begin failed");
    return exchange;
  };
  const auto is_done = [&](void* exchange) {
    std::int32_t done = 0;
    std::array<char, 256> text{};
    const int code = module.test(exchange, 1, &done);
    if (code != 0) module.error_text(code, text.data(), text.size());
    require(code == 0, text.data());
    return done != 0;
  };
  const char message = '!';
  const auto send_control = [&] {
    require(module.send_control(started.group, peer, &message, 1) == 0, "send_control failed");
  };
  const auto receive_control = [&] {
    require(lockstep::test::wait_until([&] {
              char received = 0;
              std::int32_t has_arrived = 0;
              require(module.poll_control(started.group, &received, 1, &has_arrived) == 0,
                      "poll_control failed");
              return has_arrived != 0;
            }),
            "no control message came");
  };

  std::vector<std::uint8_t> data(kShort + kLongEnough, rank == 0 ? kUntouched : kSent);
  if (rank == 1) {
    receive_control();
    const auto messages = exchange_of(Message::Direction::send, data);
    void* const exchange = begin(messages);
    send_control();
    require(lockstep::test::wait_until([&] { return is_done(exchange); }), "sends never ended");
    return;
  }
  const auto ended = exchange_of(Message::Direction::receive, data);
  void* const exchange = begin(ended);
  require(!is_done(exchange), "received a message that was never sent");
  module.finish(exchange);
  send_control();
  receive_control();
  std::vector<std::uint8_t> later(data.size());
  const auto messages = exchange_of(Message::Direction::receive, later);
  void* const next = begin(messages);
  const auto holds = [](const std::vector<std::uint8_t>& bytes, std::uint8_t value) {
    return std::ranges::all_of(bytes, [=](std::uint8_t byte) { return byte == value; });
  };
  const bool came = lockstep::test::wait_until(
      [&] { return is_done(next) || !holds(data, kUntouched); }, std::chrono::seconds(30));
  require(holds(data, kUntouched), "a receive of an exchange that has ended wrote its memory");
  require(came && holds(later, kSent), "the messages did not come to the next exchange");
}

/// On the module itself: rank 1 stops in the middle of a message, and goes on when rank 0 has ended
/// the exchange that receives it. MPI cannot cancel that, and must not write there any more.
void end_an_exchange_in_the_middle(const std::string& folder) {
  enum Said { kHasBegun, kHasEnded, kHasGoneOn, kHasLooked, kIsAlone };
  const Started started = start_module();
  const LockstepTransport& module = started.module;
  const int rank = started.rank;
  constexpr std::uint8_t kUntouched = 7, kSent = 9;
  std::vector<std::uint8_t> data(std::size_t{256} << 20, rank == 0 ? kUntouched : kSent);
  const Message message{rank == 0 ? Message::Direction::receive : Message::Direction::send,
                        1 - rank, data.data(), data.size()};
  void* exchange = nullptr;
  std::int32_t done = 0;
  require(module.begin(started.group, &message, 1, &exchange) == 0, "begin failed");
  const auto test_until = [&](const std::function<bool()>& condition) {
    lockstep::test::wait_until(
        [&] { return module.test(exchange, 1, &done) != 0 || done != 0 || condition(); },
        std::chrono::seconds(30));
  };
  if (rank == 1) {
    test_until([&] { return n_said(folder) > kHasBegun; });
    wait_until_said(folder, kHasEnded + 1);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(3);
    test_until([&] { return std::chrono::steady_clock::now() > end; });
    say(folder, kHasGoneOn, "rank 1");
    return wait_until_said(folder, kIsAlone + 1);
  }
  test_until([&] { return data.front() == kSent; });
  say(folder, kHasBegun, "rank 0");
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
  test_until([&] { return std::chrono::steady_clock::now() > end; });
  require(done == 0, "the message came although its sender has stopped");
  module.finish(exchange);
  const std::vector<std::uint8_t> before = data;
  require(before.front() == kSent && before.back() == kUntouched, "it is not in the middle");
  say(folder, kHasEnded, "rank 0");
  int code = 0;
  lockstep::test::wait_until(
      [&] {
        char control = 0;
        std::int32_t has_arrived = 0;
        code = module.poll_control(started.group, &control, 1, &has_arrived);
        return n_said(folder) > kHasGoneOn;
      },
      std::chrono::seconds(30));
  say(folder, kHasLooked, "rank 0");
  require(data == before, "a receive of an exchange that has ended wrote its memory");
  std::array<char, 256> text{};
  module.error_text(code, text.data(), text.size());
  // MPI must not be called any more; UCX has workers.
  require((std::getenv("LOCKSTEP_UCX") != nullptr) ||
              (code != 0 &&
               std::string(text.data()).find("in the middle of a message") != std::string::npos),
          "MPI is still called");
  say(folder, kIsAlone, "left the memory alone");
}

/// As a program that initialises MPI itself. The levels have these values in every MPI here.
enum ThreadLevel { kSingle, kFunneled, kSerialized };
void init_mpi(ThreadLevel level) {
  require(::dlopen(std::getenv("LOCKSTEP_MPI"), RTLD_NOW | RTLD_GLOBAL) != nullptr,
          "cannot load the module");
  const auto init =
      reinterpret_cast<int (*)(int*, char***, int, int*)>(::dlsym(RTLD_DEFAULT, "MPI_Init_thread"));
  int granted = -1;
  require(init != nullptr && init(nullptr, nullptr, level, &granted) == 0,
          "MPI_Init_thread failed");
  require(granted == level, "MPI grants another level");
}

template <class E, class F>
void require_error(F call, const std::string& part) {
  try {
    call();
  } catch (const E& error) {
    const std::string text = error.what();
    if (text.find(part) != std::string::npos) return;
    throw std::runtime_error("'" + text + "' lacks: " + part);
  }
  throw std::runtime_error("no error: " + part);
}

void on_another_thread(const std::function<void()>& body) {
  std::exception_ptr error;
  std::thread([&] {
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

/// MPI initialised by the program, with this level.
void call_from_threads(ThreadLevel level, const std::string& name) {
  using lockstep::UsageError;
  init_mpi(level);
  const std::string reason = "MPI was initialised with " + name + ": only the thread that did so";
  if (level != kSerialized) {
    require_error<UsageError>(
        [] { on_another_thread([] { lockstep::init_dist({.backend = "mpi"}); }); }, reason);
  }
  lockstep::init_dist({.backend = "mpi"});
  const lockstep::Group world = lockstep::default_group();
  std::vector<int> data(1000, 1);
  const auto check = [&](const lockstep::Group& group) {
    require(lockstep::all_reduce_value(1, lockstep::ReduceOp::sum, group) == group.size(),
            "the group is not usable");
  };
  const auto post = [&](const lockstep::Group& group) {
    lockstep::all_reduce_async(data, lockstep::ReduceOp::sum, group).wait();
  };
  if (level == kSerialized) {
    post(world);
    on_another_thread([&] { check(world); });
    return check(world);
  }
  // All ranks alike: the group stays usable.
  require_error<UsageError>([&] { post(world); },
                            "asynchronous calls run on a thread of their own, but " + reason);
  check(world);
  require_error<UsageError>([&] { on_another_thread([&] { check(world); }); }, reason);
  check(world);
  // One rank: the others meet the refused call.
  for (const bool is_async : {true, false}) {
    const lockstep::Group group = world.duplicate();
    if (world.rank() == 0) {
      require_error<UsageError>(
          [&] { is_async ? post(group) : on_another_thread([&] { check(group); }); }, reason);
    }
    require_error<lockstep::MismatchError>([&] { check(group); }, "refused all_reduce #1: ");
  }
  // What another thread has to tell the peers is told by the next call.
  const lockstep::Group group = world.duplicate();
  if (world.rank() == 0) on_another_thread([&] { group.abandon("out of sheets"); });
  require_error<lockstep::PeerFailed>([&] { check(group); }, "rank 0 failed: out of sheets");
}

/// The program's own, as of one that has initialised MPI itself.
int finalize_mpi() {
  const auto finalize = reinterpret_cast<int (*)()>(::dlsym(RTLD_DEFAULT, "MPI_Finalize"));
  if (finalize == nullptr) throw std::runtime_error("MPI is not loaded");
  return finalize();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string fault = argv[1];
  const std::string backend = argc > 3 ? argv[3] : std::getenv("LOCKSTEP_TEST_BACKEND");
  int rank = rank_by_launcher();
  try {
    if (fault == "cancelled") {
      end_an_exchange_of_receives();
      return 0;
    }
    if (fault == "stopped") {
      end_an_exchange_in_the_middle(argv[2]);
      std::_Exit(0);  // MPI_Finalize would wait
    }
    if (fault == "single") call_from_threads(kSingle, "MPI_THREAD_SINGLE");
    if (fault == "funneled") call_from_threads(kFunneled, "MPI_THREAD_FUNNELED");
    if (fault == "serialized") call_from_threads(kSerialized, "MPI_THREAD_SERIALIZED");
    if (fault == "single" || fault == "funneled" || fault == "serialized") {
      lockstep::destroy_dist();
      return finalize_mpi();
    }
    if (fault == "levels" && rank == 1) ::setenv("LOCKSTEP_CHECK", "off", 1);
    if (fault == "trace" && rank == 1) ::setenv("LOCKSTEP_TRACE", "/proc", 1);
    if (fault == "retry" && rank == 1) wait_until_said(argv[2], 1);
    if (fault == "retry" && rank == 0) {
      try {
        lockstep::init_dist({.backend = backend, .timeout = std::chrono::seconds(1)});
        throw std::runtime_error("no TimeoutError");
      } catch (const lockstep::TimeoutError& error) {
        say(argv[2], rank, error.what());
      }
    }
    lockstep::init_dist({.backend = backend});
    rank = lockstep::get_rank();
    lockstep::barrier();
    if (fault == "last_messages") {
      std::array<int, 2> data{};
      for (int i = 0; i < 10; ++i) {
        data.fill(i);
        if (rank == 0) lockstep::send(data, /*dst=*/1);
      }
      if (rank == 0) {
        lockstep::destroy_dist();
        say(argv[2], rank, "left");
        return 0;
      }
      wait_until_said(argv[2], 1);
      for (int i = 0; i < 10; ++i) {
        lockstep::recv(data, /*src=*/0);
        require(data.back() == i, "a wrong message");
      }
      lockstep::destroy_dist();
      return 0;
    }
    if (fault == "long") send_long_messages(rank);
    if (fault == "groups") {  // MPICH has 2,048 communicators
      std::vector<lockstep::Group> groups;
      const int n_groups = backend == "ucx" ? 150 : 2500;  // of UCX each has descriptors
      for (int i = 0; i < n_groups; ++i) {
        groups.push_back(lockstep::default_group().split(0, i % 2 == 0 ? rank : -rank));
      }
      // Two at once, which the ranks begin in another order: their messages must not be confused.
      for (int i = 0; i < n_groups; i += 2) {
        std::array<std::array<int, 2000>, 2> data{};
        std::array<lockstep::Work, 2> works;
        for (const int turn : {0, 1}) {
          const auto which = static_cast<std::size_t>(rank == 0 ? turn : 1 - turn);
          data[which].fill(i + static_cast<int>(which));
          works[which] = lockstep::all_reduce_async(data[which], lockstep::ReduceOp::sum,
                                                    groups[static_cast<std::size_t>(i) + which]);
        }
        for (const std::size_t which : {0U, 1U}) {
          works[which].wait();
          require(data[which].back() == 2 * (i + static_cast<int>(which)),
                  "a wrong sum in one of many groups");
        }
      }
    }
    if (fault == "mismatch" && rank == 2) lockstep::barrier();
    if (fault == "conditional" && rank == 0) lockstep::barrier();
    if (fault == "conditional") lockstep::barrier();
    if (rank == 1) {
      if (fault == "late") wait_until_said(argv[2], 2);
      if (fault == "killed") ::raise(SIGKILL);
      if (fault == "long_text") {
        lockstep::destroy_dist("out of sheets: " + std::string(40'000, 'x'));
        throw std::runtime_error("has left");
      }
      if (fault == "leave") {
        lockstep::destroy_dist();
        throw std::runtime_error("has left");
      }
    }
    if (fault == "pending") {
      const lockstep::Group other = lockstep::default_group().duplicate();
      if (rank == 1) {
        lockstep::Work pending = other.barrier_async();
        lockstep::destroy_dist("out of disk");
        pending.wait();
      }
    }
    if (fault == "throw") {
      lockstep::main_process_first([&] {
        if (rank == 0) throw std::runtime_error("out of sheets");
      });
    }
    if (fault == "caught") {
      const lockstep::Group other = lockstep::default_group().duplicate();
      try {
        if (rank == 2) other.barrier();
        lockstep::all_reduce_value(rank, lockstep::ReduceOp::sum, other);
        throw std::runtime_error("no MismatchError");
      } catch (const lockstep::MismatchError&) {
      }
    }
    if (fault == "limits") {
      if (rank == 0) wait_until_said(argv[2], 2);
      lockstep::barrier(lockstep::default_group(), std::chrono::seconds(rank == 1 ? 1 : 8));
    }
    if (fault == "cycle") {
      const lockstep::Group world = lockstep::default_group();
      const int size = world.size();
      std::array<int, 3> out{}, in{};
      lockstep::Work sent =
          lockstep::send_async(out, (rank + 1) % size, world, std::chrono::seconds(2));
      lockstep::Work received = lockstep::recv_async(in, (rank + size - 1) % size, world);
      sent.wait();
    }
    if (fault == "finalize_after_timeout") {
      try {
        if (rank == 1) wait_until_said(argv[2], 2);
        lockstep::barrier(lockstep::default_group(), std::chrono::seconds(1));
        throw std::runtime_error("no TimeoutError");
      } catch (const lockstep::TimeoutError& error) {
        say(argv[2], rank, error.what());
      }
      return finalize_mpi();
    }
    if (fault == "late") {
      lockstep::barrier(lockstep::default_group(), std::chrono::milliseconds(1000));
      // The late rank finds the messages of those who gave up.
      if (rank == 1) throw std::runtime_error("was late, yet its barrier succeeded");
    }
    lockstep::all_reduce_value(rank);
    lockstep::barrier();
    lockstep::destroy_dist();
    if (fault == "finalize") return finalize_mpi();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    if (argc > 2) {
      say(argv[2], rank, error.what());
      wait_until_said(argv[2], size_by_launcher());
    }
    return 1;
  }
  return 0;
}
