#include "nn/c10d/c10d_wire.hpp"
#include "base/no_sigpipe.hpp"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <lockstep/error.hpp>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "record/recorder.hpp"

namespace lockstep::nn::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kControlTag = 0;
constexpr int kWholeRank = -1;  // in place of a channel
constexpr int kNobody = -1;     // in place of a culprit: the text names the cause
/// How long a leaving rank waits for its notices to be delivered.
constexpr milliseconds kControlLimit{1000};
/// The notice of a rank whose connection broke may still be arriving on another thread.
constexpr milliseconds kControlDelay{200};
/// How long a wait past its deadline polls for one more message.
constexpr milliseconds kFinalPoll{5};
/// Gloo's own limit expires after ours; ours leaves its connections intact.
constexpr milliseconds kSlack{5000};
/// Messages up to this size use our own buffers. This costs a copy, but a call that gives up leaves
/// its connections usable.
constexpr std::size_t kOwnBytes = 64 << 10;

/// libtorch's messages begin with the source line and may end with a C++ stack.
std::string text_of(const std::exception& error) {
  std::string text = error.what();
  return text.substr(0, text.find("\nException raised from"));
}

bool says_closed(std::string_view text) {
  for (const std::string_view sign :
       {"closed by peer", "reset by peer", "Broken pipe", "Socket closed", "Connection refused"}) {
    if (text.find(sign) != std::string_view::npos) return true;
  }
  return false;
}

}  // namespace

/// A message to a peer's control thread.
struct Wire::ControlMessage {
  std::int32_t channel;
  std::int32_t notice;
  std::int32_t culprit;
  std::int32_t n_text;
  std::array<char, 65536 - 16> text;  // n_text bytes of it are sent

  std::size_t n_bytes() const {
    return offsetof(ControlMessage, text) + static_cast<std::size_t>(n_text);
  }
};

std::shared_ptr<Wire> Wire::make(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                 c10::intrusive_ptr<c10d::Store> store) {
  return {new Wire(std::move(group), std::move(store)), [](Wire* wire) {
            if (!wire->is_copy()) delete wire;
          }};
}

Wire::Wire(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store)
    : store_(std::move(store)),
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

bool Wire::is_copy() const noexcept { return ::getpid() != pid_; }

Wire::~Wire() {
  flush();
  control_.request_stop();
  {
    const std::lock_guard lock(mutex_);
    try {
      if (listening_) listening_->abort();
    } catch (...) {  // a process group that cannot abort has no control thread either
    }
  }
  control_.join();
  timer_.request_stop();
  timer_.join();
}

at::Tensor Wire::tensor_of(void* data, std::size_t n_bytes) const {
  return at::from_blob(data, {static_cast<std::int64_t>(n_bytes)}, at::kByte);
}

Wire::Parcel Wire::pack(const Message& message, int peer) {
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
  Parcel parcel{at::empty(callers.sizes(), callers.options().device(device_)), &message};
  if (message.way == Message::Way::send) parcel.tensor.copy_(callers);
  return parcel;
}

void Wire::unpack(const Parcel& parcel) const {
  const Message& message = *parcel.message;
  if (message.way == Message::Way::send || parcel.is_callers()) return;
  tensor_of(message.data, message.n_bytes).copy_(parcel.tensor);
}

int Wire::next_channel() {
  const std::lock_guard lock(mutex_);
  // Unique over all ranks, and never the control tag.
  return 1 + rank() + size() * n_channels_++;
}

void Wire::start(Wait& wait) {
  const std::lock_guard lock(mutex_);
  waits_.push_back(&wait);
  has_changed_ = true;
  changed_.notify_all();
  if (dead_.contains(wait.channel)) abort(wait.works);  // notified before this wait was listed
}

void Wire::abort(c10d::Work* work) noexcept {
  try {
    work->abort();
  } catch (...) {  // not abortable: the process group's own limit ends it, kSlack later
  }
}

void Wire::abort(const Works& works) noexcept {
  for (const auto& work : works) abort(work.get());
}

bool Wire::wait_for(Wait& wait, std::size_t i) {
  const auto& work = wait.works[i];
  auto end = wait.end;
  {
    const std::lock_guard lock(mutex_);
    wait.current = work.get();
    if (const auto soon = Clock::now() + kFinalPoll; wait.end < soon) {
      wait.end = end = soon;
      has_changed_ = true;
      changed_.notify_all();
    }
  }
  return work->wait(std::chrono::duration_cast<milliseconds>(end - Clock::now()) + kSlack);
}

