#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <sys/types.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <lockstep/detail/time_limit.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "engines/message/transport.hpp"

namespace lockstep::shared {
class Elastic;
}

namespace lockstep::nn::detail {

using message::Message;
class Transport;

#if TORCH_VERSION_MAJOR >= 2
/// A process group with this one backend. (Before, each was a process group itself.)
inline c10::intrusive_ptr<c10d::ProcessGroup> group_over(
    c10::intrusive_ptr<c10d::Backend> backend, c10::DeviceType device,
    c10d::ProcessGroup::BackendType type, const c10::intrusive_ptr<c10d::Store>& store) {
  auto group =
      c10::make_intrusive<c10d::ProcessGroup>(store, backend->getRank(), backend->getSize());
  group->setBackend(device, type, std::move(backend));
  group->setDefaultBackend(type);
  return group;
}
#endif

/// The connections of one c10d::ProcessGroup, shared by any number of channels (one per Group) at
/// once. Only c10d's send and recv are used: their errors identify the failed connection, and they
/// are Gloo's fastest operations.
///
/// Two service threads. "c10d-control" receives the peers' control messages; "c10d-timer" ends
/// waits at their deadline. Both end a wait by Work::abort; Gloo's own limit would close every
/// connection of the process.
class Wire {
 public:
  /// `store`: kept as long as the connections. In a forked copy of this process nothing is closed:
  /// the connections belong to the rank, and a destructor would join threads that do not exist.
  /// `elastic`: whose generation ends all waits with its own end; null: none.
  static std::shared_ptr<Wire> make(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                    c10::intrusive_ptr<c10d::Store> store,
                                    std::shared_ptr<const shared::Elastic> elastic = nullptr);
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  int rank() const { return group_->getRank(); }
  int size() const { return group_->getSize(); }
  /// Whether a wait that was aborted can be repeated.
  bool can_wait_again() const { return is_gloo_; }
  /// Whether a message may be shorter than its receive.
  bool takes_shorter_messages() const { return is_gloo_; }
  const shared::Elastic* elastic() const { return elastic_.get(); }

 private:
  friend class Transport;
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  using Time = lockstep::detail::JobClock::time_point;
  static constexpr int kNoPeer = -1;

  /// A thread that waits for one work after another. While it is listed in waits_, they may be
  /// aborted: all of them if the channel is dead, only the current one at its deadline or after its
  /// peer has left, because an abort also undoes a completed work, whose peer is not the late one.
  struct Wait {
    int channel;
    Time deadline;
    Works works;
    std::vector<int> peers;  // of works; empty: departures do not end it
    c10d::Work* current = nullptr;
    int peer = kNoPeer;          // of `current`
    bool has_peer_left = false;  // which is why `current` was aborted
  };
  /// A message as passed to Gloo: in our own buffer or, if it is long, in the caller's memory.
  struct Transfer {
    at::Tensor tensor;
    const Message* message;
    bool is_done = false;

    bool is_callers() const { return tensor.data_ptr() == message->data; }
  };
  struct ControlBytes;
  /// A control message in flight, which its peers may read until `deadline`.
  struct Sent {
    std::unique_ptr<ControlBytes> bytes;
    Works works;
    Time deadline;
  };

  Wire(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store,
       std::shared_ptr<const shared::Elastic> elastic);
  bool is_forked_child() const noexcept;
  at::Tensor tensor_of(void* data, std::size_t n_bytes) const;
  Transfer stage(const Message& message, int peer);
  void unstage(const Transfer& transfer) const;
  static void abort(c10d::Work* work) noexcept;
  static void abort(const Works& works) noexcept;
  void start(Wait& wait);
  /// Waits for the i-th work. Returns false if it was aborted. Throws c10d's errors.
  bool wait_for(Wait& wait, std::size_t i);
  bool wait_for(Wait& wait, c10d::Work& work, int peer);
  /// Until the next start() of it.
  void pause(Wait& wait);
  /// Gloo completes unfinished sends and receives when the late rank arrives; an abort does not
  /// undo that. If their memory were gone, it would stop reading the connection, for every channel.
  void finish(Wait& wait, std::span<Transfer> transfers) noexcept;
  /// See message::Transport. `to`: ranks of the wire.
  void send_control(int channel, const message::ControlMessage& message,
                    std::span<const int> to) noexcept;
  std::optional<message::ControlMessage> poll_control(int channel);
  /// Waits until the peers have received all control messages, each for a second at most.
  void flush() noexcept;

  void listen(const std::stop_token& stop);
  /// Until no more can be received so: Gloo refuses all such receives once a peer has died that had
  /// announced a message which no receive was waiting for.
  void listen_to_any(const std::stop_token& stop);
  /// With one receive for each peer, which are polled in turn.
  void listen_to_each(const std::stop_token& stop);
  void receive(const ControlBytes& bytes);
  void end_waits(int channel);  // requires the lock
  void keep_time(const std::stop_token& stop);
  /// When to abort the current work. Requires the lock.
  Time end_of(const Wait& wait) const;

  c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<const shared::Elastic> elastic_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const bool is_gloo_ = group_->getBackendName() == "gloo";
  at::Device device_;  // of the buffers passed to c10d; CUDA: the creating thread's current device
  const pid_t pid_;

  std::mutex mutex_;  // guards all members below except the threads
  std::condition_variable_any changed_;
  std::set<int> dead_;                                          // channels, whose waits end at once
  std::map<int, std::list<message::ControlMessage>> received_;  // by channel, until they are polled
  std::map<int, Time> departures_;  // of peers: when to end a wait for one
  std::vector<Wait*> waits_;
  std::list<Sent> sent_;
  std::vector<std::pair<c10::intrusive_ptr<c10d::Work>, at::Tensor>> kept_;  // not done
  std::vector<bool> stuck_;   // peers with an unfinished message whose memory is gone
  bool has_changed_ = false;  // waits_, since the timer last checked
  c10::intrusive_ptr<c10d::Work> listening_;
  std::jthread control_;
  std::jthread timer_;
};

}  // namespace lockstep::nn::detail
