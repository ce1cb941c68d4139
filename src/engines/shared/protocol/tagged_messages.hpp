#pragma once

#include <any>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/engine.hpp>
#include <lockstep/error.hpp>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/fork_guard.hpp"
#include "engines/shared/protocol/channel.hpp"
#include "engines/shared/segment/layout.hpp"
#include "engines/shared/segment/segment.hpp"

namespace lockstep::shared {

/// Sends and receives that match by source and tag, as those of MPI and torch.distributed: many at
/// once, in any order, from any source. A send completes when its data has been copied to the
/// matching receive.
///
/// The protocol. Shared memory has for each rank a table of entries, which describe its pending
/// sends and receives, and a mailbox with two lists of unmatched entries: sends to this rank, and
/// receives of this rank. A rank that sends or receives searches, under the mailbox's lock, for the
/// oldest match in the other list. If there is one, it removes that entry, releases the lock, and
/// copies the bytes between its own memory and that of the entry's owner (process_vm_readv,
/// process_vm_writev). If there is none, it adds an entry of its own. So the later of the two ranks
/// copies the message, once, while it starts its request; the earlier one need not be in any call.
///
/// Proof that messages with the same source and tag do not overtake each other. The lists are in
/// the order of posting, and never hold two entries that match: the later one would not have been
/// added. So the oldest match is the one that MPI asks for.
/// Proof that nobody accesses memory that its owner has left. A peer copies only while the entry
/// is `copying`, which it becomes only from `unmatched`, by compare-and-swap. The owner returns
/// when it has seen how the copy ended, when its own compare-and-swap from `unmatched` to
/// `cancelled` has succeeded, when the copier's process has ended, or when it abandons a copier
/// that does not run. That one finds `abandoned` before its next system call, and copies no more,
/// unless it was stopped between this look and the system call: then it copies into memory that is
/// never freed.
///
/// A send and its receive carry how many of them each end has refused, unless the receive is from
/// any source. If the numbers differ, both ends get a MismatchError. A waiting end gets it when the
/// other has refused more, and notifies that rank, whose messages fail in the same way until the
/// numbers are equal. So a refused message ends no group.
///
/// A rank that dies while it holds a lock ends the group, because the list may be damaged: the
/// failure is recorded before the lock is released, so the next rank that gets the lock finds the
/// group failed and does not use the list.
///
/// Threads: any. The channel must outlive it.
class TaggedMessages {
 public:
  static constexpr int kAnySource = -1;

  class Request;

  /// Reserves the memory for n ranks, to which each of them attaches.
  static std::uint64_t make(Segment& segment, int n_ranks);
  /// Lets other ranks access this process's memory where Yama restricts that to a tracer, while any
  /// copy exists; null: not needed. A process has one such permission, so this one replaces the
  /// program's, which cannot be queried.
  using Permission = std::shared_ptr<const void>;

  /// `offset`: what make() returned.
  TaggedMessages(Channel& channel, std::uint64_t offset, Permission permission);
  TaggedMessages(const TaggedMessages&) = delete;
  TaggedMessages& operator=(const TaggedMessages&) = delete;

  /// Collective: whether every rank of the channel can access every other's memory, with this
  /// permission.
  static bool are_possible(Channel& channel, const Call& call, Permission& permission);

  /// Begins call.op, send or recv, with the rank call.root, of a receive also kAnySource. `memory`
  /// owns the elements, and is kept until nobody accesses them, also if the result is destroyed: at
  /// least until the next post(). Throws UsageError if its match has not come and too many are
  /// under way, and what Request::wait throws.
  std::shared_ptr<Request> post(const Call& call, int tag, std::any memory);
  /// Counts a send or recv, call.op with call.root, that this rank threw before post(). Not one of
  /// any source, or of no rank, which no peer expects.
  void refuse(const Call& call, std::string_view reason) noexcept;

 private:
  class Lock;
  using Clock = detail::JobClock;

