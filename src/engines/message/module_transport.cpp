#include "engines/message/module_transport.hpp"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <new>
#include <utility>

#include "base/futex.hpp"
#include "base/truncated_text.hpp"
#include "group/failure.hpp"

namespace lockstep::message {
namespace {

using Clock = detail::JobClock;
using internal::Failure;

/// Per rank: for the messages of a call and the control messages.
constexpr int kPollsBeforeExchange = 4;
/// For each millisecond since the last exchange.
constexpr int kPollsPerMs = 16;

}  // namespace

std::string text_of(const LockstepTransport& module, int code) {
  std::array<char, 512> text{};
  module.error_text(code, text.data(), text.size());
  if (code < 0) return fmt::format("{}: {}", module.library(), text.data());  // the module's own
  return fmt::format("{}: {} (error {})", module.library(), text.data(), code);
}

Transport::State ModuleTransport::wait(Clock::time_point /*deadline*/) {
  const std::uint64_t n_polls = policy_.n_polls;
  const std::uint64_t n_tests_before_sleep = n_polls + policy_.n_yields;
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

void ModuleTransport::send_control(const ControlMessage& message, int to) noexcept {
  note(message);
  const Failure& failure = message.failure;
  ControlBytes bytes{message.kind,  failure.kind,       failure.culprit,
                     failure.peers, message.wait_state, {}};
  base::copy_truncated(bytes.text, failure.text);
  send(bytes, to);
  // mpirun and `lockstep run` end the job soon after a rank that fails: its peers report that at
  // once.
  if (message.kind == ControlMessage::Kind::departure &&
      failure.kind == Failure::Kind::peer_failed) {
    bytes.kind = ControlMessage::Kind::failure;
    send(bytes, to);
  }
}

void ModuleTransport::send(const ControlBytes& bytes, int to) noexcept {
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
    if (r != rank_) module_.send_control(group_.get(), r, &bytes, bytes.n_bytes());
  }
}

void ModuleTransport::send_deferred() noexcept {
  std::vector<Deferred> deferred;
  {
    const std::lock_guard lock(deferred_mutex_);
    deferred.swap(deferred_);
    has_deferred_.store(false, std::memory_order_relaxed);
  }
  for (const Deferred& message : deferred) send(message.bytes, message.to);
}

std::optional<ControlMessage> ModuleTransport::poll_control() {
  if (has_deferred_.load(std::memory_order_acquire)) send_deferred();
  ControlBytes bytes{};
  std::int32_t has_arrived = 0;
  if (module_.poll_control(group_.get(), &bytes, sizeof bytes, &has_arrived) != 0 ||
      has_arrived == 0) {
    return std::nullopt;
  }
  ControlMessage message{.kind = bytes.kind,
                         .failure = {.kind = bytes.failure,
                                     .culprit = bytes.culprit,
                                     .text = std::string(base::text_in(bytes.text)),
                                     .peers = bytes.peers},
                         .wait_state = bytes.wait_state};
  note(message);
  return message;
}

int ModuleTransport::n_polls_before_exchange() noexcept {
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

}  // namespace lockstep::message
