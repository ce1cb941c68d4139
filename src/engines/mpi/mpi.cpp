#include "engines/mpi/mpi.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <lockstep/error.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/cpus.hpp"
#include "base/futex.hpp"
#include "base/text.hpp"
#include "engines/message/message_engine.hpp"
#include "engines/mpi/abi.hpp"
#include "group/failure.hpp"

namespace lockstep::mpi {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using message::Message;
using std::chrono::milliseconds;

using internal::Failure;
using Kind = Failure::Kind;

/// A failure as a control message, which ends the peers' waits.
struct Note {
  Kind kind;
  std::int32_t culprit;  ///< in that communicator
  std::array<char, 3960> text;
};
/// Open MPI sends a longer message on one host by rendezvous (its eager limit is 4,096 bytes with
/// headers): the receiver would wait until the sender calls MPI again.
static_assert(sizeof(Note) <= 4096 - 128);

/// How long messages that a rank sent before it left may still be in transit.
constexpr milliseconds kPatience{500};
/// Most exchanges complete within this many tests; for the others a clock read costs little.
constexpr std::size_t kTestsPerClock = 8;
/// Polls per rank: for the messages of a call and the control messages.
constexpr std::size_t kLooksForNotices = 4;
/// For one host, so that a piece is still in the cache when it is reduced. Of 64 KiB to 1 MiB the
/// fastest for 1 MiB between two ranks, with Open MPI and with MPICH.
constexpr std::size_t kPieceBytes = 256 << 10;

std::string text_of(const LockstepMpi& mpi, int code) {
  std::array<char, 512> text{};
  mpi.error_text(code, text.data(), text.size());
  return fmt::format("{}: {} (error {})", mpi.library(), text.data(), code);
}

/// The ranks that left, with their control messages. Shared by all channels of a world, because
/// these messages are sent on the world's communicator.
class Departures {
 public:
  Departures(const LockstepMpi& mpi, void* world) : mpi_(mpi), world_(world) {}
  void listen() {
    const std::lock_guard lock(mutex_);
    Note note{};
    for (std::int32_t has_come = 1; has_come != 0;) {
      if (mpi_.hear(world_, &note, sizeof note, &has_come) != 0) return;
      if (has_come == 0) return;
      const bool has_left = note.kind == Kind::peer_left || note.kind == Kind::peer_failed;
      if (has_left && note.culprit != Failure::kNoCulprit) {
        gone_.emplace(note.culprit, note);
      }
      if (note.kind != Kind::peer_left) verdict_ = note;
    }
  }
  std::optional<Note> of(int world_rank) {
    const std::lock_guard lock(mutex_);
    const auto found = gone_.find(world_rank);
    return found == gone_.end() ? std::nullopt : std::optional(found->second);
  }
  /// Why the world's channel is dead.
  std::optional<Note> verdict() {
    const std::lock_guard lock(mutex_);
    return verdict_;
  }
  void* world() const { return world_; }

 private:
  const LockstepMpi& mpi_;
  void* world_;
  std::mutex mutex_;
  std::map<int, Note> gone_;
  std::optional<Note> verdict_;
};

/// The ranks of one Group on a separate communicator.
class Channel final : public message::Channel {
 public:
  /// `members`: ranks of the world. `is_oversubscribed`: ranks of a host exceed its cores.
  Channel(const LockstepMpi& mpi, void* communicator, bool is_oversubscribed, bool is_one_host,
          std::vector<int> members, int rank, std::shared_ptr<Departures> departures)
      : mpi_(mpi),
        communicator_(communicator),
        is_oversubscribed_(is_oversubscribed),
        is_one_host_(is_one_host),
        members_(std::move(members)),
        rank_(rank),
        departures_(std::move(departures)) {}
  ~Channel() override { mpi_.release(communicator_); }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(members_.size()); }

  void exchange(std::span<const Message> messages, const Call& call,
                message::Limit& limit) override;
  std::size_t piece_bytes() const noexcept override {
    return is_one_host_ ? kPieceBytes : message::Channel::piece_bytes();
  }
  void prepare(std::span<const Message> messages) override {
    // If it fails, the calls will fail too and report it.
    mpi_.prepare(communicator_, messages.data(), messages.size());
  }

  std::unique_ptr<message::Channel> split(const std::vector<int>& members, const Call& call,
                                          message::Limit& /*limit*/) override {
    // MPI waits for all ranks of the group without a timeout: all have reached this call, because
    // their headers have arrived.
    const auto mine = static_cast<int>(std::ranges::find(members, rank_) - members.begin());
    void* part = nullptr;
    const int code = mpi_.split(communicator_, /*color=*/members.front(), /*key=*/mine, &part);
    if (code != 0) fail_library(code, call);
    std::vector<int> world_ranks;
    for (const int member : members) {
      world_ranks.push_back(members_[static_cast<std::size_t>(member)]);
    }
    return std::make_unique<Channel>(mpi_, part, is_oversubscribed_, is_one_host_,
                                     std::move(world_ranks), mine, departures_);
  }

