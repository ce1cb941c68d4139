#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/bytes.hpp"
#include "engines/hierarchical/accumulator.hpp"
#include "engines/hierarchical/levels.hpp"
#include "kernels/reduce.hpp"
#include "record/signature.hpp"

namespace lockstep::hierarchical {
namespace {

using base::bytes;
using base::copy_bytes;

/// Up to this many bytes, the data from one host to another is combined in one message between
/// leaders, even if that saves no bytes. A message of this size takes about as long as an empty one
/// (10 us at 25 Gbit/s); larger parts are faster from rank to rank, without copies on the leaders.
constexpr std::size_t kCombinedBytes = 32 << 10;
/// The partial results of a reduce_scatter that are sent at a time: they stay in the cache.
constexpr std::size_t kPieceBytes = 4 << 20;

/// The elements of each rank in all_gather and gather.
struct Parts {
  Parts(const Call& c, const Topology& topology)
      : call(c), of_hosts(topology.sums_by_host([this](int r) { return of(r); })) {
    for (const int member : topology.members) of_members.push_back(of(member));
    total = std::accumulate(of_hosts.begin(), of_hosts.end(), std::size_t{0});
  }
  std::size_t of(int r) const {
    return call.counts.empty() ? call.count : call.counts[static_cast<std::size_t>(r)];
  }

  const Call& call;
  std::vector<std::size_t> of_hosts, of_members;
  std::size_t total = 0;
};

/// The steps of one call.
class Steps {
 public:
  Steps(Levels& levels, const Call& call)
      : levels_(levels), call_(call), element_(size_of(call.dtype)) {}

  void run();

 private:
  void all_reduce();
  void reduce();
  void reduce_scatter();
  void broadcast();
  void all_gather();
  void gather();
  void scatter();
  void all_to_all();
  void reduce_inputs();
  void run_directly();
  std::size_t bytes_to_each() const;
  bool is_long(std::size_t n_bytes) const { return levels_.global && n_bytes > kCombinedBytes; }

  const Topology& topology() const { return levels_.topology; }
  int host() const { return topology().host_of(levels_.rank()); }
  bool is_root() const { return call_.root == levels_.rank(); }
  bool is_root_leader() const { return topology().leader_of(call_.root) == call_.root; }
  Call step(Op op, int root) const { return step_of(call_, op, root); }

  void reduce_to_leaders(const Accumulator& accumulator, std::size_t count, void* partial);
  void gather_to_leaders(const Parts& parts, void* out);
  std::vector<std::byte> gather_on_host(const Parts& parts);
  void gather_on_leaders(Op op, const Parts& parts, const std::byte* own, void* out);
  void scatter_on_host(std::size_t count, const std::byte* from, void* to);
  void send_to_root(const void* data, std::size_t count);
  std::vector<std::byte> send_to_leader(const void* data, std::size_t count);

