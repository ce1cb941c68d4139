#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <sys/types.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <lockstep/engine.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "engines/message/channel.hpp"

namespace lockstep::nn::detail {

class Channel;

/// The connections of one c10d::ProcessGroup, over which any number of channels (one per Group)
/// send at once. Only c10d's send and recv are used: with them it is known whose connection
/// failed, and they are the fastest that Gloo has.
///
/// Two threads stand by. "c10d-control" receives what peers say of themselves: that they leave, or
/// that a channel is dead, and why. "c10d-timer" ends waits at their deadline. Both end a wait by
/// Work::abort; Gloo's own limit would close every connection of the process.
class Wire {
 public:
  /// `store`: kept as long as the connections. In a copy of this process (fork) nothing is closed:
  /// the connections are the rank's, and a destructor would wait for threads that are not there.
  static std::shared_ptr<Wire> make(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                    c10::intrusive_ptr<c10d::Store> store);
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  int rank() const { return group_->getRank(); }
  int size() const { return group_->getSize(); }

 private:
  friend class Channel;
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  /// What a rank said: that it left, or why a channel is dead.
  enum class Notice : std::int32_t { left, failed, lost, late, mismatch };
  struct Verdict {
    Notice notice;
    int culprit;  // rank of the process group
    std::string text;
  };
  /// A thread that waits for one work after the other. They may be aborted while it is listed in
  /// waits_: all of them where the channel is dead, the current one at its end. Not more then: an
  /// abort also undoes a work that is done, whose rank is not the late one.
  struct Wait {
    int channel;
    std::chrono::steady_clock::time_point end;
    Works works;
    std::vector<int> peers;  // of works
    c10d::Work* current = nullptr;
  };
  /// A message as Gloo has it: in memory of ours, or, where it is long, of the caller.
  struct Parcel {
    at::Tensor tensor;
    const message::Message* message;
    bool is_done = false;

    bool is_callers() const { return tensor.data_ptr() == message->data; }
  };
  struct ControlMessage;
  /// A message on its way, which its peers may read until `end`.
  struct Sent {
    std::unique_ptr<ControlMessage> message;
    Works works;
    std::chrono::steady_clock::time_point end;
  };

  Wire(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store);
  bool is_copy() const noexcept;
  at::Tensor tensor_of(void* data, std::size_t n_bytes) const;
  Parcel pack(const message::Message& message, int peer);
  void unpack(const Parcel& parcel) const;
  static void abort(c10d::Work* work) noexcept;
  static void abort(const Works& works) noexcept;
  void start(Wait& wait);
  /// Waits for the i-th work. False: it was aborted. Throws c10d's errors.
  bool wait_for(Wait& wait, std::size_t i);
  /// Of what is not done, Gloo sends and receives when the late rank comes, which an abort does not
  /// undo; with its memory gone it would stop reading the connection, for every channel.
  void finish(Wait& wait, std::span<Parcel> parcels) noexcept;
  /// Waits for nobody.
  void tell(int channel, const Verdict& verdict, std::span<const int> to) noexcept;
  /// Waits until the peers have what they were told, each message for a second at most.
  void flush() noexcept;
  std::optional<Verdict> death_of(int channel);
  std::optional<Verdict> departure_of(std::span<const int> members);
  int next_channel();

  void listen(const std::stop_token& stop);
  void receive(const ControlMessage& message);
  void keep_time(const std::stop_token& stop);

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  at::Device device_;  // through which the bytes go; CUDA: the current one of whoever made this
  const pid_t pid_;

  std::mutex mutex_;  // guards what follows, but for the threads
  std::condition_variable_any changed_;
  std::map<int, Verdict> dead_;  // channels
  std::map<int, Verdict> gone_;  // ranks
  std::vector<Wait*> waits_;
  std::list<Sent> sent_;
  std::vector<std::pair<c10::intrusive_ptr<c10d::Work>, at::Tensor>> kept_;  // not done
  std::vector<bool> stuck_;   // ranks to whom a message is not done whose memory is gone
  bool has_changed_ = false;  // waits_, since the timer looked
  c10::intrusive_ptr<c10d::Work> listening_;
  int n_channels_ = 0;
  std::jthread control_;
  std::jthread timer_;
};

using message::Message;

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
  [[noreturn]] void fail(const Wire::Verdict& verdict, const Call& call) const;
  /// Throws where the channel is dead, or one of these ranks of the wire said that it left.
  void fail_if_known(std::span<const int> ranks, const Call& call) const;
  /// `culprit`: whose connection broke, with this text.
  [[noreturn]] void fail_connection(int culprit, const std::string& text, const Call& call) const;
  [[noreturn]] void fail_late(std::vector<int> late, const Call& call) const;
  void tell(Wire::Notice notice, int culprit, const std::string& text) const;
  int rank_of(int wire_rank) const;

  std::shared_ptr<Wire> wire_;
  std::vector<int> members_;  // ranks of the wire
  int rank_;
  int tag_;
};

}  // namespace lockstep::nn::detail