  void abandon(std::string_view reason) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      if (!verdict_)
        verdict_ = note_of(Kind::peer_failed, reason, rank_);  // for a thread of this rank
    }
    tell(Kind::peer_failed, reason, rank_);
  }

  void end_with(const Error& error) noexcept override {
    Note note{};
    try {
      const Failure failure = internal::failure_for_peers(error, rank_);
      note = note_of(failure.kind, failure.text, failure.culprit);
    } catch (const std::bad_alloc&) {
      note = note_of(Kind::peer_failed, error.text(), rank_);
    }
    {
      const std::lock_guard lock(mutex_);
      if (!verdict_) verdict_ = note;
    }
    tell(note);
  }

  [[noreturn]] void fail_mismatch(const std::string& table, const Call& call) override {
    tell(Kind::mismatch, table, rank_);
    throw MismatchError(context_of(call, rank_), table);
  }

  void leave(std::string_view failure) noexcept override {
    if (!failure.empty()) mpi_.give_up_finalize();
    tell(failure.empty() ? Kind::peer_left : Kind::peer_failed, failure, rank_);
  }

 private:
  static Note note_of(Kind kind, std::string_view text, int culprit) noexcept {
    Note note{kind, culprit, {}};
    text.copy(note.text.data(), note.text.size() - 1);
    return note;
  }
  void tell(Kind kind, std::string_view text, int culprit) noexcept {
    tell(note_of(kind, text, culprit));
  }
  void tell(const Note& note) noexcept;
  void look_for_verdict(const Call& call);
  void wait(void* exchange, const Call& call, message::Limit& limit);
  void listen();
  void look_for_notices(const Call& call, const std::vector<int>& awaited, Clock::time_point now);
  std::vector<int> awaited(void* exchange, const Call& call);
  [[noreturn]] void fail(const Note& note, const Call& call) const;
  [[noreturn]] void fail_library(int code, const Call& call);
  [[noreturn]] void fail_late(std::vector<int> late, const Call& call);

  const LockstepMpi& mpi_;
  void* communicator_;
  bool is_oversubscribed_;
  bool is_one_host_;  // all ranks of the world are on one host
  std::vector<int> members_;
  int rank_;
  std::shared_ptr<Departures> departures_;
  std::mutex mutex_;
  std::optional<Note> verdict_;
  std::optional<Clock::time_point> departure_seen_;
  long last_tick_ = 0;                 // of the coarse clock, at the last exchange
  std::vector<std::int32_t> awaited_;  // buffer for the ranks of the current exchange
};

void Channel::exchange(std::span<const Message> messages, const Call& call, message::Limit& limit) {
  // If peers timed out on this rank, their messages have arrived, so this exchange would not wait
  // and would miss their control messages. A coarse tick is a few milliseconds; reading is free.
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  if (std::exchange(last_tick_, now.tv_nsec) != now.tv_nsec) {
    // Each call receives one or two of the pending messages.
    for (std::size_t i = 0; i < kLooksForNotices * members_.size(); ++i) listen();
    look_for_verdict(call);
  }
  void* handle = nullptr;
  int code = mpi_.begin(communicator_, messages.data(), messages.size(), &handle);
  try {
    std::int32_t is_done = 0;
    if (code == 0) {
      if (call.progress != nullptr) call.progress->arrived(call);
      code = mpi_.test(handle, kTestsPerClock, &is_done);
    }
    if (code != 0) fail_library(code, call);
    if (is_done != 0) return;
    awaited_.resize(messages.size());
    wait(handle, call, limit);
  } catch (...) {
    mpi_.finish(handle);
    throw;
  }
}

