#include "engines/shared/protocol/tagged_messages.hpp"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <lockstep/error.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "base/futex.hpp"
#include "base/timed_lock.hpp"

namespace lockstep::shared {
namespace {

using std::chrono::milliseconds;

/// How many messages of one rank may be under way: two with each peer and more, but little memory
/// for many ranks.
std::int32_t posts_of_rank(int n_ranks) { return std::clamp(65536 / n_ranks, 4 * n_ranks, 4096); }

std::size_t bytes_for(int n_ranks) {
  return static_cast<std::size_t>(n_ranks) *
         (sizeof(Mailbox) + static_cast<std::size_t>(posts_of_rank(n_ranks)) * sizeof(Post));
}

/// How long the owner of a message waits, past the time when it gives up, for a peer that copies
/// and is not known to be stopped.
constexpr std::chrono::seconds kCopyPatience{10};

enum class Way : bool { from_peer, to_peer };

/// Copies between this process's memory and another's, while go_on(). Returns an errno value.
template <class GoOn>
int copy_across(pid_t pid, Way way, void* here, std::uint64_t there, std::size_t n_bytes,
                GoOn go_on) {
  constexpr std::size_t kAtOnce = std::size_t{64} << 20U;
  auto* data = static_cast<std::byte*>(here);
  while (n_bytes > 0) {
    const std::size_t n_now = std::min(n_bytes, kAtOnce);
    const iovec local{.iov_base = data, .iov_len = n_now};
    const iovec remote{.iov_base = reinterpret_cast<void*>(there), .iov_len = n_now};
    if (!go_on()) return ECANCELED;
    const ssize_t n = way == Way::to_peer ? ::process_vm_writev(pid, &local, 1, &remote, 1, 0)
                                          : ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EFAULT;
    data += n;
    there += static_cast<std::uint64_t>(n);
    n_bytes -= static_cast<std::size_t>(n);
  }
  return 0;
}

/// Ends a post that is moving. False if its owner has abandoned it.
bool finish(Post& post, Post::State state) noexcept {
  std::uint32_t expected = Post::moving;
  if (!post.state.compare_exchange_strong(expected, state, std::memory_order_acq_rel)) {
    post.state.store(Post::free, std::memory_order_release);
    return false;
  }
  base::futex_wake_all(post.state, base::FutexScope::process);
  return true;
}

std::string name_of_rank(int rank) { return rank < 0 ? "any rank" : fmt::format("rank {}", rank); }

}  // namespace

/// Of the mailbox to which a message goes.
class TaggedMessages::Lock {
 public:
  Lock(const TaggedMessages& messages, const Posted& posted, Limit limit)
      : mailbox_(messages.mailbox_of(posted)) {
    int error = ::pthread_mutex_trylock(&mailbox_.mutex);
    while (error == EBUSY || error == ETIMEDOUT) {
      messages.channel_.throw_if_failed(posted.call_);
      if (Clock::now() >= limit.end) throw_timeout(messages, posted);
      error = base::timed_lock(mailbox_.mutex, kLivenessInterval);
    }
    if (error == EOWNERDEAD) end_group(messages, posted);
    if (error != 0) {
      throw SystemError(posted.context(-1), error, "cannot lock the list of messages to a rank");
    }
    mailbox_.holder.store(messages.channel_.rank() + 1, std::memory_order_relaxed);
  }
  ~Lock() {
    mailbox_.holder.store(0, std::memory_order_relaxed);
    ::pthread_mutex_unlock(&mailbox_.mutex);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  [[noreturn]] void throw_timeout(const TaggedMessages& messages, const Posted& posted) const {
    const int holder = mailbox_.holder.load(std::memory_order_relaxed) - 1;
    const Channel& channel = messages.channel_;
    throw TimeoutError(posted.context(holder),
                       fmt::format("{} holds the list of messages to rank {}{}",
                                   name_of_rank(holder), &mailbox_ - messages.mailboxes_,
                                   holder < 0 ? ""
                                              : ", and " + channel.membership()->condition_of(
                                                               channel.world_rank(holder))));
  }
  /// The lists may be damaged: nobody may use them again.
  [[noreturn]] void end_group(const TaggedMessages& messages, const Posted& posted) const {
    Channel& channel = messages.channel_;
    int culprit = mailbox_.holder.load(std::memory_order_relaxed) - 1;
    for (int r = 0; culprit < 0 && r < channel.size(); ++r) {
      if (channel.membership()->is_gone(channel.world_rank(r))) culprit = r;
    }
    const PeerLost error(posted.context(culprit),
                         fmt::format("{} died while it changed the list of messages to rank {}",
                                     culprit < 0 ? "a rank" : name_of_rank(culprit),
                                     &mailbox_ - messages.mailboxes_));
    channel.end_with(error);
    ::pthread_mutex_consistent(&mailbox_.mutex);
    ::pthread_mutex_unlock(&mailbox_.mutex);
    throw PeerLost(error);
  }

  Mailbox& mailbox_;
};

std::uint64_t TaggedMessages::make(Segment& segment, int n_ranks) {
  return Range::make(segment, bytes_for(n_ranks), n_ranks, [n_ranks](std::byte* data) {
    pthread_mutexattr_t attributes;
    ::pthread_mutexattr_init(&attributes);
    ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    for (int r = 0; r < n_ranks; ++r) {
      Mailbox& mailbox = reinterpret_cast<Mailbox*>(data)[r];
      ::pthread_mutex_init(&mailbox.mutex, &attributes);
      mailbox.sends = mailbox.receives = {.first = -1, .last = -1};
    }
    ::pthread_mutexattr_destroy(&attributes);
  });
}

TaggedMessages::TaggedMessages(Channel& channel, std::uint64_t offset)
    : channel_(channel),
      range_(channel.membership()->shared_segment(), offset, bytes_for(channel.size())),
      mailboxes_(reinterpret_cast<Mailbox*>(range_.data())),
      posts_(reinterpret_cast<Post*>(mailboxes_ + channel.size())),
      n_posts_(posts_of_rank(channel.size())) {}

TaggedMessages::~TaggedMessages() { under_way_.clear(); }

bool TaggedMessages::are_possible(Channel& channel, const Call& call) {
  struct Probe {
    std::uint64_t address, value;
  };
  Segment& segment = channel.membership()->segment();
  std::uint64_t mine = segment.header().nonce + static_cast<std::uint64_t>(channel.rank());
  const auto agree = [&] {
    const Probe probe{.address = reinterpret_cast<std::uint64_t>(&mine), .value = mine};
    std::memcpy(channel.write_slot(sizeof probe), &probe, sizeof probe);
    channel.end_phase(call);
    bool is_possible = true;
    for (int r = 0; r < channel.size(); ++r) {
      Probe theirs{};
      std::memcpy(&theirs, channel.read_slot(r, 1, sizeof theirs), sizeof theirs);
      const pid_t pid = segment.rank(channel.world_rank(r)).pid.load(std::memory_order_relaxed);
      std::uint64_t value = 0;
      const auto copy = [&](Way way) {
        return copy_across(pid, way, &value, theirs.address, sizeof value, [] { return true; });
      };
      is_possible = is_possible && copy(Way::from_peer) == 0 && value == theirs.value &&
                    copy(Way::to_peer) == 0;  // the same value
    }
    std::memcpy(channel.write_slot(sizeof is_possible), &is_possible, sizeof is_possible);
    channel.end_phase(call);
    for (int r = 0; r < channel.size(); ++r) {
      bool theirs = false;
      std::memcpy(&theirs, channel.read_slot(r, 1, sizeof theirs), sizeof theirs);
      is_possible = is_possible && theirs;
    }
    return is_possible;
  };
  if (agree()) return true;
  // Where Yama restricts access to descendants: also to those of the process that started this one.
  const pid_t launcher = ::getppid();
  if (launcher > 1) ::prctl(PR_SET_PTRACER, launcher, 0, 0, 0);
  return agree();
}

Mailbox& TaggedMessages::mailbox_of(const Posted& posted) const noexcept {
  return mailboxes_[posted.is_send() ? posted.call_.root : channel_.rank()];
}

/// Removes from the list the posts that nobody waits for, and the first that `matches` takes.
template <class Matches>
Post* TaggedMessages::take_first(PostList& list, Matches matches) const noexcept {
  std::int32_t before = -1;
  for (std::int32_t i = list.first; i >= 0;) {
    Post& post = post_at(i);
    const std::int32_t next = post.next;
    const bool is_match = matches(post);
    if (!is_match && post.state.load(std::memory_order_acquire) == Post::posted) {
      before = i;
    } else {
      (before < 0 ? list.first : post_at(before).next) = next;
      if (next < 0) list.last = before;
      if (is_match) return &post;
      post.state.store(Post::free, std::memory_order_release);
    }
    i = next;
  }
  return nullptr;
}

Post* TaggedMessages::take_match(Mailbox& mailbox, const Posted& posted) const noexcept {
  const int me = channel_.rank();
  return take_first(posted.is_send() ? mailbox.receives : mailbox.sends, [&](Post& post) {
    const int wanted =
        posted.is_send() ? post.peer.load(std::memory_order_relaxed) : posted.call_.root;
    const int sender = posted.is_send() ? me : owner_of(post);
    if (post.tag.load(std::memory_order_relaxed) != posted.tag_ ||
        (wanted != kAnySource && wanted != sender)) {
      return false;
    }
    post.mover.store(me, std::memory_order_relaxed);
    std::uint32_t expected = Post::posted;
    return post.state.compare_exchange_strong(expected, Post::moving, std::memory_order_acq_rel);
  });
}

void TaggedMessages::append(PostList& list, Post& post) const noexcept {
  const auto i = static_cast<std::int32_t>(&post - posts_);
  post.next = -1;
  post.state.store(Post::posted, std::memory_order_release);
  (list.last < 0 ? list.first : post_at(list.last).next) = i;
  list.last = i;
}

Post* TaggedMessages::take_post() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    const std::int32_t first = channel_.rank() * n_posts_;
    for (std::int32_t i = first + n_posts_ - 1; i >= first; --i) {
      if (post_at(i).state.load(std::memory_order_acquire) == Post::free) free_.push_back(i);
    }
    if (free_.empty()) return nullptr;
  }
  Post& post = post_at(free_.back());
  free_.pop_back();
  post.state.store(Post::taken, std::memory_order_relaxed);
  return &post;
}

