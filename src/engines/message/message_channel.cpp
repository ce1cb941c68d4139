#include "engines/message/message_channel.hpp"

#include <fmt/format.h>

#include <numeric>
#include <utility>

#include "record/progress.hpp"
#include "record/signature.hpp"

namespace lockstep::message {

MessageChannel::MessageChannel(std::unique_ptr<Transport> transport)
    : control_(std::make_shared<Control>(std::move(transport))),
      world_(control_),
      transport_(control_->transport()),
      members_(static_cast<std::size_t>(transport_.size())) {
  std::iota(members_.begin(), members_.end(), 0);
}

MessageChannel::MessageChannel(std::unique_ptr<Transport> transport, std::vector<int> members,
                               std::shared_ptr<Control> world)
    : control_(std::make_shared<Control>(std::move(transport))),
      world_(std::move(world)),
      transport_(control_->transport()),
      members_(std::move(members)) {}

void MessageChannel::exchange(std::span<const Message> messages, const Call& call, Limit& limit) {
  perform(messages, call, limit, nullptr);
}

void MessageChannel::begin(const Call& call) {
  is_pair_ = internal::is_pair(call.op);
  if (is_pair_) return;
  ++n_collectives_;
  if (has_levels_) control_->begin_collective(headers_.of(call));
}

bool MessageChannel::perform(std::span<const Message> messages, const Call& call, Limit& limit,
                             StatusQuery* query) {
  if (const int n_polls = transport_.n_polls_before_exchange(); n_polls > 0) {
    for (int i = 0; i < n_polls; ++i) poll_control();
    throw_if_failed(call);
  }
  struct CancelUnlessComplete {
    Transport& transport;
    bool is_complete = false;
    ~CancelUnlessComplete() {
      if (!is_complete) transport.cancel();
    }
  } exchange{transport_};
  try {
    transport_.start(messages, call);
    if (call.progress != nullptr) call.progress->arrived(call);
    exchange.is_complete = transport_.test() || wait(call, limit, query);
  } catch (const TransportError& error) {
    fail_transport(error, call);
  }
  return exchange.is_complete;
}

std::vector<std::byte> MessageChannel::open_part(const Call& call) {
  try {
    return transport_.open_part();
  } catch (const TransportError& error) {
    fail_transport(error, call);
  }
}

std::unique_ptr<MessageChannel> MessageChannel::split(const std::vector<int>& members,
                                                      std::int64_t number, const Call& call,
                                                      std::span<const std::byte> addresses) {
  std::vector<int> world_ranks;
  for (const int member : members) {
    world_ranks.push_back(members_[static_cast<std::size_t>(member)]);
  }
  try {
    if (number > transport_.last_channel()) {
      throw TransportError(
          fmt::format("too many splits: at most {} groups, because their numbers are not "
                      "reused; keep groups instead of creating them again",
                      transport_.last_channel()));
    }
    auto part = transport_.split(members, static_cast<std::int32_t>(number), addresses);
    return std::unique_ptr<MessageChannel>(
        new MessageChannel(std::move(part), std::move(world_ranks), world_));
  } catch (const TransportError& error) {
    fail_transport(error, call);
  }
}

}  // namespace lockstep::message