  /// Of the messages to `peer` of a send, or to this rank.
  Mailbox& mailbox_of(bool is_send, int peer) const noexcept {
    return mailboxes_[is_send ? peer : channel_.rank()];
  }
  RequestEntry& entry_at(std::int32_t index) const noexcept { return entries_[index]; }
  /// How many sends to, or receives from, `peer` the rank has refused, and kMismatchSeen.
  std::atomic<std::uint32_t>& n_refused(int rank, bool is_send, int peer) const noexcept {
    RefusedPairs& pair = refused_pairs_[rank * channel_.size() + peer];
    return is_send ? pair.n_sends : pair.n_receives;
  }
  std::uint32_t n_refused_by(int rank, bool is_send, int peer) const noexcept;
  bool has_refusals(int rank) const noexcept {
    return mailboxes_[rank].has_refusals.load(std::memory_order_acquire);
  }
  /// Allocates memory for what this rank refuses; if there is none, ends the group and returns
  /// false. Threads: any.
  bool back_refusals() const noexcept;
  std::int32_t n_entries_of(int rank) const noexcept {
    return mailboxes_[rank].n_entries.load(std::memory_order_acquire);
  }
  int owner_of(const RequestEntry& entry) const noexcept {
    return static_cast<int>((&entry - entries_) / n_entries_);
  }
  template <class Matches>
  RequestEntry* take_first(EntryList& list, Matches matches) const noexcept;
  RequestEntry* take_match(Mailbox& mailbox, const Request& request) const noexcept;
  void append(EntryList& list, RequestEntry& entry) const noexcept;
  /// A free entry; null: all are in use. Throws SystemError.
  RequestEntry* take_entry(const Request& request);
  /// Allocates memory for more of this rank's entries, twice as many each time. Requires mutex_.
  void back_entries(const Request& request);
  /// Takes what this rank has cancelled out of the lists.
  void free_cancelled(const Request& request, detail::TimeLimit& limit) const;
  /// An entry for it; null: all are in use.
  RequestEntry* describe(const Request& request, detail::TimeLimit& limit);
  void copy_message(Request& request, RequestEntry& entry) const;
  /// Releases requests whose memory is no longer accessed.
  void reap();
  /// Throws if the request cannot complete: the group failed, this rank has left it, the peer
  /// ended, or the time is over.
  void check(const Request& request, detail::TimeLimit& limit, unsigned round) const;
  [[noreturn]] void throw_ending(const Request& request, const FirstEnded& first) const;
  [[noreturn]] void throw_timeout(const Request& request, std::chrono::milliseconds limit) const;
  std::string pending_of(int rank) const;

  base::ForkGuard process_;
  Permission permission_;
  Channel& channel_;
  mutable Range range_;
  Mailbox* mailboxes_;
  Refusals* refusals_;
  RequestEntry* entries_;
  std::int32_t n_entries_;          // the maximum per rank; Mailbox::n_entries of them have memory
  RefusedPairs* refused_pairs_;     // by rank and peer
  std::mutex mutex_;                // guards what follows
  std::vector<std::int32_t> free_;  // some of this rank's free entries
  std::vector<std::shared_ptr<Request>> pending_;
};

/// One send or receive that has begun.
class TaggedMessages::Request {
 public:
  Request(const TaggedMessages& messages, const Call& call, int tag, std::any memory);
  /// Cancels it if it has not completed.
  ~Request();
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  /// Whether wait() returns or throws at once. Ends it if its peer or the group has ended; only
  /// wait() times out.
  bool poll();
  /// Throws MismatchError (another type, count or number of refused calls), TimeoutError, PeerLost,
  /// PeerFailed, SystemError, UsageError (this rank has left the group), and the error that ended
  /// the group. The message is then cancelled, and the group goes on.
  void wait(std::chrono::milliseconds timeout);
  /// If it is unmatched, cancels it, and wait() throws `error`. Otherwise no effect.
  void end_with(std::exception_ptr error);
  /// The sender, when a receive is complete.
  int source() const noexcept { return source_.load(std::memory_order_relaxed); }

 private:
  friend class TaggedMessages;

  bool is_send() const noexcept { return call_.op == Op::send; }
  bool is_forked_child() const noexcept { return messages_.process_.is_forked_child(); }
  /// Whether its memory is no longer accessed; the memory is then moved to `memory`.
  bool try_reap(std::any& memory);
  bool is_over();
  void wait_until_over(detail::TimeLimit limit);
  void release_entry();
  /// The rank that copies it; -1: none.
  int copier() const;
  void collect(std::any& memory);  // requires the lock
  std::exception_ptr difference(int peer, std::int64_t dtype, std::uint64_t count) const;
  /// The peer has refused another number of such calls than this rank. If this end has refused
  /// fewer, it notifies the peer.
  std::exception_ptr refusal_error(int peer, std::uint64_t peer_n_refused) const;
  UsageError left_error() const;
  ErrorContext context(int peer) const;

  const TaggedMessages& messages_;
  const Call call_;
  const int tag_;
  const std::uint32_t n_refused_;  // of these messages with this peer, by this rank
  mutable std::mutex mutex_;       // guards the next four
  std::any memory_;
  RequestEntry* entry_ = nullptr;
  std::exception_ptr error_;
  std::optional<Clock::time_point> copy_seen_at_;  // when it was first found copying
  std::atomic<unsigned> n_polls_{0};
  std::atomic<Clock::rep> next_poll_{0};
  std::atomic<bool> is_over_{false};
  std::atomic<int> source_{kAnySource};
};

}  // namespace lockstep::shared
