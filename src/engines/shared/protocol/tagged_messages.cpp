#include "engines/shared/protocol/tagged_messages.hpp"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <lockstep/error.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "base/futex.hpp"
#include "base/timed_lock.hpp"
#include "group/failure.hpp"

namespace lockstep::shared {
namespace {

using std::chrono::milliseconds;

/// How many messages of one rank may be under way: two with each peer and more, but little memory
/// for many ranks.
std::int32_t posts_of_rank(int n_ranks) { return std::clamp(65536 / n_ranks, 4 * n_ranks, 4096); }

/// A rank's posts get memory when it needs them.
Range::Size size_for(int n_ranks) {
  const auto n = static_cast<std::size_t>(n_ranks);
  const std::size_t n_posts_bytes = static_cast<std::size_t>(posts_of_rank(n_ranks)) * sizeof(Post);
  return {n * (sizeof(Mailbox) + n_posts_bytes), /*backed=*/n * sizeof(Mailbox)};
}

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

/// Ends a post that is copying. False if its owner has abandoned it, which frees it.
bool finish(Post& post, Post::State state) noexcept {
  std::uint32_t expected = Post::copying;
  if (!post.state.compare_exchange_strong(expected, state, std::memory_order_acq_rel)) {
    expected = Post::abandoned;
    post.state.compare_exchange_strong(expected, Post::free, std::memory_order_acq_rel);
    return false;
  }
  base::futex_wake_all(post.state, base::FutexScope::process);
  return true;
}

/// Where Yama restricts access to descendants: permits those of the process that started this one.
/// asks_system: unless it is permitted already.
TaggedMessages::Permission permit_launcher(bool asks_system) {
  static auto& mutex = *new std::mutex();  // groups may be destroyed after globals
  static auto& permitted = *new std::weak_ptr<const void>();
  const std::lock_guard lock(mutex);
  TaggedMessages::Permission permission = permitted.lock();
  const pid_t launcher = ::getppid();
  if (permission || !asks_system || launcher <= 1) return permission;
  if (::prctl(PR_SET_PTRACER, launcher, 0, 0, 0) != 0) return nullptr;  // no Yama
  permission = TaggedMessages::Permission(&permitted, [](const void*) {
    const std::lock_guard ending(mutex);
    if (permitted.expired()) ::prctl(PR_SET_PTRACER, 0, 0, 0, 0);  // else permitted again since
  });
  permitted = permission;
  return permission;
}

std::string name_of_holder(int rank) { return rank < 0 ? "a rank" : fmt::format("rank {}", rank); }

}  // namespace

/// Of a mailbox, for `request`.
class TaggedMessages::Lock {
 public:
  Lock(const TaggedMessages& messages, Mailbox& mailbox, const Request& request,
       detail::TimeLimit& limit)
      : mailbox_(mailbox) {
    int error = ::pthread_mutex_trylock(&mailbox_.mutex);
    while (error == EBUSY || error == ETIMEDOUT) {
      messages.channel_.throw_if_failed(request.call_);
      if (limit.is_over()) throw_timeout(messages, request);
      error = base::timed_lock(mailbox_.mutex, kLivenessInterval);
    }
    if (error == EOWNERDEAD) end_group(messages, request);
    if (error != 0) {
      throw SystemError(request.context(-1), error, "cannot lock the list of messages to a rank");
    }
    try {
      messages.channel_.throw_if_failed(request.call_);  // the last holder may have died
    } catch (...) {
      ::pthread_mutex_unlock(&mailbox_.mutex);
      throw;
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
  [[noreturn]] void throw_timeout(const TaggedMessages& messages, const Request& request) const {
    const int holder = mailbox_.holder.load(std::memory_order_relaxed) - 1;
    const Channel& channel = messages.channel_;
    throw TimeoutError(request.context(holder),
                       fmt::format("{} holds the list of messages to rank {}{}",
                                   name_of_holder(holder), &mailbox_ - messages.mailboxes_,
                                   holder < 0 ? ""
                                              : ", and " + channel.membership()->condition_of(
                                                               channel.world_rank(holder))));
  }
  /// The lists may be damaged: nobody may use them again.
  [[noreturn]] void end_group(const TaggedMessages& messages, const Request& request) const {
    Channel& channel = messages.channel_;
    int culprit = mailbox_.holder.load(std::memory_order_relaxed) - 1;
    if (culprit < 0) {  // it died before it wrote that: known if no other is gone
      std::vector<int> gone;
      for (int r = 0; r < channel.size(); ++r) {
        const auto ending =
            channel.membership()->ending_of(channel.world_rank(r), /*ask_system=*/true);
        if (ending && !ending->is_orderly) gone.push_back(r);
      }
      if (gone.size() == 1) culprit = gone.front();
    }
    const PeerLost error(request.context(culprit),
                         fmt::format("{} died while it changed the list of messages to rank {}",
                                     name_of_holder(culprit), &mailbox_ - messages.mailboxes_));
    channel.end_with(error);
    ::pthread_mutex_consistent(&mailbox_.mutex);
    ::pthread_mutex_unlock(&mailbox_.mutex);
    throw PeerLost(error);
  }

  Mailbox& mailbox_;
};

std::uint64_t TaggedMessages::make(Segment& segment, int n_ranks) {
  return Range::make(segment, size_for(n_ranks), n_ranks, [n_ranks](std::byte* data) {
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

TaggedMessages::TaggedMessages(Channel& channel, std::uint64_t offset, Permission permission)
    : permission_(std::move(permission)),
      channel_(channel),
      range_(channel.membership()->shared_segment(), offset, size_for(channel.size())),
      mailboxes_(reinterpret_cast<Mailbox*>(range_.data())),
      posts_(reinterpret_cast<Post*>(mailboxes_ + channel.size())),
      n_posts_(posts_of_rank(channel.size())) {}

bool TaggedMessages::are_possible(Channel& channel, const Call& call, Permission& permission) {
  struct Probe {
    std::uint64_t address, value;
  };
  Segment& segment = channel.membership()->segment();
  // Kept for ever: a peer may still write the word when an error has ended this rank's call.
  static std::mutex mutex;
  static auto& words = *new std::deque<std::uint64_t>();
  std::uint64_t& mine = [&]() -> std::uint64_t& {
    const std::lock_guard lock(mutex);
    return words.emplace_back(segment.header().nonce + static_cast<std::uint64_t>(channel.rank()));
  }();
  const auto agree = [&] {
    const Probe probe{.address = reinterpret_cast<std::uint64_t>(&mine), .value = mine};
    std::memcpy(channel.write_slot(call, sizeof probe), &probe, sizeof probe);
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
    std::memcpy(channel.write_slot(call, sizeof is_possible), &is_possible, sizeof is_possible);
    channel.end_phase(call);
    for (int r = 0; r < channel.size(); ++r) {
      bool theirs = false;
      std::memcpy(&theirs, channel.read_slot(r, 1, sizeof theirs), sizeof theirs);
      is_possible = is_possible && theirs;
    }
    return is_possible;
  };
  // Also if that of another group suffices, which may be destroyed first.
  permission = permit_launcher(/*asks_system=*/false);
  if (agree()) return true;
  permission = permit_launcher(/*asks_system=*/true);
  return agree();
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

Post* TaggedMessages::take_match(Mailbox& mailbox, const Request& request) const noexcept {
  const int me = channel_.rank();
  return take_first(request.is_send() ? mailbox.receives : mailbox.sends, [&](Post& post) {
    const int wanted =
        request.is_send() ? post.peer.load(std::memory_order_relaxed) : request.call_.root;
    const int sender = request.is_send() ? me : owner_of(post);
    if (post.tag.load(std::memory_order_relaxed) != request.tag_ ||
        (wanted != kAnySource && wanted != sender)) {
      return false;
    }
    post.copier.store(me, std::memory_order_relaxed);
    std::uint32_t expected = Post::posted;
    return post.state.compare_exchange_strong(expected, Post::copying, std::memory_order_acq_rel);
  });
}

void TaggedMessages::append(PostList& list, Post& post) const noexcept {
  const auto i = static_cast<std::int32_t>(&post - posts_);
  post.next = -1;
  post.state.store(Post::posted, std::memory_order_release);
  (list.last < 0 ? list.first : post_at(list.last).next) = i;
  list.last = i;
}

void TaggedMessages::back_posts(const Request& request) {
  constexpr std::int32_t kFirst = 64;
  const std::int32_t n_before = n_posts_of(channel_.rank());
  const std::int32_t n = std::min(std::max(2 * n_before, kFirst), n_posts_);
  const std::int32_t first = channel_.rank() * n_posts_ + n_before;
  try {
    range_.back(reinterpret_cast<std::byte*>(posts_ + first),
                static_cast<std::size_t>(n - n_before) * sizeof(Post));
  } catch (const SystemError& error) {
    throw SystemError(request.context(-1), error.error_number(), internal::failure_of(error).text);
  }
  for (std::int32_t i = first + n - n_before - 1; i >= first; --i) free_.push_back(i);
  mailboxes_[channel_.rank()].n_posts.store(n, std::memory_order_release);
}

Post* TaggedMessages::take_post(const Request& request) {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    const std::int32_t first = channel_.rank() * n_posts_;
    for (std::int32_t i = first + n_posts_of(channel_.rank()) - 1; i >= first; --i) {
      const Post& post = post_at(i);
      const std::uint32_t state = post.state.load(std::memory_order_acquire);
      const auto is_copier_gone = [&] {
        const int copier = post.copier.load(std::memory_order_relaxed);
        return channel_.membership()->is_gone(channel_.world_rank(copier));
      };
      if (state == Post::free || (state == Post::abandoned && is_copier_gone())) free_.push_back(i);
    }
    if (free_.empty() && n_posts_of(channel_.rank()) < n_posts_) back_posts(request);
    if (free_.empty()) return nullptr;
  }
  Post& post = post_at(free_.back());
  free_.pop_back();
  post.state.store(Post::taken, std::memory_order_relaxed);
  return &post;
}

void TaggedMessages::free_cancelled(const Request& request, detail::TimeLimit& limit) const {
  for (std::int32_t i = 0; i < n_posts_of(channel_.rank()); ++i) {
    const Post& post = post_at(channel_.rank() * n_posts_ + i);
    if (post.state.load(std::memory_order_acquire) != Post::cancelled) continue;
    const bool is_send = post.is_send.load(std::memory_order_relaxed) != 0;
    const int peer = post.peer.load(std::memory_order_relaxed);
    // Another thread of this rank may be writing them: a peer has freed the post since.
    if (is_send && peer == kAnySource) continue;
    Mailbox& mailbox = mailbox_of(is_send, peer);
    const Lock lock(*this, mailbox, request, limit);
    for (PostList* const list : {&mailbox.sends, &mailbox.receives}) {
      take_first(*list, [](const Post&) { return false; });
    }
  }
}

Post* TaggedMessages::describe(const Request& request, detail::TimeLimit& limit) {
  Post* post = take_post(request);
  if (post == nullptr) {
    free_cancelled(request, limit);
    post = take_post(request);
  }
  if (post == nullptr) return nullptr;
  const Call& call = request.call_;
  post->peer.store(call.root, std::memory_order_relaxed);
  post->tag.store(request.tag_, std::memory_order_relaxed);
  post->is_send.store(request.is_send(), std::memory_order_relaxed);
  post->dtype = static_cast<std::uint32_t>(call.dtype);
  post->address = reinterpret_cast<std::uint64_t>(request.is_send() ? call.in : call.out);
  post->count = call.count;
  post->n_refused = call.n_refused;
  return post;
}

std::shared_ptr<TaggedMessages::Request> TaggedMessages::post(const Call& call, int tag,
                                                              std::any memory) {
  channel_.throw_if_failed(call);
  auto request = std::make_shared<Request>(*this, call, tag, std::move(memory));
  detail::TimeLimit limit(call.timeout);
  reap();
  Post* const own = describe(*request, limit);
  Post* match = nullptr;
  try {
    request->post_ = own;
    if (own != nullptr) {
      const std::lock_guard lock(mutex_);
      pending_.push_back(request);
    }
    Mailbox& mailbox = mailbox_of(request->is_send(), call.root);
    const Lock lock(*this, mailbox, *request, limit);
    match = take_match(mailbox, *request);
    // What has come is taken even then: else two ranks whose sends fill their posts never go on.
    if (match == nullptr && own == nullptr) {
      throw UsageError(request->context(-1),
                       fmt::format("{} sends and receives of this rank are under way, the most; "
                                   "wait for some of them first",
                                   n_posts_));
    }
    if (match == nullptr) append(request->is_send() ? mailbox.sends : mailbox.receives, *own);
  } catch (...) {
    request->release_post();
    throw;
  }
  if (match == nullptr) return request;
  request->release_post();
  move(*request, *match);
  std::any done;  // destroyed without the lock
  const std::lock_guard lock(request->mutex_);
  done.swap(request->memory_);
  return request;
}

void TaggedMessages::move(Request& request, Post& post) const {
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
  const Call& call = request.call_;
  const int peer = owner_of(post);
  const Membership& membership = *channel_.membership();
  const bool is_any =
      call.root == kAnySource || post.peer.load(std::memory_order_relaxed) == kAnySource;
  if (!is_any && post.n_refused != call.n_refused) {
    const std::exception_ptr error = request.refusal_error(peer, post.n_refused);
    post.why = Post::kDiffersInRefusals;
    post.copier_count = call.n_refused;
    end(Post::differs);
    std::rethrow_exception(error);
  }
  if (post.dtype != static_cast<std::uint32_t>(call.dtype) || post.count != call.count) {
    const std::exception_ptr error = request.difference(peer, post.dtype, post.count);
    post.why = static_cast<std::int32_t>(call.dtype);
    post.copier_count = call.count;
    end(Post::differs);
    std::rethrow_exception(error);
  }
  // Before each message: when a process is gone, another may get its pid.
  const int world_rank = channel_.world_rank(peer);
  std::optional<Ending> ending = membership.ending_of(world_rank, /*ask_system=*/true);
  int error = ESRCH;
  if (!ending) {
    const pid_t pid = membership.segment().rank(world_rank).pid.load(std::memory_order_relaxed);
    void* const here = request.is_send() ? const_cast<void*>(call.in) : call.out;
    error = copy_across(pid, request.is_send() ? Way::to_peer : Way::from_peer, here, post.address,
                        call.count * size_of(call.dtype), [&post] {
                          return post.state.load(std::memory_order_acquire) == Post::copying;
                        });
  }
  post.why = error;
  if (!end(error == 0 ? Post::complete : Post::failed)) {
    throw TimeoutError(request.context(peer),
                       fmt::format("rank {} has given up while this rank copied", peer));
  }
  if (error == 0) {
    request.source_ = request.is_send() ? channel_.rank() : peer;
    request.is_over_.store(true, std::memory_order_release);
    return;
  }
  // Its memory goes a little before the process does.
  for (int i = 0; !ending && error == ESRCH && i < 100; ++i) {
    std::this_thread::sleep_for(milliseconds(10));
    ending = membership.ending_of(world_rank, /*ask_system=*/true);
  }
  if (ending) throw_ending(request, peer, *ending);
  throw SystemError(request.context(peer), error,
                    fmt::format("cannot copy {} elements of {} {} rank {}", call.count,
                                name_of(call.dtype), request.is_send() ? "to" : "from", peer));
}

void TaggedMessages::reap() {
  std::vector<std::any> memory;  // both destroyed without the lock
  std::vector<std::shared_ptr<Request>> reaped;
  const std::lock_guard lock(mutex_);
  std::erase_if(pending_, [&](std::shared_ptr<Request>& request) {
    if (!request->try_reap(memory.emplace_back())) return false;
    reaped.push_back(std::move(request));
    return true;
  });
}

}  // namespace lockstep::shared
