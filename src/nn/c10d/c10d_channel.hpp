#pragma once

#include <chrono>
#include <lockstep/engine.hpp>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engines/message/channel.hpp"
#include "nn/c10d/c10d_wire.hpp"

namespace lockstep::nn::detail {

/// The ranks of one Group, on a wire.
class Channel final : public message::Channel {
 public:
  /// All ranks of the wire.
  explicit Channel(std::shared_ptr<Wire> wire);
  Channel(const Channel& parent, const std::vector<int>& members, const Call& call,
          std::chrono::steady_clock::time_point end);

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(members_.size()); }
  void exchange(std::span<const Message> messages, const Call& call,
                message::Limit& limit) override {
    post(messages, call, limit.end());
  }
  std::unique_ptr<message::Channel> split(const std::vector<int>& members, const Call& call,
                                          message::Limit& limit) override {
    return std::make_unique<Channel>(*this, members, call, limit.end());
  }
  void abandon(std::string_view reason) noexcept override;
  void end_with(const Error& error) noexcept override;
  [[noreturn]] void fail_mismatch(const std::string& table, const Call& call) override;
  void leave(std::string_view failure) noexcept override;

 private:
  void post(std::span<const Message> messages, const Call& call,
            std::chrono::steady_clock::time_point end) const;
  [[noreturn]] void fail(Failure failure, const Call& call) const;
  /// Throws if the channel is dead or one of these ranks of the wire has left.
  void fail_if_known(std::span<const int> ranks, const Call& call) const;
  /// `culprit`: the rank whose connection broke, with this text.
  [[noreturn]] void fail_connection(int culprit, const std::string& text, const Call& call) const;
  [[noreturn]] void fail_late(std::vector<int> late, const Call& call) const;
  void tell(const Failure& failure) const { wire_->tell(tag_, failure, members_); }
  int rank_of(int wire_rank) const;

  std::shared_ptr<Wire> wire_;
  std::vector<int> members_;  // ranks of the wire
  int rank_;
  int tag_;
};

}  // namespace lockstep::nn::detail
