#include "nn/gloo_engine/c10d_wire.hpp"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "base/no_sigpipe.hpp"
#include "base/truncated_text.hpp"

namespace lockstep::nn::detail {
namespace {

using Clock = lockstep::detail::JobClock;
using message::ControlMessage;
using std::chrono::milliseconds;

constexpr int kControlTag = 0;
/// How long a leaving rank waits for its control messages to be delivered.
constexpr milliseconds kControlLimit{1000};
/// How often listen_to_each() looks for the control messages of each peer.
constexpr milliseconds kControlPoll{20};
/// How long a wait past its deadline polls for one more message.
constexpr milliseconds kFinalPoll{1};
/// A peer's messages arrive before its departure, on the same connection; this is for the threads
/// that wait for them.
constexpr milliseconds kTransitTime{500};
/// Gloo's own limit expires after ours; ours leaves its connections intact.
constexpr milliseconds kSlack{5000};
/// Messages up to this size use our own buffers. This costs a copy, but a call that gives up leaves
/// its connections usable.
constexpr std::size_t kOwnBytes = 64 << 10;

/// Runs f, of which a failure is nobody's error: the call says why.
template <class F>
void ignoring_errors(const F& f) noexcept {
  try {
    f();
  } catch (...) {
  }
}

/// Of a group that nobody else has. NCCL wants to be told that its end is meant; older libtorches
/// have no way to.
template <class ProcessGroup>
void end(ProcessGroup& group, bool has_failed) noexcept {
  if constexpr (requires { group.shutdown(), group.abort(); }) {
    // It ends with its last reference anyway.
    ignoring_errors([&] { has_failed ? group.abort() : group.shutdown(); });
  }
}

}  // namespace

/// A control message as c10d transfers it.
struct Wire::ControlBytes {
  std::int32_t channel;
  ControlMessage::Kind kind;
  internal::Failure::Kind failure;
  std::int32_t culprit;
  internal::PeerList peers;
  message::WaitState wait_state;
  std::int32_t n_text;
  std::array<char, 65536 - 244> text;  // n_text bytes of it are sent

  std::size_t n_bytes() const {
    return offsetof(ControlBytes, text) + static_cast<std::size_t>(n_text);
  }
};

std::shared_ptr<Wire> Wire::make(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                 c10::intrusive_ptr<c10d::Store> store,
                                 std::shared_ptr<const shared::Elastic> elastic) {
  return {new Wire(std::move(group), std::move(store), std::move(elastic)), [](Wire* wire) {
            if (!wire->is_forked_child()) delete wire;
          }};
}

Wire::Wire(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store,
           std::shared_ptr<const shared::Elastic> elastic)
    : store_(std::move(store)),
      elastic_(std::move(elastic)),
      group_(std::move(group)),
      device_(group_->getBackendName() == "nccl"
                  ? c10::impl::VirtualGuardImpl(at::kCUDA).getDevice()
                  : at::Device(at::kCPU)),
      pid_(::getpid()),
      stuck_(static_cast<std::size_t>(group_->getSize())) {
  timer_ = std::jthread([this](const std::stop_token& stop) { keep_time(stop); });
  ::pthread_setname_np(timer_.native_handle(), "c10d-timer");
  control_ = std::jthread([this](const std::stop_token& stop) { listen(stop); });
  ::pthread_setname_np(control_.native_handle(), "c10d-control");
}

bool Wire::is_forked_child() const noexcept { return ::getpid() != pid_; }

Wire::~Wire() {
  flush();
  control_.request_stop();
  {
    const std::lock_guard lock(mutex_);
    // A process group that cannot abort has no control thread either.
    if (listening_) abort(listening_.get());
  }
  control_.join();
  timer_.request_stop();
  timer_.join();
  if (group_.use_count() == 1) end(*group_, !dead_.empty());
}

at::Tensor Wire::tensor_of(void* data, std::size_t n_bytes) const {
  return at::from_blob(data, {static_cast<std::int64_t>(n_bytes)}, at::kByte);
}

Wire::Transfer Wire::stage(const Message& message, int peer) {
  {
    const std::lock_guard lock(mutex_);
    if (stuck_[static_cast<std::size_t>(peer)]) {
      throw std::runtime_error(
          "a call that gave up left a part of its data on this connection, which carries no other "
          "since; leave the world (destroy_dist) and join it again");
    }
  }
  at::Tensor callers = tensor_of(message.data, message.n_bytes);
  if (message.n_bytes > kOwnBytes && device_.is_cpu()) return {std::move(callers), &message};
  Transfer transfer{at::empty(callers.sizes(), callers.options().device(device_)), &message};
  if (message.direction == Message::Direction::send) transfer.tensor.copy_(callers);
  return transfer;
}

void Wire::unstage(const Transfer& transfer) const {
  const Message& message = *transfer.message;
  if (message.direction == Message::Direction::send || transfer.is_callers()) return;
  tensor_of(message.data, message.n_bytes).copy_(transfer.tensor);
}

void Wire::start(Wait& wait) {
  const std::lock_guard lock(mutex_);
  waits_.push_back(&wait);
  has_changed_ = true;
  changed_.notify_all();
  if (dead_.contains(wait.channel)) abort(wait.works);  // died before this wait was listed
}

void Wire::abort(c10d::Work* work) noexcept {
  // If it is not abortable, the process group's own limit ends it, kSlack later.
  ignoring_errors([&] { work->abort(); });
}

void Wire::abort(const Works& works) noexcept {
  for (const auto& work : works) abort(work.get());
}

bool Wire::wait_for(Wait& wait, c10d::Work& work, int peer) {
  auto deadline = wait.deadline;
  {
    const std::lock_guard lock(mutex_);
    wait.current = &work;
    wait.peer = peer;
    wait.has_peer_left = false;
    const auto soon = Clock::now() + kFinalPoll;
    if (wait.deadline < soon) wait.deadline = deadline = soon;
    if (deadline == soon || departures_.contains(peer)) {
      has_changed_ = true;
      changed_.notify_all();
    }
  }
  return work.wait(std::chrono::duration_cast<milliseconds>(deadline - Clock::now()) + kSlack);
}

bool Wire::wait_for(Wait& wait, std::size_t i) {
  const auto deadline = wait.deadline;
  c10d::Work& work = *wait.works[i];
  if (wait_for(wait, work, wait.peers.empty() ? kNoPeer : wait.peers[i])) return true;
  {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(wait.has_peer_left, false)) return false;
    wait.deadline = Clock::now();  // also of the works that follow
  }
  if (!wait_for(wait, work, kNoPeer)) return false;
  // The abort had undone it: the peer left after this call.
  const std::lock_guard lock(mutex_);
  wait.deadline = deadline;
  has_changed_ = true;
  changed_.notify_all();
  return true;
}

