#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/text.hpp"
#include "base/wait_policy.hpp"
#include "engines/message/module_abi.hpp"
#include "engines/message/transport.hpp"

namespace lockstep::message {

/// A group of a module.
using ModuleGroup = std::unique_ptr<void, void (*)(void*)>;

/// With the library's name.
std::string text_of(const LockstepTransport& module, int code);

/// The ranks of one Group over the messages of a module.
class ModuleTransport : public Transport {
 public:
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  std::string_view why_one_thread() const noexcept override { return why_one_thread_; }

  void start(std::span<const Message> messages, const Call& /*call*/) override {
    n_messages_ = messages.size();
    check(module_.begin(group_.get(), messages.data(), messages.size(), &exchange_));
  }
  bool test() override {
    n_tests_ = 0;
    return test(kTestsPerClock);
  }
  State wait(detail::JobClock::time_point deadline) override;
  std::vector<int> awaited() override {
    std::vector<int> ranks(n_messages_);
    std::size_t n = 0;
    check(module_.awaited(exchange_, ranks.data(), &n));
    ranks.resize(n);
    return ranks;
  }
  void cancel() noexcept override { module_.finish(exchange_); }
  void prepare(std::span<const Message> messages) override {
    // If it fails, the calls will fail too and report it.
    if (module_.prepare != nullptr) {
      module_.prepare(group_.get(), messages.data(), messages.size());
    }
  }
  bool takes_shorter_messages() const noexcept override { return true; }

  void send_control(const ControlMessage& message, int to) noexcept override;
  std::optional<ControlMessage> poll_control() override;
  bool answers_status_queries() const noexcept override { return true; }
  int n_polls_before_exchange() noexcept override;

 protected:
  /// policy: by the ranks and the cores of this host. why_one_thread: see Engine.
  ModuleTransport(const LockstepTransport& module, ModuleGroup group, base::WaitPolicy policy,
                  int rank, int size, std::string why_one_thread)
      : module_(module),
        group_(std::move(group)),
        policy_(policy),
        rank_(rank),
        size_(size),
        why_one_thread_(std::move(why_one_thread)) {}

  void* group() const noexcept { return group_.get(); }
  base::WaitPolicy policy() const noexcept { return policy_; }
  /// Throws TransportError unless the code is 0.
  void check(int code) const {
    if (code != 0) throw error_of(code);
  }
  virtual TransportError error_of(int code) const { return TransportError(text_of(module_, code)); }
  /// Of each control message that is sent or received.
  virtual void note(const ControlMessage& /*message*/) const noexcept {}

 private:
  /// A control message as the library transfers it.
  struct ControlBytes {
    ControlMessage::Kind kind;
    internal::Failure::Kind failure;
    std::int32_t culprit;
    internal::PeerList peers;
    WaitState wait_state;
    std::array<char, 3720> text;  // to its null

    std::size_t n_bytes() const {
      return offsetof(ControlBytes, text) + base::text_in(text).size() + 1;
    }
  };
  /// Open MPI sends a longer message on one host by rendezvous (its eager limit is 4,096 bytes with
  /// headers): the receiver would wait until the sender calls MPI again.
  static_assert(sizeof(ControlBytes) <= 4096 - 128);
  /// Most exchanges complete within this many tests; for the others a clock read costs little.
  static constexpr std::size_t kTestsPerClock = 8;

  bool test(std::size_t n_tests) {
    std::int32_t is_done = 0;
    check(module_.test(exchange_, n_tests, &is_done));
    n_tests_ += n_tests;
    return is_done != 0;
  }
  void send(const ControlBytes& bytes, int to) noexcept;
  /// Sends what other threads could not.
  void send_deferred() noexcept;

  const LockstepTransport& module_;
  const ModuleGroup group_;
  const base::WaitPolicy policy_;
  const int rank_;
  const int size_;
  void* exchange_ = nullptr;
  std::size_t n_messages_ = 0;              // of the current exchange
  std::uint64_t n_tests_ = 0;               // of the current exchange
  detail::JobClock::time_point next_poll_;  // at the control messages
  std::int64_t last_exchange_ms_ = 0;       // of the coarse clock
  const std::string why_one_thread_;
  const std::thread::id thread_ = std::this_thread::get_id();
  struct Deferred {
    ControlBytes bytes;
    int to;
  };
  std::mutex deferred_mutex_;
  std::vector<Deferred> deferred_;  // of other threads, if thread_ alone may call the library
  std::atomic<bool> has_deferred_{false};
};

}  // namespace lockstep::message
