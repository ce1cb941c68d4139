#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <lockstep/error.hpp>
#include <thread>
#include <utility>

#include "base/futex.hpp"
#include "base/patience.hpp"
#include "engines/shared/protocol/refusals.hpp"
#include "engines/shared/protocol/tagged_messages.hpp"
#include "group/failure.hpp"

namespace lockstep::shared {
namespace {

using std::chrono::milliseconds;

std::string name_of_rank(int rank) { return rank < 0 ? "any rank" : fmt::format("rank {}", rank); }

}  // namespace

void TaggedMessages::throw_ending(const Request& request, const FirstEnded& first) const {
  internal::throw_failure(first.failure(), request.context(-1));
}

void TaggedMessages::check(const Request& request, detail::TimeLimit& limit, unsigned round) const {
  channel_.throw_if_failed(request.call_);
  const int n_ranks = channel_.size();
  // No peer copies to or from a rank that has left.
  if (channel_.membership()->ending_of(channel_.world_rank(channel_.rank()),
                                       /*ask_system=*/false)) {
    throw request.left_error();
  }
  const bool is_any = request.call_.root == kAnySource;
  int n_left = 0;
  FirstEnded left, lost;
  for (int r = 0; r < n_ranks; ++r) {
    if (r == channel_.rank() || (!is_any && r != request.call_.root)) continue;
    const bool asks = !is_any || asks_system(static_cast<std::size_t>(r),
                                             static_cast<std::size_t>(n_ranks), round);
    // If the peer has taken this message before it refused one, its copy is what counts.
    const std::uint32_t peer_n_refused =
        is_any ? 0 : n_refused_by(r, !request.is_send(), channel_.rank());
    const std::uint32_t n_refused = peer_n_refused & ~RefusedPairs::kMismatchSeen;
    const bool has_peer_seen_it =
        n_refused < request.n_refused_ && (peer_n_refused & RefusedPairs::kMismatchSeen) != 0;
    if (n_refused > request.n_refused_ || has_peer_seen_it) {
      std::rethrow_exception(request.refusal_error(r, peer_n_refused));
    }
    const auto ending = channel_.membership()->ending_of(channel_.world_rank(r), asks);
    if (!ending) continue;
    ++n_left;
    (ending->is_orderly ? left : lost).add(r, *ending);
  }
  if (!lost.is_empty()) throw_ending(request, lost);
  // Ranks that have sent all they had may leave while this one waits for others.
  if (n_left == (is_any ? n_ranks - 1 : 1)) throw_ending(request, left);
  if (channel_.membership()->is_over()) {
    internal::throw_failure(channel_.membership()->why_over(), request.context(-1));
  }
  if (limit.is_over()) throw_timeout(request, limit.whole());
}

void TaggedMessages::throw_timeout(const Request& request, milliseconds limit) const {
  const int peer = request.call_.root;
  std::string text = fmt::format("rank {} waited {:g} s for {} to {} (tag {})", channel_.rank(),
                                 std::chrono::duration<double>(limit).count(), name_of_rank(peer),
                                 request.is_send() ? "receive" : "send", request.tag_);
  const int copier = request.copier();
  for (int r = 0; r < channel_.size(); ++r) {
    if (peer == kAnySource ? r == channel_.rank() : r != peer) continue;
    const std::string waits = pending_of(r);
    if (peer == kAnySource && waits.empty() && r != copier) continue;
    text += fmt::format("\n  rank {} {}{}{}{}", r,
                        channel_.membership()->liveness_text(channel_.world_rank(r)),
                        r == copier ? ", and has begun to copy the message" : "",
                        waits.empty() ? "" : ", and waits in ", waits);
  }
  throw TimeoutError(request.context(peer == kAnySource ? copier : peer), text);
}

/// "send to rank 1 (tag 4), recv from any rank (tag 0)": the first of its unmatched messages.
std::string TaggedMessages::pending_of(int rank) const {
  constexpr int kMax = 4;
  std::string text;
  int n = 0;
  for (std::int32_t i = rank * n_entries_; i < rank * n_entries_ + n_entries_of(rank) && n < kMax;
       ++i) {
    const RequestEntry& entry = entry_at(i);
    if (entry.state.load(std::memory_order_acquire) != RequestEntry::unmatched) continue;
    const bool is_send = entry.is_send.load(std::memory_order_relaxed) != 0;
    text += fmt::format("{}{} {} (tag {})", n++ == 0 ? "" : ", ", is_send ? "send to" : "recv from",
                        name_of_rank(entry.peer.load(std::memory_order_relaxed)),
                        entry.tag.load(std::memory_order_relaxed));
  }
  return text;
}

TaggedMessages::Request::Request(const TaggedMessages& messages, const Call& call, int tag,
                                 std::any memory)
    : messages_(messages),
      call_(call),
      tag_(tag),
      n_refused_(messages.n_refused_by(messages.channel_.rank(), is_send(), call.root) &
                 ~RefusedPairs::kMismatchSeen),
      memory_(std::move(memory)) {}

TaggedMessages::Request::~Request() {
  if (is_forked_child()) return;
  while (!is_over() && entry_ != nullptr) {  // a peer may be copying
    end_with(nullptr);
    std::this_thread::yield();
  }
}

ErrorContext TaggedMessages::Request::context(int peer) const {
  ErrorContext context = context_of(call_, messages_.channel_.rank());
  if (peer >= 0) context.peers = {peer};
  return context;
}

std::exception_ptr TaggedMessages::Request::difference(int peer, std::int64_t dtype,
                                                       std::uint64_t count) const {
  const auto elements = [](std::uint64_t n, DType type) {
    return fmt::format("{} elements of {}", n, name_of(type));
  };
  const std::string mine = elements(call_.count, call_.dtype);
  const std::string theirs = elements(count, static_cast<DType>(dtype));
  const int me = messages_.channel_.rank();
  return std::make_exception_ptr(MismatchError(
      context(peer),
      fmt::format("rank {} sends {}, rank {} receives {} (tag {}); both must name the same type "
                  "and count",
                  is_send() ? me : peer, is_send() ? mine : theirs, is_send() ? peer : me,
                  is_send() ? theirs : mine, tag_)));
}

std::exception_ptr TaggedMessages::Request::refusal_error(int peer,
                                                          std::uint64_t peer_n_refused) const {
  const int me = messages_.channel_.rank();
  const auto of_peer = static_cast<std::uint32_t>(peer_n_refused) & ~RefusedPairs::kMismatchSeen;
  const bool has_peer_more = of_peer > n_refused_;
  if (has_peer_more && messages_.back_refusals()) {  // it may wait for this rank
    messages_.n_refused(me, is_send(), peer)
        .fetch_or(RefusedPairs::kMismatchSeen, std::memory_order_release);
  }
  const int refuser = has_peer_more ? peer : me;
  const std::uint32_t n = has_peer_more ? of_peer - n_refused_ : n_refused_ - of_peer;
  const auto texts = last_refusals(messages_.refusals_[refuser], has_peer_more ? me : peer, n);
  return std::make_exception_ptr(MismatchError(
      context(peer),
      fmt::format("rank {} has {}, so this {} (tag {}) may not match the next call of rank {}; a "
                  "call that throws UsageError counts as a call: afterwards both ends must "
                  "continue with matching calls",
                  refuser,
                  texts.empty() ? fmt::format("refused {} call{} more", n, n == 1 ? "" : "s")
                                : fmt::to_string(fmt::join(texts, "; ")),
                  name_of(call_.op), tag_, peer)));
}

UsageError TaggedMessages::Request::left_error() const {
  return {context(-1), "this rank has left the group"};
}

void TaggedMessages::Request::release_entry() {
  const std::lock_guard lock(mutex_);
  if (entry_ == nullptr) return;
  std::exchange(entry_, nullptr)->state.store(RequestEntry::free, std::memory_order_release);
}

void TaggedMessages::Request::collect(std::any& memory) {
  const auto state = RequestEntry::State{entry_->state.load(std::memory_order_acquire)};
  const int copier = entry_->copier.load(std::memory_order_relaxed);  // written before that state
  const Channel& channel = messages_.channel_;
  switch (state) {
    case RequestEntry::complete: source_.store(is_send() ? channel.rank() : copier); break;
    case RequestEntry::mismatched:
      error_ = entry_->why == RequestEntry::kRefusalMismatch
                   ? refusal_error(copier, entry_->copier_count)
                   : difference(copier, entry_->why, entry_->copier_count);
      break;
    case RequestEntry::failed:
      if (entry_->why == ESRCH) {  // the copier found no living rank here
        error_ = std::make_exception_ptr(left_error());
        break;
      }
      error_ = std::make_exception_ptr(SystemError(
          context(copier), entry_->why, fmt::format("rank {} could not copy the message", copier)));
      break;
    case RequestEntry::copying:
      if (!channel.membership()->is_gone(channel.world_rank(copier))) return;
      // It may have ended the copy before it died.
      if (entry_->state.load(std::memory_order_acquire) != RequestEntry::copying)
        return collect(memory);
      error_ = std::make_exception_ptr(PeerLost(
          context(copier), fmt::format("rank {} died while it copied the message", copier)));
      break;
    case RequestEntry::free:
    case RequestEntry::reserved:
    case RequestEntry::unmatched:
    case RequestEntry::cancelled:
    case RequestEntry::abandoned: return;
  }
  entry_->state.store(RequestEntry::free, std::memory_order_release);
  entry_ = nullptr;
  memory = std::exchange(memory_, {});
  is_over_.store(true, std::memory_order_release);
}

int TaggedMessages::Request::copier() const {
  const std::lock_guard lock(mutex_);
  const bool is_copying =
      entry_ != nullptr && entry_->state.load(std::memory_order_acquire) == RequestEntry::copying;
  return is_copying ? entry_->copier.load(std::memory_order_relaxed) : -1;
}

bool TaggedMessages::Request::try_reap(std::any& memory) {
  if (is_forked_child()) return false;
  const std::lock_guard lock(mutex_);
  if (entry_ != nullptr) collect(memory);
  return entry_ == nullptr;
}

bool TaggedMessages::Request::is_over() {
  if (is_over_.load(std::memory_order_acquire)) return true;
  std::any memory;  // destroyed without the lock
  (void)try_reap(memory);
  return is_over_.load(std::memory_order_acquire);
}

bool TaggedMessages::Request::poll() {
  if (is_over() || is_forked_child()) return true;  // in a forked process wait() throws
  const auto now = Clock::now().time_since_epoch();
  if (now.count() < next_poll_.load(std::memory_order_relaxed)) return false;
  next_poll_.store((now + kLivenessInterval).count(), std::memory_order_relaxed);
  try {
    detail::TimeLimit none;
    messages_.check(*this, none, n_polls_++);
  } catch (const Error&) {
    end_with(std::current_exception());
  }
  return is_over();
}

void TaggedMessages::Request::end_with(std::exception_ptr error) {
  if (is_forked_child()) return;
  std::any memory;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  if (is_over_ || entry_ == nullptr) return;
  std::uint32_t expected = RequestEntry::unmatched;
  if (entry_->state.compare_exchange_strong(expected, RequestEntry::cancelled,
                                            std::memory_order_acq_rel)) {
    memory = std::exchange(memory_, {});
  } else {
    collect(memory);
    if (is_over_) return;
    const Channel& channel = messages_.channel_;
    const int copier = channel.world_rank(entry_->copier.load(std::memory_order_relaxed));
    if (!copy_seen_at_) copy_seen_at_ = Clock::now();
    const bool is_frozen = channel.membership()->is_stopped(copier) ||
                           Clock::now() - *copy_seen_at_ > base::patience::kCopy;
    expected = RequestEntry::copying;
    if (!is_frozen || !entry_->state.compare_exchange_strong(expected, RequestEntry::abandoned,
                                                             std::memory_order_acq_rel)) {
      return;
    }
    (void)new std::any(std::move(memory_));  // the copier may write there once more
  }
  entry_ = nullptr;
  error_ = std::move(error);
  is_over_.store(true, std::memory_order_release);
}

void TaggedMessages::Request::wait(std::chrono::milliseconds timeout) {
  if (!is_over()) {
    if (is_forked_child()) {
      throw UsageError(context(-1), "this process is a fork of the rank that began it");
    }
    wait_until_over(detail::TimeLimit(timeout));
  }
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void TaggedMessages::Request::wait_until_over(detail::TimeLimit limit) {
  const RequestEntry* entry = nullptr;
  {
    const std::lock_guard lock(mutex_);
    entry = entry_;
  }
  if (entry == nullptr) return;  // over by now
  // Another thread may complete the entry, which may then be reused: then the request is over.
  const auto is_ready = [&] {
    return entry->state.load(std::memory_order_acquire) >= RequestEntry::complete || is_over_;
  };
  const Waiter& waiter = messages_.channel_.waiter();
  if (!waiter.poll(is_ready)) waiter.yield(Condition(is_ready));
  for (unsigned round = 0; !is_over(); ++round) {
    const std::uint32_t state = entry->state.load(std::memory_order_acquire);
    if (state < RequestEntry::complete) {
      const auto left = std::max<std::chrono::nanoseconds>(limit.left(), milliseconds(1));
      base::futex_wait(entry->state, state,
                       std::min<std::chrono::nanoseconds>(left, kLivenessInterval),
                       base::FutexScope::process);
    }
    if (is_over()) break;
    try {
      messages_.check(*this, limit, round);
    } catch (const Error&) {
      end_with(std::current_exception());
    }
  }
}

}  // namespace lockstep::shared