void Wire::pause(Wait& wait) {
  const std::lock_guard lock(mutex_);
  std::erase(waits_, &wait);
  wait.current = nullptr;
}

void Wire::finish(Wait& wait, std::span<Transfer> transfers) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase(waits_, &wait);
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    if (transfers[i].is_done) continue;
    try {
      if (!transfers[i].is_callers()) {
        kept_.push_back({std::move(wait.works[i]), std::move(transfers[i].tensor)});
        continue;
      }
    } catch (...) {  // no memory
    }
    stuck_[static_cast<std::size_t>(wait.peers[i])] = true;
  }
}

void Wire::send_control(int channel, const ControlMessage& message,
                        std::span<const int> to) noexcept {
  if (is_forked_child()) return;
  // Without memory the peers see the closed connection or their timeout.
  ignoring_errors([&] {
    if (message.kind ==
        ControlMessage::Kind::failure) {  // another thread of this rank may be waiting
      const std::lock_guard lock(mutex_);
      end_waits(channel);
    }
    const internal::Failure& failure = message.failure;
    auto bytes = std::make_unique<ControlBytes>();
    bytes->channel = channel;
    bytes->kind = message.kind;
    bytes->failure = failure.kind;
    bytes->culprit = failure.culprit;
    bytes->peers = failure.peers;
    bytes->wait_state = message.wait_state;
    base::copy_truncated(bytes->text, failure.text);
    bytes->n_text = static_cast<std::int32_t>(base::text_in(bytes->text).size());
    Sent sent{nullptr, {}, Clock::now() + kControlLimit};
    const base::NoSigpipe no_sigpipe;
    for (const int peer : to) {
      if (peer == rank()) continue;
      std::vector<at::Tensor> tensors{tensor_of(bytes.get(), bytes->n_bytes())};
      // The peer may be gone too.
      ignoring_errors([&] { sent.works.push_back(group_->send(tensors, peer, kControlTag)); });
    }
    sent.bytes = std::move(bytes);
    const std::lock_guard lock(mutex_);
    sent_.push_back(std::move(sent));
  });
  if (message.kind == ControlMessage::Kind::departure) flush();
}

std::optional<ControlMessage> Wire::poll_control(int channel) {
  if (is_forked_child()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const auto found = received_.find(channel);
  if (found == received_.end()) return std::nullopt;
  auto message = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) received_.erase(found);
  return message;
}

void Wire::flush() noexcept {
  if (is_forked_child()) return;
  std::list<Sent> all;
  {
    const std::lock_guard lock(mutex_);
    all.swap(sent_);
  }
  for (Sent& sent : all) {
    Wait wait{kControlTag, sent.deadline, std::move(sent.works), {}};  // ended by the timer alone
    ignoring_errors([&] {
      start(wait);
      for (std::size_t i = 0; i < wait.works.size(); ++i) {
        ignoring_errors([&] { wait_for(wait, i); });  // of a peer that is gone
      }
    });
    finish(wait, {});
  }
}