Post& TaggedMessages::describe(const Posted& posted, Limit limit) {
  Post* post = take_post();
  if (post == nullptr) {
    {
      const Lock lock(*this, posted, limit);
      Mailbox& mailbox = mailbox_of(posted);
      for (PostList* const list : {&mailbox.sends, &mailbox.receives}) {
        take_first(*list, [](const Post&) { return false; });
      }
    }
    post = take_post();
  }
  const Call& call = posted.call_;
  if (post == nullptr) {
    throw UsageError(posted.context(-1),
                     fmt::format("{} sends and receives of this rank are under way, the most; wait "
                                 "for some of them first",
                                 n_posts_));
  }
  post->peer.store(call.root, std::memory_order_relaxed);
  post->tag.store(posted.tag_, std::memory_order_relaxed);
  post->is_send.store(posted.is_send(), std::memory_order_relaxed);
  post->dtype = static_cast<std::uint32_t>(call.dtype);
  post->address = reinterpret_cast<std::uint64_t>(posted.is_send() ? call.in : call.out);
  post->count = call.count;
  return *post;
}

std::shared_ptr<TaggedMessages::Posted> TaggedMessages::post(const Call& call, int tag,
                                                             std::any memory) {
  channel_.throw_if_failed(call);
  auto posted = std::make_shared<Posted>(*this, call, tag, std::move(memory));
  const Limit limit{.begin = posted->began_, .end = posted->began_ + call.timeout};
  settle();
  Post& own = describe(*posted, limit);
  Post* match = nullptr;
  try {
    posted->post_ = &own;
    {
      const std::lock_guard lock(mutex_);
      under_way_.push_back(posted);
    }
    const Lock lock(*this, *posted, limit);
    Mailbox& mailbox = mailbox_of(*posted);
    match = take_match(mailbox, *posted);
    if (match == nullptr) append(posted->is_send() ? mailbox.sends : mailbox.receives, own);
  } catch (...) {
    posted->release_post();
    throw;
  }
  if (match == nullptr) return posted;
  posted->release_post();
  move(*posted, *match);
  std::any done;  // destroyed without the lock
  const std::lock_guard lock(posted->mutex_);
  done.swap(posted->memory_);
  return posted;
}

