#include "thread_engine.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <lockstep/error.hpp>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "reduce.hpp"

namespace example {

using namespace lockstep;
using Bytes = std::vector<std::byte>;

struct SharedState {
  explicit SharedState(int n)
      : n_ranks(n), rounds(n), calls(n), colors(n), children(n), mail(n * n) {}

  /// A barrier: returns when every rank has entered it as often as `rank`. Between two barriers all
  /// ranks may read what each wrote before the first.
  void synchronise(const Call& call, int rank) {
    std::unique_lock lock(mutex);
    const int round = ++rounds[rank];
    changed.notify_all();
    const auto is_here = [&](int r) { return r >= round; };
    wait(lock, call, rank, [&] { return std::ranges::all_of(rounds, is_here); });
  }

  /// Waits for the condition, the group's failure, or the call's timeout.
  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, const Call& call, int rank, Ready ready) {
    changed.wait_for(lock, call.timeout, [&] { return ready() || raise; });
    if (ready()) return;
    if (!raise) fail_locked<TimeoutError>("a peer has not made this call within the timeout");
    raise(context_of(call, rank));
  }

  /// The group is dead: every rank that waits now, or calls later, throws this.
  template <class E>
  void fail(const std::string& text) {
    const std::lock_guard lock(mutex);
    fail_locked<E>(text);
  }
  template <class E>
  void fail_locked(const std::string& text) {
    if (!raise) raise = [text](ErrorContext context) { throw E(std::move(context), text); };
    changed.notify_all();
  }

  const int n_ranks;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<int> rounds;                  ///< barriers of each rank so far
  std::function<void(ErrorContext)> raise;  ///< throws the group's failure, if it has one
  std::vector<const Call*> calls;           ///< of each rank, between two barriers
  std::vector<std::pair<int, int>> colors;  ///< the same: color and key of a split
  std::vector<std::shared_ptr<SharedState>> children;  ///< the same: by the new group's first rank
  std::vector<std::deque<Bytes>> mail;  ///< sent and not received: [from * n_ranks + to]
};

namespace {

struct Memory final : SharedMemory {
  explicit Memory(std::size_t n_bytes) : bytes(n_bytes) {}
  std::byte* data() const noexcept override { return bytes.data(); }
  mutable Bytes bytes;
};

class ThreadEngine final : public Engine {
 public:
  ThreadEngine(std::shared_ptr<SharedState> state, int rank)
      : state_(std::move(state)), rank_(rank) {}

  std::string_view name() const noexcept override { return "threads"; }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return state_->n_ranks; }

  void run(const Call& call) override {
    if (call.op == Op::send) return send(call);
    if (call.op == Op::recv) return receive(call);
    state_->calls[rank_] = &call;
    state_->synchronise(call, rank_);
    compare(call);
    const Bytes result = result_of(call);
    state_->synchronise(call, rank_);  // peers have read `in`, which may be `out`
    if (!result.empty()) std::memcpy(call.out, result.data(), result.size());
  }

  std::unique_ptr<Engine> split(const Call& call, int color, int key) override {
    state_->colors[rank_] = {color, key};
    state_->synchronise(call, rank_);
    std::vector<std::pair<int, int>> members;  // key and rank
    for (int r = 0; r < size(); ++r) {
      const auto [its_color, its_key] = state_->colors[r];
      if (its_color == color) members.emplace_back(its_key, r);
    }
    std::ranges::sort(members);
    const auto own = std::ranges::find(members, std::pair(key, rank_)) - members.begin();
    std::shared_ptr<SharedState>& child = state_->children[members[0].second];
    if (own == 0) child = make_shared_state(static_cast<int>(members.size()));
    state_->synchronise(call, rank_);
    return join(child, static_cast<int>(own));
  }

  std::unique_ptr<SharedMemory> allocate(const Call& call) override {
    auto memory = std::make_unique<Memory>(call.count);
    run(call);
    return memory;
  }

