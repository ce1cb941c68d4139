#include "engines/mpi/mpi.hpp"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <lockstep/error.hpp>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/cpus.hpp"
#include "base/futex.hpp"
#include "base/text.hpp"
#include "base/truncated_text.hpp"
#include "base/wait_policy.hpp"
#include "engines/message/message_engine.hpp"
#include "engines/modules.hpp"
#include "engines/mpi/abi.hpp"
#include "group/failure.hpp"
#include "group/leave_on_exception.hpp"

namespace lockstep::mpi {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using message::Message;

using internal::Failure;
using Kind = Failure::Kind;

using ControlKind = message::ControlMessage::Kind;

/// A control message as MPI transfers it.
struct ControlBytes {
  ControlKind kind;
  Kind failure;
  std::int32_t culprit;
  internal::PeerList peers;
  message::WaitState wait_state;
  std::array<char, 3720> text;  // to its null

  std::size_t n_bytes() const {
    return offsetof(ControlBytes, text) + base::text_in(text).size() + 1;
  }
};
/// Open MPI sends a longer message on one host by rendezvous (its eager limit is 4,096 bytes with
/// headers): the receiver would wait until the sender calls MPI again.
static_assert(sizeof(ControlBytes) <= 4096 - 128);

/// Most exchanges complete within this many tests; for the others a clock read costs little.
constexpr std::size_t kTestsPerClock = 8;
/// Per rank: for the messages of a call and the control messages.
constexpr int kPollsBeforeExchange = 4;
/// For each millisecond since the last exchange.
constexpr int kPollsPerMs = 16;
/// For one host, so that a piece is still in the cache when it is reduced: docs/mpi.md has others.
constexpr std::size_t kPieceBytes = 512 << 10;

std::string text_of(const LockstepMpi& mpi, int code) {
  std::array<char, 512> text{};
  mpi.error_text(code, text.data(), text.size());
  if (code < 0) return fmt::format("{}: {}", mpi.library(), text.data());  // the module's own
  return fmt::format("{}: {} (error {})", mpi.library(), text.data(), code);
}

struct Hosts {
  base::WaitPolicy policy;  ///< by the ranks and the cores of this host
  bool are_one;             ///< all ranks of the world are on one host
};

/// A group of the module.
using Group = std::unique_ptr<void, void (*)(void*)>;

/// The ranks of one Group.
class Transport final : public message::Transport {
 public:
  /// why_one_thread: see Engine.
  Transport(const LockstepMpi& mpi, Group group, std::int32_t last_channel, Hosts hosts, int rank,
            int size, std::string why_one_thread)
      : mpi_(mpi),
        group_(std::move(group)),
        last_channel_(last_channel),
        hosts_(hosts),
        rank_(rank),
        size_(size),
        why_one_thread_(std::move(why_one_thread)) {}

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  std::string_view why_one_thread() const noexcept override { return why_one_thread_; }

  void start(std::span<const Message> messages, const Call& /*call*/) override {
    n_messages_ = messages.size();
    check(mpi_.begin(group_.get(), messages.data(), messages.size(), &exchange_));
  }
  bool test() override {
    n_tests_ = 0;
    return test(kTestsPerClock);
  }
  State wait(Clock::time_point deadline) override;
  std::vector<int> awaited() override {
    std::vector<int> ranks(n_messages_);
    std::size_t n = 0;
    check(mpi_.awaited(exchange_, ranks.data(), &n));
    ranks.resize(n);
    return ranks;
  }
  void cancel() noexcept override { mpi_.finish(exchange_); }
  void prepare(std::span<const Message> messages) override {
    // If it fails, the calls will fail too and report it.
    mpi_.prepare(group_.get(), messages.data(), messages.size());
  }
  bool takes_shorter_messages() const noexcept override { return true; }
  bool is_on_one_host() const noexcept override { return hosts_.are_one; }
  std::size_t piece_bytes() const noexcept override {
    return hosts_.are_one ? kPieceBytes : message::Transport::piece_bytes();
  }

  void send_control(const message::ControlMessage& message, int to) noexcept override;
  std::optional<message::ControlMessage> poll_control() override;
  bool answers_status_queries() const noexcept override { return true; }
  int n_polls_before_exchange() noexcept override {
    // If peers timed out on this rank, their messages have arrived, so this exchange would not wait
    // and would miss their control messages. A coarse tick is a few milliseconds; reading is free.
    // Each poll receives one or two of the pending messages. Their number is bounded by the time
    // since the last exchange, of which they take about one in a hundred with any number of ranks.
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    const std::int64_t now_ms = now.tv_sec * std::int64_t{1000} + now.tv_nsec / 1'000'000;
    const std::int64_t n_ms = now_ms - std::exchange(last_exchange_ms_, now_ms);
    return static_cast<int>(
        std::min<std::int64_t>(kPollsBeforeExchange * size(), kPollsPerMs * n_ms));
  }