void Channel::wait(void* exchange, const Call& call, message::Limit& limit) {
  // With a core for each rank the peers are running now, and a core that is yielded to another
  // program returns only when the scheduler decides. If oversubscribed, every poll keeps the
  // awaited rank from running.
  const std::uint64_t n_polls = is_oversubscribed_ ? 500 : 20'000;
  constexpr std::uint64_t kYields = 100'000;
  // Measured in time, not in polls: if another thread wants the core, each poll may take a
  // scheduler slice, also inside MPI, which yields by itself.
  constexpr std::chrono::microseconds kLivenessInterval{100};
  if (call.progress != nullptr) call.progress->slept(call);  // polling counts as sleep
  departure_seen_.reset();
  auto next_check = Clock::now() + kLivenessInterval;
  limit.end();  // begins now
  for (std::uint64_t i = kTestsPerClock;;) {
    const bool yields = i > n_polls;
    const bool sleeps = i > n_polls + kYields;
    if (yields && !sleeps) base::yield_cpu();
    const std::size_t n_tests = yields ? 1 : kTestsPerClock;
    std::int32_t is_done = 0;
    const int code = mpi_.test(exchange, n_tests, &is_done);
    if (code != 0) fail_library(code, call);
    if (is_done != 0) return;
    i += n_tests;
    const auto now = Clock::now();
    if (!sleeps && now < next_check) continue;
    next_check = now + kLivenessInterval;
    listen();
    look_for_notices(call, awaited(exchange, call), now);
    if (now >= limit.end()) {
      // The last message may have arrived since the test above.
      if (auto late = awaited(exchange, call); !late.empty()) fail_late(std::move(late), call);
    }
    if (sleeps) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void Channel::listen() {
  departures_->listen();
  if (communicator_ == departures_->world()) {
    const std::lock_guard lock(mutex_);
    if (!verdict_) verdict_ = departures_->verdict();
    return;
  }
  Note note{};
  std::int32_t has_come = 0;
  if (mpi_.hear(communicator_, &note, sizeof note, &has_come) != 0 || has_come == 0) return;
  const std::lock_guard lock(mutex_);
  if (!verdict_) verdict_ = note;
}

void Channel::look_for_verdict(const Call& call) {
  std::optional<Note> verdict;
  {
    const std::lock_guard lock(mutex_);
    verdict = verdict_;
  }
  if (verdict) fail(*verdict, call);
}

void Channel::look_for_notices(const Call& call, const std::vector<int>& awaited,
                               Clock::time_point now) {
  look_for_verdict(call);
  for (const int rank : awaited) {
    auto gone = departures_->of(members_[static_cast<std::size_t>(rank)]);
    if (!gone) continue;
    if (!departure_seen_) departure_seen_ = now;
    if (now - *departure_seen_ < kPatience) continue;
    gone->culprit = rank;
    try {
      fail(*gone, call);
    } catch (const Error& error) {
      end_with(error);  // peers may wait for this rank, not for the one that left
      throw;
    }
  }
}

std::vector<int> Channel::awaited(void* exchange, const Call& call) {
  std::size_t n = 0;
  const int code = mpi_.awaited(exchange, awaited_.data(), &n);
  if (code != 0) fail_library(code, call);
  std::vector<int> ranks(awaited_.begin(), awaited_.begin() + static_cast<std::ptrdiff_t>(n));
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

void Channel::tell(const Note& note) noexcept {
  // After a mismatch all ranks are present.
  if (note.kind != Kind::peer_left && note.kind != Kind::mismatch) mpi_.give_up_finalize();
  for (int r = 0; r < size(); ++r) {
    if (r != rank_) mpi_.tell(communicator_, r, &note, sizeof note);
  }
}

void Channel::fail(const Note& note, const Call& call) const {
  if (note.kind != Kind::peer_left && note.kind != Kind::mismatch) mpi_.give_up_finalize();
  internal::throw_failure(
      {.kind = note.kind, .culprit = note.culprit, .text = std::string(base::text_in(note.text))},
      context_of(call, rank_));
}

void Channel::fail_library(int code, const Call& call) {
  const std::string text = text_of(mpi_, code);
  tell(Kind::peer_failed, text, rank_);
  throw EngineError(context_of(call, rank_), text);
}

void Channel::fail_late(std::vector<int> late, const Call& call) {
  const std::string text = fmt::format("rank {} waited {:g} s for rank{} {} of {}", rank_,
                                       std::chrono::duration<double>(call.timeout).count(),
                                       late.size() == 1 ? "" : "s", fmt::join(late, ", "), size());
  tell(Kind::timeout, text, rank_);
  throw TimeoutError(context_of(call, rank_), text);
}

/// The folders in which the loader looks for this program's libraries, including its run path.
std::vector<fs::path> library_folders() {
  void* const program = ::dlopen(nullptr, RTLD_LAZY);
  Dl_serinfo size{};
  if (program == nullptr || ::dlinfo(program, RTLD_DI_SERINFOSIZE, &size) != 0) return {};
  const std::unique_ptr<void, decltype(&std::free)> room(std::malloc(size.dls_size), std::free);
  auto* const info = static_cast<Dl_serinfo*>(room.get());
  if (info == nullptr) return {};
  *info = size;
  if (::dlinfo(program, RTLD_DI_SERINFO, info) != 0) return {};
  std::vector<fs::path> folders;
  for (unsigned i = 0; i < info->dls_cnt; ++i) folders.emplace_back(info->dls_serpath[i].dls_name);
  return folders;
}

constexpr char kOwnAddress = 0;  // in the program or the plugin that this library is linked into

/// Searches for the module beside an installed program, in the run path (find_package(lockstep)
/// sets one for programs that link the library), beside the plugin (a Python extension) that this
/// library is linked into, then in this library's install prefix.
std::string file_of(const std::string& mpi) {
  const std::string name = "liblockstep-mpi-" + mpi + ".so";
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored);
  const fs::path beside = program.parent_path() / "../lib/lockstep" / name;
  if (!program.empty() && fs::exists(beside, ignored)) return beside.string();
  for (const fs::path& folder : library_folders()) {
    if (fs::exists(folder / name, ignored)) return (folder / name).string();
  }
  if (Dl_info own{}; ::dladdr(&kOwnAddress, &own) != 0) {
    const fs::path plugin = fs::path(own.dli_fname).parent_path() / name;
    if (fs::exists(plugin, ignored)) return plugin.string();
  }
  const fs::path installed = fs::path(LOCKSTEP_MODULE_DIR) / name;
  return fs::exists(installed, ignored) ? installed.string() : std::string();
}

const LockstepMpi& load(const std::string& path, const ErrorContext& context) {
  // Open MPI's plugins resolve the library's symbols in the program's global scope.
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw EngineError(context, fmt::format("cannot load {}", ::dlerror()));
  using Entry = const LockstepMpi* (*)();
  const auto entry = reinterpret_cast<Entry>(::dlsym(library, kLockstepMpiSymbol));
  if (entry == nullptr || entry()->version != kLockstepMpiVersion) {
    throw EngineError(context,
                      fmt::format("{} is no MPI module of this version of lockstep", path));
  }
  return *entry();
}

}  // namespace

Module find_module(const std::string& mpi) {
  if (mpi.empty()) return {{}, "needs ranks that mpirun (or srun with PMIx) started"};
  if (mpi.find('/') != std::string::npos) {
    std::error_code ignored;
    if (fs::exists(mpi, ignored)) return {mpi, {}};
    return {{}, fmt::format("cannot be had: LOCKSTEP_MPI is '{}', and there is no such file", mpi)};
  }
  if (mpi != "openmpi" && mpi != "mpich") {
    return {{},
            fmt::format("cannot be had: LOCKSTEP_MPI is '{}'; it takes openmpi, mpich, or the "
                        "path of a liblockstep-mpi-*.so",
                        mpi)};
  }
  const std::string path = file_of(mpi);
  if (!path.empty()) return {path, {}};
  return {{},
          fmt::format("needs its module liblockstep-mpi-{}.so, which is built where that MPI's "
                      "headers are; LOCKSTEP_MPI may give its path",
                      mpi)};
}

std::unique_ptr<Engine> join(const internal::World& world, const Call& barrier) {
  const ErrorContext context = context_of(barrier, world.rank);
  const LockstepMpi& mpi = load(find_module(world.mpi).path, context);
  int rank = 0;
  int n_ranks = 0;
  void* communicator = nullptr;
  if (const int code = mpi.start(&rank, &n_ranks); code != 0) {
    throw EngineError(context, text_of(mpi, code));
  }
  if (rank != world.rank || n_ranks != world.size) {
    throw UsageError(
        context, fmt::format("MPI says rank {} of {}, the environment rank {} of {}: is {} the MPI "
                             "whose mpirun started this? LOCKSTEP_MPI=openmpi|mpich chooses",
                             rank, n_ranks, world.rank, world.size, mpi.library()));
  }
  if (const int code = mpi.world(&communicator); code != 0) {
    throw EngineError(context, text_of(mpi, code));
  }
  base::CpuMask cores = base::allowed_cpus();
  int n_neighbours = 0;
  if (const int code = mpi.neighbours(cores.data(), cores.size(), &n_neighbours); code != 0) {
    throw EngineError(context, text_of(mpi, code));
  }
  int n_cores = 0;
  for (const std::uint64_t word : cores) n_cores += std::popcount(word);
  std::vector<int> everybody(static_cast<std::size_t>(n_ranks));
  for (int r = 0; r < n_ranks; ++r) everybody[static_cast<std::size_t>(r)] = r;
  auto engine = message::make(
      "mpi", std::make_unique<Channel>(
                 mpi, communicator,
                 /*is_oversubscribed=*/n_neighbours > std::min(n_cores, base::cpu_quota()),
                 /*is_one_host=*/n_neighbours == n_ranks, everybody, rank,
                 std::make_shared<Departures>(mpi, communicator)));
  engine->run(barrier);
  return engine;
}

}  // namespace lockstep::mpi