void TaggedMessages::move(Posted& posted, Post& post) const {
  struct Guard {
    ~Guard() {
      if (post == nullptr) return;
      post->why = ENOMEM;  // an exception of this rank
      finish(*post, Post::failed);
    }
    Post* post;
  } guard{&post};
  const auto end = [&guard](Post::State state) {
    return finish(*std::exchange(guard.post, nullptr), state);
  };
  const Call& call = posted.call_;
  const int peer = owner_of(post);
  const Membership& membership = *channel_.membership();
  if (post.dtype != static_cast<std::uint32_t>(call.dtype) || post.count != call.count) {
    const std::exception_ptr error = posted.difference(peer, post.dtype, post.count);
    post.why = static_cast<std::int32_t>(call.dtype);
    post.mover_count = call.count;
    end(Post::differs);
    std::rethrow_exception(error);
  }
  // Before each message: when a process is gone, another may get its pid.
  const int world_rank = channel_.world_rank(peer);
  std::optional<Ending> ending = membership.ending_of(world_rank, /*ask_system=*/true);
  int error = ESRCH;
  if (!ending) {
    const pid_t pid = membership.segment().rank(world_rank).pid.load(std::memory_order_relaxed);
    void* const here = posted.is_send() ? const_cast<void*>(call.in) : call.out;
    error = copy_across(pid, posted.is_send() ? Way::to_peer : Way::from_peer, here, post.address,
                        call.count * size_of(call.dtype), [&post] {
                          return post.state.load(std::memory_order_acquire) == Post::moving;
                        });
  }
  post.why = error;
  if (!end(error == 0 ? Post::complete : Post::failed)) {
    throw TimeoutError(posted.context(peer),
                       fmt::format("rank {} has given up while this rank copied", peer));
  }
  if (error == 0) {
    posted.source_ = posted.is_send() ? channel_.rank() : peer;
    posted.is_over_.store(true, std::memory_order_release);
    return;
  }
  // Its memory goes a little before the process does.
  for (int i = 0; !ending && error == ESRCH && i < 100; ++i) {
    std::this_thread::sleep_for(milliseconds(10));
    ending = membership.ending_of(world_rank, /*ask_system=*/true);
  }
  if (ending) throw_ending(posted, peer, *ending);
  throw SystemError(posted.context(peer), error,
                    fmt::format("cannot copy {} elements of {} {} rank {}", call.count,
                                name_of(call.dtype), posted.is_send() ? "to" : "from", peer));
}