void Wire::finish(Wait& wait, std::span<Parcel> parcels) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase(waits_, &wait);
  for (std::size_t i = 0; i < parcels.size(); ++i) {
    if (parcels[i].is_done) continue;
    try {
      if (!parcels[i].is_callers()) {
        kept_.push_back({std::move(wait.works[i]), std::move(parcels[i].tensor)});
        continue;
      }
    } catch (...) {  // no memory
    }
    stuck_[static_cast<std::size_t>(wait.peers[i])] = true;
  }
}

std::optional<Wire::Verdict> Wire::death_of(int channel) {
  const std::lock_guard lock(mutex_);
  const auto found = dead_.find(channel);
  return found == dead_.end() ? std::nullopt : std::optional(found->second);
}

std::optional<Wire::Verdict> Wire::departure_of(std::span<const int> members) {
  const std::lock_guard lock(mutex_);
  for (const int member : members) {
    if (const auto found = gone_.find(member); found != gone_.end()) return found->second;
  }
  return std::nullopt;
}

void Wire::tell(int channel, const Verdict& verdict, std::span<const int> to) noexcept {
  if (is_copy()) return;
  try {
    auto message = std::make_unique<ControlMessage>();
    message->channel = channel;
    message->notice = static_cast<std::int32_t>(verdict.notice);
    message->culprit = verdict.culprit;
    message->n_text =
        static_cast<std::int32_t>(verdict.text.copy(message->text.data(), message->text.size()));
    if (channel != kWholeRank) receive(*message);  // another thread of this rank may be waiting
    Sent sent{nullptr, {}, Clock::now() + kControlLimit};
    const base::NoSigpipe no_sigpipe;
    for (const int peer : to) {
      if (peer == rank()) continue;
      std::vector<at::Tensor> tensors{tensor_of(message.get(), message->n_bytes())};
      try {
        sent.works.push_back(group_->send(tensors, peer, kControlTag));
      } catch (...) {  // the peer is gone too
      }
    }
    sent.message = std::move(message);
    const std::lock_guard lock(mutex_);
    sent_.push_back(std::move(sent));
  } catch (...) {  // no memory: the peers see the closed connection or their timeout
  }
}

void Wire::flush() noexcept {
  if (is_copy()) return;
  std::list<Sent> all;
  {
    const std::lock_guard lock(mutex_);
    all.swap(sent_);
  }
  for (Sent& sent : all) {
    Wait wait{kControlTag, sent.end, std::move(sent.works), {}};  // ended by the timer alone
    try {
      start(wait);
      for (std::size_t i = 0; i < wait.works.size(); ++i) {
        try {
          wait_for(wait, i);
        } catch (...) {
        }
      }
    } catch (...) {
    }
    finish(wait, {});
  }
}

void Wire::listen(const std::stop_token& stop) {
  const auto message = std::make_unique<ControlMessage>();
  // An aborted receive stays posted, and a peer's notice of leaving would be written to the buffer:
  // the work must be destroyed before it.
  struct StopReceiving {
    Wire& wire;
    ~StopReceiving() {
      const std::lock_guard lock(wire.mutex_);
      wire.listening_.reset();
    }
  } const stop_receiving{*this};
  std::vector<at::Tensor> tensors{tensor_of(message.get(), sizeof(ControlMessage))};
  while (!stop.stop_requested()) {
    c10::intrusive_ptr<c10d::Work> work;
    try {
      {
        const std::lock_guard lock(mutex_);
        if (stop.stop_requested()) return;
        work = listening_ = group_->recvAnysource(tensors, kControlTag);
      }
      if (!work->wait(std::chrono::hours(24 * 365))) continue;  // aborted
    } catch (...) {
      return;  // unsupported by this process group, or it is broken: its users get the error
    }
    receive(*message);
  }
}

void Wire::receive(const ControlMessage& message) {
  const auto n_text = std::min(static_cast<std::size_t>(message.n_text), message.text.size());
  const Verdict verdict{static_cast<Notice>(message.notice), message.culprit,
                        std::string(message.text.data(), n_text)};
  const std::lock_guard lock(mutex_);
  if (message.channel == kWholeRank) {
    // Its messages may have arrived or be about to; the rest end when its connection closes.
    gone_.emplace(message.culprit, verdict);
    return;
  }
  dead_.emplace(message.channel, verdict);
  for (const Wait* wait : waits_) {
    if (wait->channel == message.channel) abort(wait->works);
  }
}