  std::int32_t last_channel() const noexcept override { return last_channel_; }
  std::unique_ptr<message::Transport> split(const std::vector<int>& members,
                                            std::int32_t channel) override {
    const auto mine = static_cast<int>(std::ranges::find(members, rank_) - members.begin());
    void* part = nullptr;
    check(mpi_.part(group_.get(), members.data(), members.size(), channel, &part));
    return std::make_unique<Transport>(mpi_, Group(part, mpi_.release), last_channel_, hosts_, mine,
                                       static_cast<int>(members.size()), why_one_thread_);
  }

 private:
  void check(int code) const {
    if (code != 0) throw message::TransportError(text_of(mpi_, code));
  }
  bool test(std::size_t n_tests) {
    std::int32_t is_done = 0;
    check(mpi_.test(exchange_, n_tests, &is_done));
    n_tests_ += n_tests;
    return is_done != 0;
  }
  void skip_finalize(const message::ControlMessage& message) const noexcept;
  void send(const ControlBytes& bytes, int to) noexcept;
  /// Sends what other threads could not.
  void send_deferred() noexcept;

  const LockstepMpi& mpi_;
  const Group group_;
  const std::int32_t last_channel_;
  Hosts hosts_;
  int rank_;
  int size_;
  void* exchange_ = nullptr;
  std::size_t n_messages_ = 0;         // of the current exchange
  std::uint64_t n_tests_ = 0;          // of the current exchange
  Clock::time_point next_poll_;        // at the control messages
  std::int64_t last_exchange_ms_ = 0;  // of the coarse clock
  const std::string why_one_thread_;
  const std::thread::id thread_ = std::this_thread::get_id();
  struct Deferred {
    ControlBytes bytes;
    int to;
  };
  std::mutex deferred_mutex_;
  std::vector<Deferred> deferred_;  // of other threads, if thread_ alone may call MPI
  std::atomic<bool> has_deferred_{false};
};

Transport::State Transport::wait(Clock::time_point /*deadline*/) {
  const std::uint64_t n_polls = hosts_.policy.n_polls;
  const std::uint64_t n_tests_before_sleep = n_polls + hosts_.policy.n_yields;
  // Measured in time, not in polls: if another thread wants the core, each poll may take a
  // scheduler slice, also inside MPI, which yields by itself.
  constexpr std::chrono::microseconds kControlInterval{100};
  if (n_tests_ == kTestsPerClock) next_poll_ = Clock::now() + kControlInterval;
  if (n_tests_ > n_tests_before_sleep) std::this_thread::sleep_for(std::chrono::microseconds(50));
  for (;;) {
    const bool yields = n_tests_ > n_polls;
    const bool sleeps = n_tests_ > n_tests_before_sleep;
    if (yields && !sleeps) base::yield_cpu();
    if (test(yields ? 1 : kTestsPerClock)) return State::complete;
    const auto now = Clock::now();
    if (!sleeps && now < next_poll_) continue;
    next_poll_ = now + kControlInterval;
    return State::pending;
  }
}

void Transport::skip_finalize(const message::ControlMessage& message) const noexcept {
  // After a mismatch all ranks are present.
  const bool is_harmless =
      message.kind == ControlKind::failure
          ? message.failure.kind == Kind::mismatch
          : message.kind != ControlKind::departure || message.failure.kind == Kind::peer_left;
  if (!is_harmless) mpi_.skip_finalize();
}

void Transport::send_control(const message::ControlMessage& message, int to) noexcept {
  skip_finalize(message);
  const Failure& failure = message.failure;
  ControlBytes bytes{message.kind,  failure.kind,       failure.culprit,
                     failure.peers, message.wait_state, {}};
  base::copy_truncated(bytes.text, failure.text);
  send(bytes, to);
  // mpirun ends the job soon after a rank that fails: its peers report that at once.
  if (message.kind == ControlKind::departure && failure.kind == Kind::peer_failed) {
    bytes.kind = ControlKind::failure;
    send(bytes, to);
  }
}

void Transport::send(const ControlBytes& bytes, int to) noexcept {
  if (!why_one_thread_.empty() && thread_ != std::this_thread::get_id()) {
    const std::lock_guard lock(deferred_mutex_);
    try {
      deferred_.push_back({bytes, to});
      has_deferred_.store(true, std::memory_order_release);
    } catch (const std::bad_alloc&) {  // the peers time out
    }
    return;
  }
  if (has_deferred_.load(std::memory_order_acquire)) send_deferred();
  for (int r = to == kAllRanks ? 0 : to; r < (to == kAllRanks ? size() : to + 1); ++r) {
    if (r != rank_) mpi_.send_control(group_.get(), r, &bytes, bytes.n_bytes());
  }
}

void Transport::send_deferred() noexcept {
  std::vector<Deferred> deferred;
  {
    const std::lock_guard lock(deferred_mutex_);
    deferred.swap(deferred_);
    has_deferred_.store(false, std::memory_order_relaxed);
  }
  for (const Deferred& message : deferred) send(message.bytes, message.to);
}

std::optional<message::ControlMessage> Transport::poll_control() {
  if (has_deferred_.load(std::memory_order_acquire)) send_deferred();
  ControlBytes bytes{};
  std::int32_t has_arrived = 0;
  if (mpi_.poll_control(group_.get(), &bytes, sizeof bytes, &has_arrived) != 0 ||
      has_arrived == 0) {
    return std::nullopt;
  }
  message::ControlMessage message{.kind = bytes.kind,
                                  .failure = {.kind = bytes.failure,
                                              .culprit = bytes.culprit,
                                              .text = std::string(base::text_in(bytes.text)),
                                              .peers = bytes.peers},
                                  .wait_state = bytes.wait_state};
  skip_finalize(message);
  return message;
}

const LockstepMpi& load(const std::string& path, const ErrorContext& context) {
  using Entry = const LockstepMpi* (*)();
  const auto entry =
      reinterpret_cast<Entry>(engines::load_module(path, kLockstepMpiSymbol, context));
  if (entry == nullptr || entry()->version != kLockstepMpiVersion) {
    throw EngineError(context,
                      fmt::format("{} is not an MPI module of this version of lockstep", path));
  }
  return *entry();
}

}  // namespace

