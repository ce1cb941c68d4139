#include "engines/shared/protocol/tagged_messages.hpp"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <lockstep/error.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "base/futex.hpp"
#include "base/timed_lock.hpp"
#include "engines/shared/protocol/refusals.hpp"
#include "group/failure.hpp"

namespace lockstep::shared {
namespace {

using std::chrono::milliseconds;

/// How many messages of one rank may be pending: two with each peer and more, but little memory for
/// many ranks.
std::int32_t entries_of_rank(int n_ranks) { return std::clamp(65536 / n_ranks, 4 * n_ranks, 4096); }

/// A rank's entries, and what it refuses, get memory when it needs them.
Range::Size size_for(int n_ranks) {
  const auto n = static_cast<std::size_t>(n_ranks);
  const std::size_t n_entries_bytes =
      static_cast<std::size_t>(entries_of_rank(n_ranks)) * sizeof(RequestEntry);
  return {n * (sizeof(Mailbox) + sizeof(Refusals) + n_entries_bytes + n * sizeof(RefusedPairs)),
          /*backed=*/n * sizeof(Mailbox)};
}

enum class Direction : bool { from_peer, to_peer };

/// Copies between this process's memory and another's, while go_on(). Returns an errno value.
template <class GoOn>
int copy_across(pid_t pid, Direction direction, void* here, std::uint64_t there,
                std::size_t n_bytes, GoOn go_on) {
  constexpr std::size_t kAtOnce = std::size_t{64} << 20U;
  auto* data = static_cast<std::byte*>(here);
  while (n_bytes > 0) {
    const std::size_t n_now = std::min(n_bytes, kAtOnce);
    const iovec local{.iov_base = data, .iov_len = n_now};
    const iovec remote{.iov_base = reinterpret_cast<void*>(there), .iov_len = n_now};
    if (!go_on()) return ECANCELED;
    const ssize_t n = direction == Direction::to_peer
                          ? ::process_vm_writev(pid, &local, 1, &remote, 1, 0)
                          : ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EFAULT;
    data += n;
    there += static_cast<std::uint64_t>(n);
    n_bytes -= static_cast<std::size_t>(n);
  }
  return 0;
}

/// Ends an entry that is being copied. False if its owner has abandoned it, which frees it.
bool finish(RequestEntry& entry, RequestEntry::State state) noexcept {
  std::uint32_t expected = RequestEntry::copying;
  if (!entry.state.compare_exchange_strong(expected, state, std::memory_order_acq_rel)) {
    expected = RequestEntry::abandoned;
    entry.state.compare_exchange_strong(expected, RequestEntry::free, std::memory_order_acq_rel);
    return false;
  }
  base::futex_wake_all(entry.state, base::FutexScope::process);
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
                                              : ", and " + channel.membership()->liveness_text(
                                                               channel.world_rank(holder))));
  }
  /// The lists may be damaged: nobody may use them again.
  [[noreturn]] void end_group(const TaggedMessages& messages, const Request& request) const {
    Channel& channel = messages.channel_;
    int culprit = mailbox_.holder.load(std::memory_order_relaxed) - 1;
    if (culprit < 0) {  // it died before it wrote its rank: known if no other rank is gone
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
      refusals_(reinterpret_cast<Refusals*>(mailboxes_ + channel.size())),
      entries_(reinterpret_cast<RequestEntry*>(refusals_ + channel.size())),
      n_entries_(entries_of_rank(channel.size())),
      refused_pairs_(reinterpret_cast<RefusedPairs*>(entries_ + n_entries_ * channel.size())) {}

bool TaggedMessages::are_possible(Channel& channel, const Call& call, Permission& permission) {
  struct Probe {
    std::uint64_t address, value;
  };
  Segment& segment = channel.membership()->segment();
  // Never freed: a peer may still write the word after an error has ended this rank's call.
  static std::mutex mutex;
  static auto& words = *new std::deque<std::uint64_t>();
  std::uint64_t& mine = [&]() -> std::uint64_t& {
    const std::lock_guard lock(mutex);
    return words.emplace_back(segment.header().nonce + static_cast<std::uint64_t>(channel.rank()));
  }();
  const auto agree = [&] {
    channel.announce(Probe{.address = reinterpret_cast<std::uint64_t>(&mine), .value = mine});
    channel.end_phase(call);
    bool is_possible = true;
    for (int r = 0; r < channel.size(); ++r) {
      const auto theirs = channel.announced_by<Probe>(r);
      const pid_t pid = segment.rank(channel.world_rank(r)).pid.load(std::memory_order_relaxed);
      std::uint64_t value = 0;
      const auto copy = [&](Direction direction) {
        return copy_across(pid, direction, &value, theirs.address, sizeof value,
                           [] { return true; });
      };
      is_possible = is_possible && copy(Direction::from_peer) == 0 && value == theirs.value &&
                    copy(Direction::to_peer) == 0;  // the same value
    }
    channel.announce(is_possible);
    channel.end_phase(call);
    for (int r = 0; r < channel.size(); ++r) {
      is_possible = is_possible && channel.announced_by<bool>(r);
    }
    return is_possible;
  };
  // Requested even if another group's permission suffices: that group may be destroyed first.
  permission = permit_launcher(/*asks_system=*/false);
  if (agree()) return true;
  permission = permit_launcher(/*asks_system=*/true);
  return agree();
}

/// Removes cancelled entries from the list, and the first entry for which `matches` is true.
template <class Matches>
RequestEntry* TaggedMessages::take_first(EntryList& list, Matches matches) const noexcept {
  std::int32_t before = -1;
  for (std::int32_t i = list.first; i >= 0;) {
    RequestEntry& entry = entry_at(i);
    const std::int32_t next = entry.next;
    const bool is_match = matches(entry);
    if (!is_match && entry.state.load(std::memory_order_acquire) == RequestEntry::unmatched) {
      before = i;
    } else {
      (before < 0 ? list.first : entry_at(before).next) = next;
      if (next < 0) list.last = before;
      if (is_match) return &entry;
      entry.state.store(RequestEntry::free, std::memory_order_release);
    }
    i = next;
  }
  return nullptr;
}

RequestEntry* TaggedMessages::take_match(Mailbox& mailbox, const Request& request) const noexcept {
  const int me = channel_.rank();
  return take_first(request.is_send() ? mailbox.receives : mailbox.sends, [&](RequestEntry& entry) {
    const int wanted =
        request.is_send() ? entry.peer.load(std::memory_order_relaxed) : request.call_.root;
    const int sender = request.is_send() ? me : owner_of(entry);
    if (entry.tag.load(std::memory_order_relaxed) != request.tag_ ||
        (wanted != kAnySource && wanted != sender)) {
      return false;
    }
    entry.copier.store(me, std::memory_order_relaxed);
    std::uint32_t expected = RequestEntry::unmatched;
    return entry.state.compare_exchange_strong(expected, RequestEntry::copying,
                                               std::memory_order_acq_rel);
  });
}

void TaggedMessages::append(EntryList& list, RequestEntry& entry) const noexcept {
  const auto i = static_cast<std::int32_t>(&entry - entries_);
  entry.next = -1;
  entry.state.store(RequestEntry::unmatched, std::memory_order_release);
  (list.last < 0 ? list.first : entry_at(list.last).next) = i;
  list.last = i;
}

void TaggedMessages::back_entries(const Request& request) {
  constexpr std::int32_t kFirst = 64;
  const std::int32_t n_before = n_entries_of(channel_.rank());
  const std::int32_t n = std::min(std::max(2 * n_before, kFirst), n_entries_);
  const std::int32_t first = channel_.rank() * n_entries_ + n_before;
  try {
    range_.back(reinterpret_cast<std::byte*>(entries_ + first),
                static_cast<std::size_t>(n - n_before) * sizeof(RequestEntry));
  } catch (const SystemError& error) {
    throw SystemError(request.context(-1), error.error_number(), internal::failure_of(error).text);
  }
  for (std::int32_t i = first + n - n_before - 1; i >= first; --i) free_.push_back(i);
  mailboxes_[channel_.rank()].n_entries.store(n, std::memory_order_release);
}

RequestEntry* TaggedMessages::take_entry(const Request& request) {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    const std::int32_t first = channel_.rank() * n_entries_;
    for (std::int32_t i = first + n_entries_of(channel_.rank()) - 1; i >= first; --i) {
      const RequestEntry& entry = entry_at(i);
      const std::uint32_t state = entry.state.load(std::memory_order_acquire);
      const auto is_copier_gone = [&] {
        const int copier = entry.copier.load(std::memory_order_relaxed);
        return channel_.membership()->is_gone(channel_.world_rank(copier));
      };
      if (state == RequestEntry::free || (state == RequestEntry::abandoned && is_copier_gone()))
        free_.push_back(i);
    }
    if (free_.empty() && n_entries_of(channel_.rank()) < n_entries_) back_entries(request);
    if (free_.empty()) return nullptr;
  }
  RequestEntry& entry = entry_at(free_.back());
  free_.pop_back();
  entry.state.store(RequestEntry::reserved, std::memory_order_relaxed);
  return &entry;
}

void TaggedMessages::free_cancelled(const Request& request, detail::TimeLimit& limit) const {
  for (std::int32_t i = 0; i < n_entries_of(channel_.rank()); ++i) {
    const RequestEntry& entry = entry_at(channel_.rank() * n_entries_ + i);
    if (entry.state.load(std::memory_order_acquire) != RequestEntry::cancelled) continue;
    const bool is_send = entry.is_send.load(std::memory_order_relaxed) != 0;
    const int peer = entry.peer.load(std::memory_order_relaxed);
    // Another thread of this rank may be writing them, if a peer has freed the entry meanwhile.
    if (is_send && peer == kAnySource) continue;
    Mailbox& mailbox = mailbox_of(is_send, peer);
    const Lock lock(*this, mailbox, request, limit);
    for (EntryList* const list : {&mailbox.sends, &mailbox.receives}) {
      take_first(*list, [](const RequestEntry&) { return false; });
    }
  }
}

RequestEntry* TaggedMessages::describe(const Request& request, detail::TimeLimit& limit) {
  RequestEntry* entry = take_entry(request);
  if (entry == nullptr) {
    free_cancelled(request, limit);
    entry = take_entry(request);
  }
  if (entry == nullptr) return nullptr;
  const Call& call = request.call_;
  entry->peer.store(call.root, std::memory_order_relaxed);
  entry->tag.store(request.tag_, std::memory_order_relaxed);
  entry->is_send.store(request.is_send(), std::memory_order_relaxed);
  entry->dtype = static_cast<std::uint32_t>(call.dtype);
  entry->address = reinterpret_cast<std::uint64_t>(request.is_send() ? call.in : call.out);
  entry->count = call.count;
  entry->n_refused = request.n_refused_;
  return entry;
}

std::shared_ptr<TaggedMessages::Request> TaggedMessages::post(const Call& call, int tag,
                                                              std::any memory) {
  channel_.throw_if_failed(call);
  auto request = std::make_shared<Request>(*this, call, tag, std::move(memory));
  detail::TimeLimit limit(call.timeout);
  reap();
  RequestEntry* const own = describe(*request, limit);
  RequestEntry* match = nullptr;
  try {
    request->entry_ = own;
    if (own != nullptr) {
      const std::lock_guard lock(mutex_);
      pending_.push_back(request);
    }
    Mailbox& mailbox = mailbox_of(request->is_send(), call.root);
    const Lock lock(*this, mailbox, *request, limit);
    match = take_match(mailbox, *request);
    // Matches even without a free entry; otherwise two ranks whose sends fill their tables
    // deadlock.
    if (match == nullptr && own == nullptr) {
      throw UsageError(request->context(-1),
                       fmt::format("{} sends and receives of this rank are pending, the maximum; "
                                   "wait for some of them first",
                                   n_entries_));
    }
    if (match == nullptr) append(request->is_send() ? mailbox.sends : mailbox.receives, *own);
  } catch (...) {
    request->release_entry();
    throw;
  }
  if (match == nullptr) return request;
  request->release_entry();
  copy_message(*request, *match);
  std::any done;  // destroyed without the lock
  const std::lock_guard lock(request->mutex_);
  done.swap(request->memory_);
  return request;
}

void TaggedMessages::refuse(const Call& call, std::string_view reason) noexcept try {
  if (call.root < 0 || call.root >= channel_.size()) return;
  const std::string text = internal::text_of_refusal(name_of(call.op), reason, call.where);
  if (!back_refusals()) return;
  const std::lock_guard lock(mutex_);
  add_refusal(refusals_[channel_.rank()], call.root, text);
  // Release: a peer that reads the number also sees the text.
  n_refused(channel_.rank(), call.op == Op::send, call.root)
      .fetch_add(1, std::memory_order_release);
} catch (const std::exception& error) {
  channel_.abandon(error.what());
}

bool TaggedMessages::back_refusals() const noexcept try {
  const int me = channel_.rank();
  if (has_refusals(me)) return true;
  const auto back = [this](auto* first, int n) {
    range_.back(reinterpret_cast<std::byte*>(first), static_cast<std::size_t>(n) * sizeof *first);
  };
  back(refusals_ + me, 1);
  back(refused_pairs_ + me * channel_.size(), channel_.size());
  mailboxes_[me].has_refusals.store(true, std::memory_order_release);
  return true;
} catch (const std::exception& error) {
  channel_.abandon(error.what());
  return false;
}

std::uint32_t TaggedMessages::n_refused_by(int rank, bool is_send, int peer) const noexcept {
  // A page without memory is not read: that would allocate it.
  if (peer == kAnySource || !has_refusals(rank)) return 0;
  return n_refused(rank, is_send, peer).load(std::memory_order_acquire);
}

void TaggedMessages::copy_message(Request& request, RequestEntry& entry) const {
  struct Guard {
    ~Guard() {
      if (entry == nullptr) return;
      entry->why = ENOMEM;  // an exception of this rank
      finish(*entry, RequestEntry::failed);
    }
    RequestEntry* entry;
  } guard{&entry};
  const auto end = [&guard](RequestEntry::State state) {
    return finish(*std::exchange(guard.entry, nullptr), state);
  };
  const Call& call = request.call_;
  const int peer = owner_of(entry);
  const Membership& membership = *channel_.membership();
  const bool is_any =
      call.root == kAnySource || entry.peer.load(std::memory_order_relaxed) == kAnySource;
  if (!is_any && entry.n_refused != request.n_refused_) {
    const std::exception_ptr error = request.refusal_error(peer, entry.n_refused);
    entry.why = RequestEntry::kRefusalMismatch;
    entry.copier_count = request.n_refused_;
    end(RequestEntry::mismatched);
    std::rethrow_exception(error);
  }
  if (entry.dtype != static_cast<std::uint32_t>(call.dtype) || entry.count != call.count) {
    const std::exception_ptr error = request.difference(peer, entry.dtype, entry.count);
    entry.why = static_cast<std::int32_t>(call.dtype);
    entry.copier_count = call.count;
    end(RequestEntry::mismatched);
    std::rethrow_exception(error);
  }
  // Checked before each message: after a process has ended, another may get its pid.
  const int world_rank = channel_.world_rank(peer);
  std::optional<Ending> ending = membership.ending_of(world_rank, /*ask_system=*/true);
  int error = ESRCH;
  if (!ending) {
    const pid_t pid = membership.segment().rank(world_rank).pid.load(std::memory_order_relaxed);
    void* const here = request.is_send() ? const_cast<void*>(call.in) : call.out;
    error = copy_across(
        pid, request.is_send() ? Direction::to_peer : Direction::from_peer, here, entry.address,
        call.count * size_of(call.dtype),
        [&entry] { return entry.state.load(std::memory_order_acquire) == RequestEntry::copying; });
  }
  entry.why = error;
  if (!end(error == 0 ? RequestEntry::complete : RequestEntry::failed)) {
    throw TimeoutError(
        request.context(peer),
        fmt::format("rank {} abandoned its message while this rank copied it", peer));
  }
  if (error == 0) {
    request.source_ = request.is_send() ? channel_.rank() : peer;
    request.is_over_.store(true, std::memory_order_release);
    return;
  }
  // The memory of an ending process is freed slightly before the process is gone.
  for (int i = 0; !ending && error == ESRCH && i < 100; ++i) {
    std::this_thread::sleep_for(milliseconds(10));
    ending = membership.ending_of(world_rank, /*ask_system=*/true);
  }
  if (ending) {
    FirstEnded first;
    first.add(peer, *ending);
    throw_ending(request, first);
  }
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