void Wire::listen(const std::stop_token& stop) {
  listen_to_any(stop);
  if (is_gloo_ && !stop.stop_requested()) listen_to_each(stop);
}

void Wire::listen_to_any(const std::stop_token& stop) {
  const auto bytes = std::make_unique<ControlBytes>();
  // An aborted receive stays posted, and a leaving peer's message would be written to the buffer:
  // the work must be destroyed before it.
  const auto stop_receiving = c10::make_scope_exit([this] {
    const std::lock_guard lock(mutex_);
    listening_.reset();
  });
  std::vector<at::Tensor> tensors{tensor_of(bytes.get(), sizeof(ControlBytes))};
  int n_lost = 0;
  while (!stop.stop_requested()) {
    c10::intrusive_ptr<c10d::Work> work;
    try {
      const std::lock_guard lock(mutex_);
      if (stop.stop_requested()) return;
      work = listening_ = group_->recvAnysource(tensors, kControlTag);
    } catch (...) {
      return;  // unsupported by this process group, or it is broken: its users get the error
    }
    try {
      if (!work->wait(std::chrono::hours(24 * 365))) continue;  // aborted
    } catch (...) {
      // A peer was lost while it sent a message. Those of the others still come.
      if (++n_lost < size()) continue;
      return;
    }
    receive(*bytes);
  }
}

void Wire::listen_to_each(const std::stop_token& stop) {
  struct Receive {
    int peer;
    std::unique_ptr<ControlBytes> bytes = std::make_unique<ControlBytes>();
    c10::intrusive_ptr<c10d::Work> work = {};  // destroyed before its memory
  };
  std::list<Receive> receives;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) receives.push_back({.peer = peer});
  }
  while (!stop.stop_requested() && !receives.empty()) {
    // The first is waited for until then, and the others are only polled.
    Wait wait{kControlTag, Clock::now() + kControlPoll, {}, {}};
    start(wait);
    std::erase_if(receives, [&](Receive& one) {
      try {
        const bool has_arrived = one.work && wait_for(wait, *one.work, kNoPeer);
        if (has_arrived) receive(*one.bytes);
        if (has_arrived || !one.work) {
          std::vector<at::Tensor> tensors{tensor_of(one.bytes.get(), sizeof(ControlBytes))};
          one.work = group_->recv(tensors, one.peer, kControlTag);
        }
        return false;
      } catch (...) {
        return true;  // the peer is gone
      }
    });
    pause(wait);
  }
}

void Wire::receive(const ControlBytes& bytes) {
  const auto n_text = std::min(static_cast<std::size_t>(bytes.n_text), bytes.text.size());
  ControlMessage message{.kind = bytes.kind,
                         .failure = {.kind = bytes.failure,
                                     .culprit = bytes.culprit,
                                     .text = std::string(bytes.text.data(), n_text),
                                     .peers = bytes.peers},
                         .wait_state = bytes.wait_state};
  const std::lock_guard lock(mutex_);
  if (message.kind == ControlMessage::Kind::failure) {
    if (dead_.contains(bytes.channel)) return;  // the first failure counts
    end_waits(bytes.channel);
  }
  // Later if its connection stays open, as while a group of it is kept; else the connection's end
  // ends the wait.
  if (message.kind == ControlMessage::Kind::departure) {
    departures_.emplace(bytes.culprit, Clock::now() + kTransitTime);
    has_changed_ = true;
    changed_.notify_all();
  }
  received_[bytes.channel].push_back(std::move(message));
}

void Wire::end_waits(int channel) {
  dead_.insert(channel);
  for (const Wait* wait : waits_) {
    if (wait->channel == channel) abort(wait->works);
  }
}

Wire::Time Wire::end_of(const Wait& wait) const {
  const auto departure = departures_.find(wait.peer);
  if (wait.current == nullptr || departure == departures_.end()) return wait.deadline;
  return std::min(wait.deadline, departure->second);
}

void Wire::keep_time(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    has_changed_ = false;
    auto next = Clock::now() + std::chrono::hours(1);
    for (Wait* wait : waits_) {
      const auto now = Clock::now();
      if (const auto end = end_of(*wait); end > now) {
        next = std::min(next, end);
      } else if (wait->current != nullptr) {
        wait->has_peer_left = wait->deadline > now;
        abort(std::exchange(wait->current, nullptr));
      }
    }
    changed_.wait_until(lock, stop, next, [this] { return has_changed_; });
  }
}

}  // namespace lockstep::nn::detail