Module find_module(const std::string& mpi) {
  if (mpi.empty()) return {{}, "needs ranks that mpirun (or srun with PMIx) started"};
  if (mpi.find('/') != std::string::npos) {
    std::error_code ignored;
    if (fs::exists(mpi, ignored)) return {mpi, {}};
    return {{}, fmt::format("is not available: LOCKSTEP_MPI is '{}', which does not exist", mpi)};
  }
  if (mpi != "openmpi" && mpi != "mpich") {
    return {{},
            fmt::format("is not available: LOCKSTEP_MPI is '{}'; it takes openmpi, mpich, or "
                        "the path of a liblockstep-mpi-*.so",
                        mpi)};
  }
  const std::string path = engines::module_file("mpi", mpi);
  if (!path.empty()) return {path, {}};
  return {{},
          fmt::format("needs its module liblockstep-mpi-{}.so, which is built where that MPI's "
                      "headers are; LOCKSTEP_MPI may give its path",
                      mpi)};
}

std::unique_ptr<Engine> join(internal::World& world, const Call& barrier) {
  const ErrorContext context = context_of(barrier, world.rank);
  const std::string module = find_module(world.mpi).path;
  const LockstepMpi& mpi = load(module, context);
  int rank = 0;
  int n_ranks = 0;
  if (const int code = mpi.start(&rank, &n_ranks); code != 0) {
    throw EngineError(context, text_of(mpi, code));
  }
  if (rank != world.rank || n_ranks != world.size) {
    throw UsageError(
        context, fmt::format("MPI says rank {} of {}, the environment rank {} of {}: is {} the MPI "
                             "whose mpirun started this? LOCKSTEP_MPI=openmpi|mpich chooses",
                             rank, n_ranks, world.rank, world.size, mpi.library()));
  }
  std::string why_one_thread;
  std::int32_t is_that_thread = 0;
  if (const char* const level = mpi.one_thread(&is_that_thread); level != nullptr) {
    why_one_thread = fmt::format(
        "MPI was initialised with {}: only the thread that did so may call it. Let the program "
        "call MPI_Init_thread with MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE, or let init_dist "
        "initialise MPI",
        level);
    if (is_that_thread == 0)
      throw UsageError(context, "called on another thread; " + why_one_thread);
  }
  void* all = nullptr;
  std::int32_t last_channel = 0;
  if (const int code = mpi.world(Transport::kWorld, &all, &last_channel); code != 0) {
    throw EngineError(context, text_of(mpi, code));
  }
  Group group(all, mpi.release);
  base::CpuMask cores = base::allowed_cpus();
  int n_host_ranks = 0;
  if (const int code = mpi.host_ranks(cores.data(), cores.size(), &n_host_ranks); code != 0) {
    throw EngineError(context, text_of(mpi, code));
  }
  const int n_cores = base::n_usable_cores(cores, base::cpu_quota());
  const Hosts hosts{.policy = base::WaitPolicy::of_messages(n_host_ranks, n_cores),
                    .are_one = n_host_ranks == n_ranks};
  auto engine =
      message::make("mpi", std::make_unique<Transport>(mpi, std::move(group), last_channel, hosts,
                                                       rank, n_ranks, std::move(why_one_thread)));
  internal::leave_on_exception(*engine, [&] { engine->run(barrier); });
  return engine;
}

}  // namespace lockstep::mpi