void TaggedMessages::settle() {
  std::vector<std::any> memory;  // both destroyed without the lock
  std::vector<std::shared_ptr<Posted>> settled;
  const std::lock_guard lock(mutex_);
  std::erase_if(under_way_, [&](std::shared_ptr<Posted>& posted) {
    if (!posted->is_settled(memory.emplace_back())) return false;
    settled.push_back(std::move(posted));
    return true;
  });
}

void TaggedMessages::throw_ending(const Posted& posted, int peer, const Ending& ending) const {
  const std::string text =
      fmt::format("rank {} {}{}", peer, ending.failed ? "failed: " : "", ending.text);
  if (ending.failed) throw PeerFailed(posted.context(peer), text);
  throw PeerLost(posted.context(peer), text);
}

void TaggedMessages::check(const Posted& posted, Limit limit, unsigned round) const {
  constexpr unsigned kSystemChecks = 4;  // see Channel::check_peer_liveness
  channel_.throw_if_failed(posted.call_);
  const int n_ranks = channel_.size();
  const bool is_any = posted.call_.root == kAnySource;
  int n_left = 0;
  for (int r = 0; r < n_ranks; ++r) {
    if (r == channel_.rank() || (!is_any && r != posted.call_.root)) continue;
    const bool asks = !is_any || (static_cast<unsigned>(r) + round * kSystemChecks) %
                                         static_cast<unsigned>(n_ranks) <
                                     kSystemChecks;
    const auto ending = channel_.membership()->ending_of(channel_.world_rank(r), asks);
    if (!ending) continue;
    ++n_left;
    // Ranks that have sent all they had may leave while this one waits for others.
    if (!is_any || !ending->is_orderly || n_left == n_ranks - 1) throw_ending(posted, r, *ending);
  }
  if (Clock::now() >= limit.end) throw_timeout(posted, limit);
}