void Wire::keep_time(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    has_changed_ = false;
    auto next = Clock::now() + std::chrono::hours(1);
    for (Wait* wait : waits_) {
      if (wait->end > Clock::now()) {
        next = std::min(next, wait->end);
      } else if (wait->current != nullptr) {
        abort(std::exchange(wait->current, nullptr));
      }
    }
    changed_.wait_until(lock, stop, next, [this] { return has_changed_; });
  }
}

// -------------------------------------------------------------------------------------------------

Channel::Channel(std::shared_ptr<Wire> wire)
    : wire_(std::move(wire)),
      members_(static_cast<std::size_t>(wire_->size())),
      rank_(wire_->rank()) {
  std::iota(members_.begin(), members_.end(), 0);
  // The first tag of rank 0, on every rank: no communication needed.
  tag_ = 1;
  if (rank_ == 0) wire_->next_channel();
}

Channel::Channel(const Channel& parent, const std::vector<int>& members, const Call& call,
                 Clock::time_point end)
    : wire_(parent.wire_), rank_(0), tag_(0) {
  for (const int member : members) {
    members_.push_back(parent.members_[static_cast<std::size_t>(member)]);
  }
  rank_ = rank_of(wire_->rank());
  // The first member chooses a tag that no other channel uses.
  std::vector<Message> messages;
  if (rank_ == 0) tag_ = wire_->next_channel();
  for (std::size_t r = 1; rank_ == 0 && r < members.size(); ++r) {
    messages.push_back({Message::Way::send, members[r], &tag_, sizeof(tag_)});
  }
  if (rank_ > 0) messages.push_back({Message::Way::receive, members[0], &tag_, sizeof(tag_)});
  parent.post(messages, call, end);
}

int Channel::rank_of(int wire_rank) const {
  return static_cast<int>(std::ranges::find(members_, wire_rank) - members_.begin());
}

void Channel::post(std::span<const Message> messages, const Call& call,
                   Clock::time_point end) const {
  if (wire_->is_copy()) {
    throw UsageError(lockstep::context_of(call, rank_),
                     "this process is a copy (fork) of a rank, whose connections it shares; only "
                     "the rank itself may call");
  }
  if (const auto verdict = wire_->death_of(tag_)) fail(*verdict, call);
  if (call.track != nullptr) call.track->slept(call);
  std::vector<const Message*> ordered;
  for (const Message& message : messages) ordered.push_back(&message);
  // Of two ranks the lower sends first: NCCL runs the messages of a pair in the order given.
  std::ranges::stable_partition(ordered, [this](const Message* message) {
    return (message->way == Message::Way::send) == (rank_ < message->peer);
  });

  Wire::Wait wait{tag_, end, {}, {}};
  std::vector<Wire::Parcel> parcels;
  const base::NoSigpipe no_sigpipe;
  for (const Message* message : ordered) {
    const int peer = members_[static_cast<std::size_t>(message->peer)];
    try {
      Wire::Parcel parcel = wire_->pack(*message, peer);
      std::vector<at::Tensor> one{parcel.tensor};
      wait.works.push_back(message->way == Message::Way::send
                               ? wire_->group_->send(one, peer, tag_)
                               : wire_->group_->recv(one, peer, tag_));
      wait.peers.push_back(peer);
      parcels.push_back(std::move(parcel));
    } catch (const std::exception& error) {
      wire_->finish(wait, parcels);
      fail_connection(peer, text_of(error), call);
    }
  }

  wire_->start(wait);
  int culprit = -1;
  std::string text;
  std::vector<int> ended;  // before their deadline
  for (std::size_t i = 0; i < wait.works.size() && culprit < 0; ++i) {
    try {
      parcels[i].is_done = wire_->wait_for(wait, i);
      if (!parcels[i].is_done) ended.push_back(wait.peers[i]);
    } catch (const std::exception& error) {
      culprit = wait.peers[i];
      text = text_of(error);
    }
  }
  wire_->finish(wait, parcels);
  if (culprit >= 0) fail_connection(culprit, text, call);
  if (!ended.empty()) {
    fail_if_known(ended, call);
    fail_late(std::move(ended), call);
  }
  for (const Wire::Parcel& parcel : parcels) wire_->unpack(parcel);
}