  Levels& levels_;
  const Call& call_;
  const std::size_t element_;
};

/// The bytes that a rank sends each other one if the call goes directly from rank to rank; for an
/// all_to_all, those that its leader joins for each.
std::size_t Steps::bytes_to_each() const {
  const std::size_t n_bytes = call_.count * element_;
  switch (call_.op) {
    case Op::all_reduce:
    case Op::reduce:
    case Op::broadcast: return n_bytes / static_cast<std::size_t>(levels_.n_ranks());
    case Op::all_gather:
    case Op::gather:
      return call_.counts.empty() ? n_bytes : *std::ranges::max_element(call_.counts) * element_;
    case Op::all_to_all: return n_bytes * topology().max_local_size;
    case Op::scatter:
    case Op::reduce_scatter: return n_bytes;
    case Op::barrier:
    case Op::send:
    case Op::recv:
    case Op::split:
    case Op::allocate: break;
  }
  return 0;
}

void Steps::run() {
  if (bytes_to_each() > levels_.most_bytes) return run_directly();
  if (levels_.reduces_inputs && internal::is_reduction(call_.op)) return reduce_inputs();
  switch (call_.op) {
    case Op::barrier: return levels_.run_barrier(call_);
    case Op::all_reduce: return all_reduce();
    case Op::reduce: return reduce();
    case Op::reduce_scatter: return reduce_scatter();
    case Op::broadcast: return broadcast();
    case Op::all_gather: return all_gather();
    case Op::gather: return gather();
    case Op::scatter: return scatter();
    case Op::all_to_all: return all_to_all();
    case Op::send:
    case Op::recv: {
      if (!levels_.is_on_this_host(call_.root)) {
        if (levels_.global) return levels_.run_message(call_);
        throw UsageError(context_of(call_, levels_.rank()),
                         "shards send no messages to those of another host");
      }
      Call message = call_;
      message.root = topology().local_rank_of(call_.root);
      return levels_.run_local(message);
    }
    case Op::split:
    case Op::allocate: break;
  }
}

void Steps::run_directly() {
  levels_.compare(call_);
  levels_.run_global(call_);
}

/// Reduces `count` elements of `partial` on the leader of each host.
void Steps::reduce_to_leaders(const Accumulator& accumulator, std::size_t count, void* partial) {
  Call local = step(Op::reduce, /*root=*/0);
  local.dtype = accumulator.dtype;
  local.count = count * accumulator.n_parts;
  local.reduce = call_.reduce == ReduceOp::mean ? ReduceOp::sum : call_.reduce;
  local.in = local.out = partial;
  levels_.run_local(local);
}

/// The same step as reduce_to_leaders, between them.
Call between_leaders(Call step, const Accumulator& accumulator, std::size_t count, void* partial) {
  step.dtype = accumulator.dtype;
  step.count = count * accumulator.n_parts;
  step.reduce = step.reduce == ReduceOp::mean ? ReduceOp::sum : step.reduce;
  step.in = step.out = partial;
  return step;
}

void Steps::all_reduce() {
  const Accumulator accumulator = accumulator_of(call_.dtype, call_.reduce);
  std::vector<std::byte> room;
  void* partial = call_.out;
  if (accumulator.dtype != call_.dtype || accumulator.n_parts != 1) {
    room.resize(accumulator.n_bytes(call_.count));
    partial = room.data();
  }
  to_accumulator(call_.dtype, call_.reduce, call_.in, partial, call_.count);
  reduce_to_leaders(accumulator, call_.count, partial);
  if (levels_.is_leader()) {
    levels_.run_leaders(
        between_leaders(step(Op::all_reduce, /*root=*/-1), accumulator, call_.count, partial));
    from_accumulator(call_.dtype, call_.reduce, partial, levels_.n_ranks(), call_.out, call_.count);
  }
  Call result = step(Op::broadcast, /*root=*/0);
  result.in = call_.out;
  levels_.run_local(result);
}

void Steps::reduce() {
  const Accumulator accumulator = accumulator_of(call_.dtype, call_.reduce);
  std::vector<std::byte> partial(accumulator.n_bytes(call_.count));
  to_accumulator(call_.dtype, call_.reduce, call_.in, partial.data(), call_.count);
  reduce_to_leaders(accumulator, call_.count, partial.data());
  if (levels_.is_leader()) {
    levels_.run_leaders(between_leaders(step(Op::reduce, topology().host_of(call_.root)),
                                        accumulator, call_.count, partial.data()));
  }
  if (!levels_.is_on_this_host(call_.root)) return;
  if (levels_.is_leader()) {
    from_accumulator(call_.dtype, call_.reduce, partial.data(), levels_.n_ranks(),
                     is_root() ? call_.out : partial.data(), call_.count);
  }
  send_to_root(partial.data(), call_.count);
}

/// In pieces of each rank's part: reduced on the hosts, then for each host on its leader, which
/// rounds once.
void Steps::reduce_scatter() {
  const Accumulator accumulator = accumulator_of(call_.dtype, call_.reduce);
  const std::size_t n_here = topology().max_local_size;
  const std::size_t n_slots = n_here * static_cast<std::size_t>(levels_.n_hosts());
  const std::size_t piece =
      std::min(call_.count, std::max<std::size_t>(kPieceBytes / accumulator.n_bytes(n_slots), 1));
  std::vector<std::byte> partial(accumulator.n_bytes(n_slots * piece));
  std::vector<std::byte> sums(levels_.is_leader() ? accumulator.n_bytes(n_here * piece) : 0);
  std::size_t at = 0;
  do {
    const std::size_t now = std::min(piece, call_.count - at);
    topology().for_each_slot([&](int r, std::size_t slot) {
      const std::size_t from = static_cast<std::size_t>(r) * call_.count + at;
      to_accumulator(call_.dtype, call_.reduce, bytes(call_.in) + from * element_,
                     partial.data() + accumulator.n_bytes(slot * now), now);
    });
    reduce_to_leaders(accumulator, n_slots * now, partial.data());
    if (levels_.is_leader()) {
      Call leader_step = between_leaders(step(Op::reduce_scatter, /*root=*/-1), accumulator,
                                         n_here * now, partial.data());
      leader_step.out = sums.data();
      levels_.run_leaders(leader_step);
      from_accumulator(call_.dtype, call_.reduce, sums.data(), levels_.n_ranks(), sums.data(),
                       n_here * now);
    }
    scatter_on_host(now, sums.data(), bytes(call_.out) + at * element_);
    at += now;
  } while (at < call_.count);
}

/// A reduction with the bits of one host: each leader reduces every rank's input, piece by piece.
void Steps::reduce_inputs() {
  const auto n = static_cast<std::size_t>(levels_.n_ranks());
  const std::size_t count = call_.op == Op::reduce_scatter ? call_.count * n : call_.count;
  const std::size_t piece = std::min(count, std::max<std::size_t>(kPieceBytes / (n * element_), 1));
  std::vector<std::byte> inputs(levels_.is_leader() ? n * piece * element_ : 0);
  const bool is_for_all = call_.op == Op::all_reduce;
  std::vector<std::byte> sums(levels_.is_leader() && !is_for_all ? count * element_ : 0);
  std::byte* const result = is_for_all ? bytes(call_.out) : sums.data();
  std::size_t at = 0;
  do {
    Call gather = step(Op::all_gather, /*root=*/-1);
    gather.count = std::min(piece, count - at);
    gather.in = bytes(call_.in) + at * element_;
    Steps(levels_, gather).gather_to_leaders(Parts(gather, topology()), inputs.data());
    if (levels_.is_leader() && gather.count > 0) {
      std::vector<const void*> of_ranks;
      for (std::size_t r = 0; r < n; ++r) {
        of_ranks.push_back(inputs.data() + r * gather.count * element_);
      }
      kernels::reduce(call_.dtype, call_.reduce, of_ranks.data(), levels_.n_ranks(),
                      result + at * element_, gather.count);
    }
    at += gather.count;
  } while (at < count);
  if (call_.op == Op::reduce) {
    if (!levels_.is_on_this_host(call_.root)) return;
    if (levels_.is_leader() && is_root()) copy_bytes(call_.out, sums.data(), sums.size());
    return send_to_root(sums.data(), count);
  }
  if (is_for_all) {
    Call local = step(Op::broadcast, /*root=*/0);
    local.in = call_.out;
    return levels_.run_local(local);
  }
  std::vector<std::byte> of_members;
  if (levels_.is_leader()) {
    for (const int member : topology().members) {
      const auto* const part =
          sums.data() + static_cast<std::size_t>(member) * call_.count * element_;
      of_members.insert(of_members.end(), part, part + call_.count * element_);
    }
  }
  scatter_on_host(call_.count, of_members.data(), call_.out);
}

void Steps::broadcast() {
  const bool is_on_this_host = levels_.is_on_this_host(call_.root);
  if (is_on_this_host) levels_.run_local(step(Op::broadcast, topology().local_rank_of(call_.root)));
  Call further = step(Op::broadcast, /*root=*/0);
  // The leader of the root's host has the data in `out` now.
  further.in = call_.out;
  if (levels_.is_leader()) {
    Call leader_step = further;
    leader_step.root = topology().host_of(call_.root);
    levels_.run_leaders(leader_step);
  }
  if (!is_on_this_host) levels_.run_local(further);
}

/// On the leader: the parts of its host, in order.
std::vector<std::byte> Steps::gather_on_host(const Parts& parts) {
  std::vector<std::byte> own(
      levels_.is_leader() ? parts.of_hosts[static_cast<std::size_t>(host())] * element_ : 0);
  Call local = step(Op::gather, /*root=*/0);
  local.counts = parts.of_members;
  local.out = own.data();
  levels_.run_local(local);
  return own;
}

/// On a leader: gathers the parts of all hosts to `out`, in rank order; for gather, on root's host
/// only.
void Steps::gather_on_leaders(Op op, const Parts& parts, const std::byte* own, void* out) {
  Call leader_step = step(op, op == Op::gather ? topology().host_of(call_.root) : -1);
  leader_step.count = parts.of_hosts[static_cast<std::size_t>(host())];
  leader_step.counts = parts.of_hosts;
  leader_step.in = own;
  leader_step.out = out;
  const bool is_receiver = op == Op::all_gather || levels_.is_on_this_host(call_.root);
  if (!is_receiver || topology().is_rank_order()) return levels_.run_leaders(leader_step);
  std::vector<std::byte> all(parts.total * element_);
  leader_step.out = all.data();
  levels_.run_leaders(leader_step);
  topology().to_rank_order(
      all, [&parts](int r) { return parts.of(r); }, element_, out);
}

/// The parts of all ranks, to `out` of each leader.
void Steps::gather_to_leaders(const Parts& parts, void* out) {
  const std::vector<std::byte> own = gather_on_host(parts);
  if (levels_.is_leader()) gather_on_leaders(Op::all_gather, parts, own.data(), out);
}

void Steps::all_gather() {
  const Parts parts(call_, topology());
  gather_to_leaders(parts, call_.out);
  Call result = step(Op::broadcast, /*root=*/0);
  result.count = parts.total;
  result.counts = {};
  result.in = call_.out;
  levels_.run_local(result);
}

void Steps::gather() {
  const Parts parts(call_, topology());
  if (is_long(*std::ranges::max_element(parts.of_hosts) * element_)) return run_directly();
  const std::vector<std::byte> own = gather_on_host(parts);
  const bool is_on_this_host = levels_.is_on_this_host(call_.root);
  std::vector<std::byte> all(
      levels_.is_leader() && is_on_this_host && !is_root() ? parts.total * element_ : 0);
  if (levels_.is_leader()) {
    gather_on_leaders(Op::gather, parts, own.data(), is_root() ? call_.out : all.data());
  }
  if (is_on_this_host) send_to_root(all.data(), parts.total);
}

/// From this host's leader: `count` elements to each member.
void Steps::scatter_on_host(std::size_t count, const std::byte* from, void* to) {
  Call local = step(Op::scatter, /*root=*/0);
  local.count = count;
  local.in = from;
  local.out = to;
  levels_.run_local(local);
}

void Steps::scatter() {
  const std::size_t n_here = topology().max_local_size;
  const std::size_t part_bytes = call_.count * element_;
  if (is_long(n_here * part_bytes)) return run_directly();
  const void* all = call_.in;
  std::vector<std::byte> passed, slots, own;
  if (levels_.is_on_this_host(call_.root) && !is_root_leader()) {
    passed = send_to_leader(call_.in, call_.count * static_cast<std::size_t>(levels_.n_ranks()));
    all = passed.data();
  }
  if (levels_.is_leader()) {
    own.resize(n_here * part_bytes);
    if (levels_.is_on_this_host(call_.root)) {
      slots.resize(own.size() * static_cast<std::size_t>(levels_.n_hosts()));
      topology().for_each_slot([&](int r, std::size_t slot) {
        copy_bytes(slots.data() + slot * part_bytes,
                   bytes(all) + static_cast<std::size_t>(r) * part_bytes, part_bytes);
      });
    }
    Call leader_step = step(Op::scatter, topology().host_of(call_.root));
    leader_step.count = n_here * call_.count;
    leader_step.in = slots.data();
    leader_step.out = own.data();
    levels_.run_leaders(leader_step);
  }
  scatter_on_host(call_.count, own.data(), call_.out);
}

/// From a leader to another: for each pair of their members, in the order of senders and then of
/// receivers, one part.
void Steps::all_to_all() {
  const std::size_t n_here = topology().max_local_size;
  const std::size_t part_bytes = call_.count * element_;
  if (is_long(n_here * n_here * part_bytes)) return run_directly();
  const auto n = static_cast<std::size_t>(levels_.n_ranks());
  const std::size_t n_members = topology().members.size();
  const std::size_t n_between = n_here * n_here * static_cast<std::size_t>(levels_.n_hosts());
  std::vector<std::byte> of_members(levels_.is_leader() ? n_members * n * part_bytes : 0);
  Call local = step(Op::gather, /*root=*/0);
  local.count = n * call_.count;
  local.out = of_members.data();
  levels_.run_local(local);
  if (levels_.is_leader()) {
    std::vector<std::byte> sent(n_between * part_bytes), received(sent.size());
    // Slot s is of the host s / n_here and of its member s % n_here.
    const auto copy = [&](std::byte* to, std::size_t i, const std::byte* from, std::size_t j) {
      copy_bytes(to + i * part_bytes, from + j * part_bytes, part_bytes);
    };
    topology().for_each_slot([&](int r, std::size_t slot) {
      const std::size_t block = slot / n_here * n_here * n_here, place = slot % n_here;
      for (std::size_t m = 0; m < n_members; ++m) {
        copy(sent.data(), block + m * n_here + place, of_members.data(),
             m * n + static_cast<std::size_t>(r));
      }
    });
    Call leader_step = step(Op::all_to_all, /*root=*/-1);
    leader_step.count = n_here * n_here * call_.count;
    leader_step.in = sent.data();
    leader_step.out = received.data();
    levels_.run_leaders(leader_step);
    topology().for_each_slot([&](int r, std::size_t slot) {
      for (std::size_t m = 0; m < n_members; ++m) {
        copy(of_members.data(), m * n + static_cast<std::size_t>(r), received.data(),
             slot * n_here + m);
      }
    });
  }
  scatter_on_host(n * call_.count, of_members.data(), call_.out);
}

/// On root's host: from its leader to root, which has the result if it is the leader itself.
void Steps::send_to_root(const void* data, std::size_t count) {
  if (is_root_leader()) return;
  if (levels_.is_leader()) {
    Call message = step(Op::send, topology().local_rank_of(call_.root));
    message.count = count;
    message.counts = {};
    message.in = data;
    levels_.run_local(message);
  } else if (is_root()) {
    Call message = step(Op::recv, /*root=*/0);
    message.count = count;
    message.counts = {};
    levels_.run_local(message);
  }
}

/// On root's host: from root to its leader. A gather of one part, so that all ranks of the host
/// compare their calls.
std::vector<std::byte> Steps::send_to_leader(const void* data, std::size_t count) {
  std::vector<std::byte> passed(levels_.is_leader() ? count * element_ : 0);
  std::vector<std::size_t> counts(topology().members.size());
  counts[static_cast<std::size_t>(topology().local_rank_of(call_.root))] = count;
  Call local = step(Op::gather, /*root=*/0);
  local.count = is_root() ? count : 0;
  local.counts = counts;
  local.in = data;
  local.out = passed.data();
  levels_.run_local(local);
  return passed;
}

}  // namespace

void run_over_hosts(Levels& levels, const Call& call) { Steps(levels, call).run(); }

}  // namespace lockstep::hierarchical