  void abandon(std::string_view reason) noexcept override {
    state_->fail<PeerFailed>(std::string(reason));
  }
  // Ranks that wait in groups split from the world time out.
  void leave(std::string_view failure) noexcept override {
    if (!failure.empty()) return abandon(failure);
    state_->fail<PeerLost>("rank " + std::to_string(rank_) + " has left");
  }

 private:
  void compare(const Call& call) const {
    for (int r = 0; r < size(); ++r) {
      const Call& peer = *state_->calls[r];
      if (peer.op != call.op || peer.dtype != call.dtype || peer.reduce != call.reduce ||
          peer.root != call.root || !std::ranges::equal(peer.counts, call.counts) ||
          (peer.count != call.count && call.counts.empty())) {
        throw MismatchError(context_of(call, rank_),
                            "rank " + std::to_string(r) +
                                " called another operation: " + std::string(name_of(peer.op)) +
                                " of " + std::to_string(peer.count) + ' ' +
                                std::string(name_of(peer.dtype)));
      }
    }
  }

  /// What the operation writes to `out` of this rank: see Engine.
  Bytes result_of(const Call& call) const {
    const std::size_t n_bytes = call.count * size_of(call.dtype);
    Bytes result;
    // `n` bytes of a rank's `in`, after `offset`.
    const auto append = [&](int r, std::size_t offset, std::size_t n) {
      const auto* const in = static_cast<const std::byte*>(state_->calls[r]->in) + offset;
      result.insert(result.end(), in, in + n);
    };
    const auto reduce_at = [&](std::size_t offset) {
      std::vector<const std::byte*> in;
      for (const Call* peer : state_->calls) {
        in.push_back(static_cast<const std::byte*>(peer->in) + offset);
      }
      result.resize(n_bytes);
      reduce(call.dtype, call.reduce, in, result.data(), call.count);
    };
    const auto own = static_cast<std::size_t>(rank_) * n_bytes;
    const bool is_for_all = call.op == Op::all_reduce || call.op == Op::all_gather;
    switch (call.op) {
      case Op::all_reduce:
      case Op::reduce:
        if (is_for_all || call.root == rank_) reduce_at(0);
        break;
      case Op::reduce_scatter: reduce_at(own); break;
      case Op::broadcast: append(call.root, 0, n_bytes); break;
      case Op::scatter: append(call.root, own, n_bytes); break;
      case Op::all_gather:
      case Op::gather:
        for (int r = 0; (is_for_all || call.root == rank_) && r < size(); ++r) {
          append(r, 0, call.counts.empty() ? n_bytes : call.counts[r] * size_of(call.dtype));
        }
        break;
      case Op::all_to_all:
        for (int r = 0; r < size(); ++r) append(r, own, n_bytes);
        break;
      default: break;  // barrier, allocate
    }
    return result;
  }

  std::deque<Bytes>& mail(int from, int to) const { return state_->mail[from * size() + to]; }

  void send(const Call& call) {
    const auto* const in = static_cast<const std::byte*>(call.in);
    const std::lock_guard lock(state_->mutex);
    mail(rank_, call.root).emplace_back(in, in + call.count * size_of(call.dtype));
    state_->changed.notify_all();
  }
  void receive(const Call& call) {
    std::unique_lock lock(state_->mutex);
    std::deque<Bytes>& messages = mail(call.root, rank_);
    state_->wait(lock, call, rank_, [&] { return !messages.empty(); });
    const Bytes message = std::move(messages.front());
    messages.pop_front();
    if (message.size() != call.count * size_of(call.dtype)) {
      throw MismatchError(context_of(call, rank_), "the peer sent another number of bytes");
    }
    if (!message.empty()) std::memcpy(call.out, message.data(), message.size());
  }

  std::shared_ptr<SharedState> state_;
  int rank_;
};

}  // namespace

std::shared_ptr<SharedState> make_shared_state(int n_ranks) {
  return std::make_shared<SharedState>(n_ranks);
}

std::unique_ptr<Engine> join(std::shared_ptr<SharedState> state, int rank) {
  return std::make_unique<ThreadEngine>(std::move(state), rank);
}

}  // namespace example