void TaggedMessages::throw_timeout(const Posted& posted, Limit limit) const {
  const int peer = posted.call_.root;
  std::string text = fmt::format(
      "rank {} waited {:.1f} s, until the timeout, for {} to {} (tag {})", channel_.rank(),
      std::chrono::duration<double>(Clock::now() - limit.begin).count(), name_of_rank(peer),
      posted.is_send() ? "receive" : "send", posted.tag_);
  for (int r = 0; r < channel_.size(); ++r) {
    if (peer == kAnySource ? r == channel_.rank() : r != peer) continue;
    const std::string waits = waits_of(r);
    if (peer == kAnySource && waits.empty()) continue;
    text += fmt::format("\n  rank {} {}{}{}", r,
                        channel_.membership()->condition_of(channel_.world_rank(r)),
                        waits.empty() ? "" : ", and waits in ", waits);
  }
  throw TimeoutError(posted.context(peer), text);
}

/// "send to rank 1 (tag 4), recv from any rank (tag 0)": the first of its messages that wait.
std::string TaggedMessages::waits_of(int rank) const {
  constexpr int kMost = 4;
  std::string text;
  int n = 0;
  for (std::int32_t i = rank * n_posts_; i < (rank + 1) * n_posts_ && n < kMost; ++i) {
    const Post& post = post_at(i);
    if (post.state.load(std::memory_order_acquire) != Post::posted) continue;
    const bool is_send = post.is_send.load(std::memory_order_relaxed) != 0;
    text += fmt::format("{}{} {} (tag {})", n++ == 0 ? "" : ", ", is_send ? "send to" : "recv from",
                        name_of_rank(post.peer.load(std::memory_order_relaxed)),
                        post.tag.load(std::memory_order_relaxed));
  }
  return text;
}

TaggedMessages::Posted::Posted(const TaggedMessages& messages, const Call& call, int tag,
                               std::any memory)
    : messages_(messages), call_(call), tag_(tag), memory_(std::move(memory)) {}

TaggedMessages::Posted::~Posted() {
  if (is_copy()) return;
  while (!is_over() && post_ != nullptr) {  // a peer may be copying
    end_with(nullptr);
    std::this_thread::yield();
  }
}

ErrorContext TaggedMessages::Posted::context(int peer) const {
  ErrorContext context = context_of(call_, messages_.channel_.rank());
  if (peer >= 0) context.peers = {peer};
  return context;
}

