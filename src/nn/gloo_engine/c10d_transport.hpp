#pragma once

#include <chrono>
#include <lockstep/engine.hpp>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engines/message/transport.hpp"
#include "nn/gloo_engine/c10d_wire.hpp"

namespace lockstep::nn::detail {

/// The ranks of one Group, on a wire.
class Transport final : public message::Transport {
 public:
  /// All ranks of the wire.
  explicit Transport(std::shared_ptr<Wire> wire);
  /// `members`: ranks of the wire; `channel`: the tag of the messages.
  Transport(std::shared_ptr<Wire> wire, std::vector<int> members, int channel);

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(members_.size()); }
  void start(std::span<const Message> messages, const Call& call) override;
  State wait(lockstep::detail::JobClock::time_point deadline) override;
  void cancel() noexcept override;
  std::vector<int> awaited() override { return awaited_; }
  bool takes_shorter_messages() const noexcept override { return wire_->takes_shorter_messages(); }
  bool answers_status_queries() const noexcept override { return wire_->can_wait_again(); }
  void send_control(const message::ControlMessage& message, int to) noexcept override {
    const std::span<const int> all(members_);
    wire_->send_control(channel_, message,
                        to == kAllRanks ? all : all.subspan(static_cast<std::size_t>(to), 1));
  }
  std::optional<message::ControlMessage> poll_control() override {
    return wire_->poll_control(channel_);
  }
  std::optional<internal::Failure> verdict() const override;
  std::chrono::milliseconds time_of_reason() const noexcept override;
  std::unique_ptr<message::Transport> split(const std::vector<int>& members, std::int32_t channel,
                                            std::span<const std::byte> /*addresses*/) override;

 private:
  int rank_of(int wire_rank) const;
  /// Drops what is left of an exchange.
  void release() noexcept;

  std::shared_ptr<Wire> wire_;
  std::vector<int> members_;  // ranks of the wire
  int rank_;
  int channel_;
  // Of the current exchange.
  Wire::Wait wait_;
  std::vector<Wire::Transfer> transfers_;
  std::vector<int> awaited_;
};

}  // namespace lockstep::nn::detail