void Channel::fail_if_known(std::span<const int> ranks, const Call& call) const {
  if (const auto verdict = wire_->death_of(tag_)) fail(*verdict, call);
  if (const auto verdict = wire_->departure_of(ranks)) {
    // A rank waiting for this one, and not for the one that left, would otherwise time out.
    tell(verdict->notice, verdict->culprit, verdict->text);
    fail(*verdict, call);
  }
}

void Channel::fail_connection(int culprit, const std::string& text, const Call& call) const {
  // The peer may have sent the reason to another thread.
  for (const auto end = Clock::now() + kControlDelay; Clock::now() < end;) {
    fail_if_known(std::span(&culprit, 1), call);
    std::this_thread::sleep_for(milliseconds(5));
  }
  if (says_closed(text)) {
    tell(Wire::Notice::lost, culprit, text);
    fail({Wire::Notice::lost, culprit, text}, call);
  }
  tell(Wire::Notice::failed, wire_->rank(), text);
  throw EngineError(lockstep::context_of(call, rank_),
                    fmt::format("with rank {}: {}", rank_of(culprit), text));
}

void Channel::fail_late(std::vector<int> late, const Call& call) const {
  for (int& rank : late) rank = rank_of(rank);
  std::ranges::sort(late);
  late.erase(std::unique(late.begin(), late.end()), late.end());
  const std::string text = fmt::format("rank {} waited {:g} s for rank{} {} of {}", rank_,
                                       static_cast<double>(call.timeout.count()) / 1000,
                                       late.size() == 1 ? "" : "s", fmt::join(late, ", "), size());
  tell(Wire::Notice::late, wire_->rank(), text);
  throw TimeoutError(lockstep::context_of(call, rank_), text);
}

void Channel::fail_mismatch(const std::string& table, const Call& call) {
  tell(Wire::Notice::mismatch, wire_->rank(), table);
  throw MismatchError(lockstep::context_of(call, rank_), table);
}

void Channel::fail(const Wire::Verdict& verdict, const Call& call) const {
  const auto context = lockstep::context_of(call, rank_);
  const int culprit = rank_of(verdict.culprit);
  const bool is_told_whole = verdict.culprit == kNobody;
  switch (verdict.notice) {
    case Wire::Notice::left:
      throw PeerLost(context,
                     fmt::format("rank {} left the world (destroy_dist, or its end)", culprit));
    case Wire::Notice::failed:
      if (is_told_whole) throw PeerFailed(context, verdict.text);
      throw PeerFailed(context, fmt::format("rank {} failed: {}", culprit, verdict.text));
    case Wire::Notice::lost:
      if (is_told_whole) throw PeerLost(context, verdict.text);
      throw PeerLost(context, fmt::format("rank {} is gone: it was killed, crashed, or cannot be "
                                          "reached any more ({})",
                                          culprit, verdict.text));
    case Wire::Notice::late: throw TimeoutError(context, verdict.text);
    case Wire::Notice::mismatch: throw MismatchError(context, verdict.text);
  }
  throw EngineError(context, verdict.text);
}

void Channel::tell(Wire::Notice notice, int culprit, const std::string& text) const {
  wire_->tell(tag_, {notice, culprit, text}, members_);
}

void Channel::abandon(std::string_view reason) noexcept {
  try {
    tell(Wire::Notice::failed, wire_->rank(), std::string(reason));
  } catch (...) {  // no memory for the text: the peers time out
  }
}

void Channel::end_with(const Error& error) noexcept {
  try {
    using enum Wire::Notice;
    if (dynamic_cast<const MismatchError*>(&error) != nullptr) {
      tell(mismatch, kNobody, error.text());
    } else if (dynamic_cast<const TimeoutError*>(&error) != nullptr) {
      tell(late, kNobody, error.text());
    } else if (dynamic_cast<const PeerLost*>(&error) != nullptr) {
      tell(lost, kNobody, error.text());
    } else if (dynamic_cast<const PeerFailed*>(&error) != nullptr) {
      tell(failed, kNobody, error.text());
    } else {
      tell(failed, wire_->rank(), error.text());
    }
  } catch (...) {  // no memory for the text: the peers time out
  }
}

void Channel::leave(std::string_view failure) noexcept {
  try {
    std::vector<int> all(static_cast<std::size_t>(wire_->size()));
    std::iota(all.begin(), all.end(), 0);
    const auto notice = failure.empty() ? Wire::Notice::left : Wire::Notice::failed;
    wire_->tell(kWholeRank, {notice, wire_->rank(), std::string(failure)}, all);
    wire_->flush();
  } catch (...) {
  }
}

}  // namespace lockstep::nn::detail