std::exception_ptr TaggedMessages::Posted::difference(int peer, std::int64_t dtype,
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

void TaggedMessages::Posted::release_post() {
  const std::lock_guard lock(mutex_);
  std::exchange(post_, nullptr)->state.store(Post::free, std::memory_order_release);
}

void TaggedMessages::Posted::collect(std::any& memory) {
  const int mover = post_->mover.load(std::memory_order_relaxed);
  const Channel& channel = messages_.channel_;
  switch (post_->state.load(std::memory_order_acquire)) {
    case Post::complete: source_.store(is_send() ? channel.rank() : mover); break;
    case Post::differs: error_ = difference(mover, post_->why, post_->mover_count); break;
    case Post::failed: {
      const bool had_left = post_->why == ESRCH;
      error_ = std::make_exception_ptr(
          SystemError(context(mover), post_->why,
                      fmt::format("rank {} could not copy the message{}", mover,
                                  had_left ? ": this rank had left the group" : "")));
      break;
    }
    case Post::moving:
      if (!channel.membership()->is_gone(channel.world_rank(mover))) return;
      error_ = std::make_exception_ptr(
          PeerLost(context(mover), fmt::format("rank {} died while it copied the message", mover)));
      break;
    default: return;
  }
  post_->state.store(Post::free, std::memory_order_release);
  post_ = nullptr;
  memory = std::exchange(memory_, {});
  is_over_.store(true, std::memory_order_release);
}

bool TaggedMessages::Posted::is_settled(std::any& memory) {
  if (is_copy()) return false;
  const std::lock_guard lock(mutex_);
  if (post_ != nullptr) collect(memory);
  return post_ == nullptr;
}

bool TaggedMessages::Posted::is_over() {
  if (is_over_.load(std::memory_order_acquire)) return true;
  std::any memory;  // destroyed without the lock
  (void)is_settled(memory);
  return is_over_.load(std::memory_order_acquire);
}

bool TaggedMessages::Posted::poll() {
  if (is_over() || is_copy()) return true;  // in a copy wait() throws
  const auto now = Clock::now().time_since_epoch();
  if (now.count() < next_look_.load(std::memory_order_relaxed)) return false;
  next_look_.store((now + kLivenessInterval).count(), std::memory_order_relaxed);
  unsigned round = 0;
  {
    const std::lock_guard lock(mutex_);
    round = n_polls_++;
  }
  try {
    messages_.check(*this, {.begin = began_, .end = Clock::time_point::max()}, round);
  } catch (const Error&) {
    end_with(std::current_exception());
  }
  return is_over();
}

void TaggedMessages::Posted::end_with(std::exception_ptr error) {
  if (is_copy()) return;
  std::any memory;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  if (is_over_ || post_ == nullptr) return;
  std::uint32_t expected = Post::posted;
  if (post_->state.compare_exchange_strong(expected, Post::withdrawn, std::memory_order_acq_rel)) {
    memory = std::exchange(memory_, {});
  } else {
    collect(memory);
    if (is_over_) return;
    const Channel& channel = messages_.channel_;
    const int mover = channel.world_rank(post_->mover.load(std::memory_order_relaxed));
    if (!given_up_) given_up_ = Clock::now();
    const bool is_frozen =
        channel.membership()->is_stopped(mover) || Clock::now() - *given_up_ > kCopyPatience;
    expected = Post::moving;
    if (!is_frozen || !post_->state.compare_exchange_strong(expected, Post::abandoned,
                                                            std::memory_order_acq_rel)) {
      return;
    }
    (void)new std::any(std::move(memory_));  // the mover may write there once more
  }
  post_ = nullptr;
  error_ = std::move(error);
  is_over_.store(true, std::memory_order_release);
}

void TaggedMessages::Posted::wait(std::chrono::milliseconds timeout) {
  if (!is_over()) {
    if (is_copy()) {
      throw UsageError(context(-1), "this process is a fork of the rank that began it");
    }
    wait_until_over({.begin = Clock::now(), .end = Clock::now() + timeout});
  }
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void TaggedMessages::Posted::wait_until_over(Limit limit) {
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
  while (!is_ready() && Clock::now() < limit.begin + kPatience) {
    if (messages_.channel_.is_oversubscribed()) {
      base::yield_cpu();
    } else {
      for (int i = 0; i < 100 && !is_ready(); ++i) base::cpu_relax();
    }
  }
  for (unsigned round = 0; !is_over(); ++round) {
    const std::uint32_t state = post->state.load(std::memory_order_acquire);
    if (state < Post::complete) {
      const auto left = std::max<Clock::duration>(limit.end - Clock::now(), milliseconds(1));
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
