#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <lockstep/error.hpp>
#include <thread>
#include <utility>

#include "base/futex.hpp"
#include "engines/shared/protocol/tagged_messages.hpp"

namespace lockstep::shared {
namespace {

using std::chrono::milliseconds;

/// How long the owner of a message waits, past the time when it gives up, for a peer that copies
/// and is not known to be stopped.
constexpr std::chrono::seconds kCopyPatience{10};

std::string name_of_rank(int rank) { return rank < 0 ? "any rank" : fmt::format("rank {}", rank); }

}  // namespace

void TaggedMessages::throw_ending(const Request& request, int peer, const Ending& ending) const {
  const std::string text =
      fmt::format("rank {} {}{}", peer, ending.failed ? "failed: " : "", ending.text);
  if (ending.failed) throw PeerFailed(request.context(peer), text);
  throw PeerLost(request.context(peer), text);
}

void TaggedMessages::check(const Request& request, detail::TimeLimit& limit, unsigned round) const {
  constexpr unsigned kSystemChecks = 4;  // see Channel::check_peer_liveness
  channel_.throw_if_failed(request.call_);
  const int n_ranks = channel_.size();
  // No peer copies to or from a rank that has left.
  if (channel_.membership()->ending_of(channel_.world_rank(channel_.rank()),
                                       /*ask_system=*/false)) {
    throw request.left_error();
  }
  const bool is_any = request.call_.root == kAnySource;
  int n_left = 0;
  for (int r = 0; r < n_ranks; ++r) {
    if (r == channel_.rank() || (!is_any && r != request.call_.root)) continue;
    const bool asks = !is_any || (static_cast<unsigned>(r) + round * kSystemChecks) %
                                         static_cast<unsigned>(n_ranks) <
                                     kSystemChecks;
    // If the peer has taken this message before it refused one, its copy is what counts.
    const std::uint32_t told = is_any ? 0 : channel_.n_refused_by(r, request.call_);
    const std::uint32_t n_refused = told & ~Channel::kSeenToDiffer;
    const bool has_peer_seen_it =
        n_refused < request.call_.n_refused && (told & Channel::kSeenToDiffer) != 0;
    if (n_refused > request.call_.n_refused || has_peer_seen_it) {
      std::rethrow_exception(request.refusal_error(r, told));
    }
    const auto ending = channel_.membership()->ending_of(channel_.world_rank(r), asks);
    if (!ending) continue;
    ++n_left;
    // Ranks that have sent all they had may leave while this one waits for others.
    if (!is_any || !ending->is_orderly || n_left == n_ranks - 1) throw_ending(request, r, *ending);
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
    const std::string waits = waits_of(r);
    if (peer == kAnySource && waits.empty() && r != copier) continue;
    text += fmt::format("\n  rank {} {}{}{}{}", r,
                        channel_.membership()->condition_of(channel_.world_rank(r)),
                        r == copier ? ", and has begun to copy the message" : "",
                        waits.empty() ? "" : ", and waits in ", waits);
  }
  throw TimeoutError(request.context(peer == kAnySource ? copier : peer), text);
}

/// "send to rank 1 (tag 4), recv from any rank (tag 0)": the first of its messages that wait.
std::string TaggedMessages::waits_of(int rank) const {
  constexpr int kMost = 4;
  std::string text;
  int n = 0;
  for (std::int32_t i = rank * n_posts_; i < rank * n_posts_ + n_posts_of(rank) && n < kMost; ++i) {
    const Post& post = post_at(i);
    if (post.state.load(std::memory_order_acquire) != Post::posted) continue;
    const bool is_send = post.is_send.load(std::memory_order_relaxed) != 0;
    text += fmt::format("{}{} {} (tag {})", n++ == 0 ? "" : ", ", is_send ? "send to" : "recv from",
                        name_of_rank(post.peer.load(std::memory_order_relaxed)),
                        post.tag.load(std::memory_order_relaxed));
  }
  return text;
}

TaggedMessages::Request::Request(const TaggedMessages& messages, const Call& call, int tag,
                                 std::any memory)
    : messages_(messages), call_(call), tag_(tag), memory_(std::move(memory)) {}

TaggedMessages::Request::~Request() {
  if (is_copy()) return;
  while (!is_over() && post_ != nullptr) {  // a peer may be copying
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

std::exception_ptr TaggedMessages::Request::refusal_error(int peer, std::uint64_t told) const {
  Channel& channel = messages_.channel_;
  const auto of_peer = static_cast<std::uint32_t>(told) & ~Channel::kSeenToDiffer;
  const bool has_peer_more = of_peer > call_.n_refused;
  if (has_peer_more) channel.tell_that_refusals_differ(call_);  // it may wait for this rank
  const int refuser = has_peer_more ? peer : channel.rank();
  const std::uint32_t n = has_peer_more ? of_peer - call_.n_refused : call_.n_refused - of_peer;
  const auto texts = channel.refused_by(refuser, has_peer_more ? channel.rank() : peer, n);
  return std::make_exception_ptr(MismatchError(
      context(peer),
      fmt::format("rank {} has {}, so this {} (tag {}) and what rank {} calls next may not be one "
                  "message; a call that throws UsageError counts as one, after which both ends "
                  "must go on alike",
                  refuser,
                  texts.empty() ? fmt::format("refused {} call{} more", n, n == 1 ? "" : "s")
                                : fmt::to_string(fmt::join(texts, "; ")),
                  name_of(call_.op), tag_, peer)));
}

UsageError TaggedMessages::Request::left_error() const {
  return {context(-1), "this rank has left the group since"};
}

void TaggedMessages::Request::release_post() {
  const std::lock_guard lock(mutex_);
  if (post_ == nullptr) return;
  std::exchange(post_, nullptr)->state.store(Post::free, std::memory_order_release);
}

void TaggedMessages::Request::collect(std::any& memory) {
  const std::uint32_t state = post_->state.load(std::memory_order_acquire);
  const int copier = post_->copier.load(std::memory_order_relaxed);  // written before that state
  const Channel& channel = messages_.channel_;
  switch (state) {
    case Post::complete: source_.store(is_send() ? channel.rank() : copier); break;
    case Post::differs:
      error_ = post_->why == Post::kDiffersInRefusals
                   ? refusal_error(copier, post_->copier_count)
                   : difference(copier, post_->why, post_->copier_count);
      break;
    case Post::failed:
      if (post_->why == ESRCH) {  // the copier found no living rank here
        error_ = std::make_exception_ptr(left_error());
        break;
      }
      error_ = std::make_exception_ptr(SystemError(
          context(copier), post_->why, fmt::format("rank {} could not copy the message", copier)));
      break;
    case Post::copying:
      if (!channel.membership()->is_gone(channel.world_rank(copier))) return;
      // It may have ended the copy before it died.
      if (post_->state.load(std::memory_order_acquire) != Post::copying) return collect(memory);
      error_ = std::make_exception_ptr(PeerLost(
          context(copier), fmt::format("rank {} died while it copied the message", copier)));
      break;
    default: return;
  }
  post_->state.store(Post::free, std::memory_order_release);
  post_ = nullptr;
  memory = std::exchange(memory_, {});
  is_over_.store(true, std::memory_order_release);
}

int TaggedMessages::Request::copier() const {
  const std::lock_guard lock(mutex_);
  const bool is_copying =
      post_ != nullptr && post_->state.load(std::memory_order_acquire) == Post::copying;
  return is_copying ? post_->copier.load(std::memory_order_relaxed) : -1;
}

bool TaggedMessages::Request::try_reap(std::any& memory) {
  if (is_copy()) return false;
  const std::lock_guard lock(mutex_);
  if (post_ != nullptr) collect(memory);
  return post_ == nullptr;
}

bool TaggedMessages::Request::is_over() {
  if (is_over_.load(std::memory_order_acquire)) return true;
  std::any memory;  // destroyed without the lock
  (void)try_reap(memory);
  return is_over_.load(std::memory_order_acquire);
}

bool TaggedMessages::Request::poll() {
  if (is_over() || is_copy()) return true;  // in a copy wait() throws
  const auto now = Clock::now().time_since_epoch();
  if (now.count() < next_look_.load(std::memory_order_relaxed)) return false;
  next_look_.store((now + kLivenessInterval).count(), std::memory_order_relaxed);
  try {
    detail::TimeLimit none;
    messages_.check(*this, none, n_polls_++);
  } catch (const Error&) {
    end_with(std::current_exception());
  }
  return is_over();
}

void TaggedMessages::Request::end_with(std::exception_ptr error) {
  if (is_copy()) return;
  std::any memory;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  if (is_over_ || post_ == nullptr) return;
  std::uint32_t expected = Post::posted;
  if (post_->state.compare_exchange_strong(expected, Post::cancelled, std::memory_order_acq_rel)) {
    memory = std::exchange(memory_, {});
  } else {
    collect(memory);
    if (is_over_) return;
    const Channel& channel = messages_.channel_;
    const int copier = channel.world_rank(post_->copier.load(std::memory_order_relaxed));
    if (!copy_seen_at_) copy_seen_at_ = Clock::now();
    const bool is_frozen =
        channel.membership()->is_stopped(copier) || Clock::now() - *copy_seen_at_ > kCopyPatience;
    expected = Post::copying;
    if (!is_frozen || !post_->state.compare_exchange_strong(expected, Post::abandoned,
                                                            std::memory_order_acq_rel)) {
      return;
    }
    (void)new std::any(std::move(memory_));  // the copier may write there once more
  }
  post_ = nullptr;
  error_ = std::move(error);
  is_over_.store(true, std::memory_order_release);
}

void TaggedMessages::Request::wait(std::chrono::milliseconds timeout) {
  if (!is_over()) {
    if (is_copy()) {
      throw UsageError(context(-1), "this process is a fork of the rank that began it");
    }
    wait_until_over(detail::TimeLimit(timeout));
  }
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void TaggedMessages::Request::wait_until_over(detail::TimeLimit limit) {
  const Post* post = nullptr;
  {
    const std::lock_guard lock(mutex_);
    post = post_;
  }
  if (post == nullptr) return;  // over by now
  // Another thread may collect the post, and it may be used again: then it is over.
  const auto is_ready = [&] {
    return post->state.load(std::memory_order_acquire) >= Post::complete || is_over_;
  };
  const Waiter& waiter = messages_.channel_.waiter();
  if (!waiter.poll(is_ready)) waiter.yield(Condition(is_ready));
  for (unsigned round = 0; !is_over(); ++round) {
    const std::uint32_t state = post->state.load(std::memory_order_acquire);
    if (state < Post::complete) {
      const auto left = std::max<std::chrono::nanoseconds>(limit.left(), milliseconds(1));
      base::futex_wait(post->state, state,
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
