#include "engines/hierarchical/hierarchical.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <lockstep/error.hpp>
#include <numeric>
#include <utility>
#include <vector>

#include "engines/hierarchical/hosts.hpp"
#include "engines/hierarchical/topology.hpp"
#include "engines/hierarchical/wide.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "group/check.hpp"
#include "group/failure.hpp"

namespace lockstep::hierarchical {
namespace {

/// Added to the timeout of a rank that waits for other hosts, so that the ranks of a late host
/// first report which of them is late. Ranks that wait for such a rank give it the same time.
constexpr std::chrono::milliseconds kReportTime{700};
/// On an oversubscribed machine, or in a library that does not return, a rank that waits for other
/// hosts may time out late; the ranks of its host extend its deadline by this much more.
constexpr std::chrono::milliseconds kPatience = 8 * kReportTime;

/// Prefixes of errors whose text uses the rank numbers of one level.
constexpr std::string_view kWithin = "on one host", kBetween = "between hosts";

/// The engine between the leaders of `outer`; unused on its other ranks. Collective.
std::unique_ptr<Engine> leaders_of(Engine& outer, const Topology& topology, Call call) {
  if (topology.leaders.size() == 1) return nullptr;
  call.op = Op::split;
  const bool is_leader = topology.leader_of(outer.rank()) == outer.rank();
  return outer.split(call, /*color=*/is_leader ? 0 : 1, /*key=*/outer.rank());
}

class HierarchicalEngine final : public Engine {
 public:
  HierarchicalEngine(std::unique_ptr<Engine> outer, std::unique_ptr<Engine> inner,
                     std::unique_ptr<Engine> between, Topology topology)
      : outer_(std::move(outer)),
        inner_(std::move(inner)),
        between_(std::move(between)),
        topology_(std::move(topology)) {}

  std::string_view name() const noexcept override { return "hierarchical"; }
  int rank() const noexcept override { return outer_->rank(); }
  int size() const noexcept override { return outer_->size(); }

  void run(const Call& call) override {
    together([&] { dispatch(call); });
  }

  std::unique_ptr<Engine> split(const Call& call, int color, int key) override {
    std::unique_ptr<Engine> engine;
    together([&] {
      compare(call);
      auto outer = outer_->split(call, color, key);
      try {
        std::vector<int> old;  // this group's leaders, by rank of the new group
        in_new_group([&] { old = gather_values(*outer, call, topology_.leader_of(rank())); }, call);
        std::vector<int> hosts;  // the same as ranks of the new group
        for (const int host : old) {
          hosts.push_back(static_cast<int>(std::find(old.begin(), old.end(), host) - old.begin()));
        }
        std::unique_ptr<Engine> inner;
        within([&] { inner = inner_->split(call, color, /*key=*/outer->rank()); }, call);
        Topology topology(std::move(hosts), outer->rank());
        std::unique_ptr<Engine> between;
        in_new_group([&] { between = leaders_of(*outer, topology, call); }, call);
        engine = std::make_unique<HierarchicalEngine>(std::move(outer), std::move(inner),
                                                      std::move(between), std::move(topology));
      } catch (const Error& error) {
        outer->end_with(error);  // its ranks on other hosts may already wait there
        throw;
      }
    });
    return engine;
  }

  std::unique_ptr<SharedMemory> allocate(const Call& call) override {
    std::unique_ptr<SharedMemory> memory;
    together([&] {
      within([&] { memory = inner_->allocate(call); }, call);
      if (n_hosts() == 1) return;
      compare(call);
      run_within(barrier_of(call));  // until the leaders have compared
    });
    return memory;
  }

  void abandon(std::string_view reason) noexcept override {
    inner_->abandon(reason);
    if (between_) between_->abandon(reason);
    outer_->abandon(reason);
  }

  void leave(std::string_view failure) noexcept override {
    inner_->leave(failure);
    outer_->leave(failure);
  }

 private:
  int n_hosts() const { return static_cast<int>(topology_.leaders.size()); }
  bool is_leader() const { return topology_.leader_of(rank()) == rank(); }

  /// If one level fails, ends the other levels with the same error: ranks that wait there would
  /// otherwise wait forever.
  template <class Work>
  void together(Work work) {
    try {
      work();
    } catch (const UsageError&) {
      throw;
    } catch (const Error& error) {
      outer_->end_with(error);
      if (between_) between_->end_with(error);
      inner_->end_with(error);
      throw;
    } catch (const std::exception& error) {
      abandon(error.what());
      throw;
    }
  }

  /// Work whose errors do not use this group's rank numbers; explain() changes them.
  template <class Work, class Explain>
  void explained(Work work, const Call& call, Explain explain) {
    try {
      work();
    } catch (const Error& error) {
      internal::Failure failure = internal::failure_of(error);
      if (failure.kind == internal::Failure::Kind::usage) throw;
      explain(failure);
      internal::throw_failure(failure, context_of(call, rank()));
    }
  }

  /// Work of one level, whose errors refer to the group's `ranks` by their numbers in that level.
  template <class Work>
  void renumbered(Work work, const Call& call, std::string_view place,
                  const std::vector<int>& ranks) {
    explained(work, call, [&](internal::Failure& failure) {
      std::string& text = failure.text;
      // The last two: an error that another level found and ended this one with.
      if (n_hosts() == 1 || text.starts_with(kWithin) || text.starts_with(kBetween)) return;
      text = fmt::format("{}, where rank{} {} of the group {} 0 to {}: {}", place,
                         ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "),
                         ranks.size() == 1 ? "is" : "are", ranks.size() - 1, text);
      for (std::int32_t& peer : failure.peers.ranks) {
        const auto at = static_cast<std::size_t>(peer);
        if (at < ranks.size()) peer = ranks[at];
      }
    });
  }

  /// Work of a group that is split off this one, whose errors refer to its ranks.
  template <class Work>
  void in_new_group(Work work, const Call& call) {
    explained(work, call, [](internal::Failure& failure) {
      failure.text = fmt::format("in the new group, by its ranks: {}", failure.text);
      failure.peers = {};  // not ranks of this group
    });
  }

  template <class Work>
  void within(Work work, const Call& call) {
    renumbered(work, call, kWithin, topology_.members);
  }

  void run_between(Call call) {
    call.timeout += kReportTime;
    // The other ranks of this host wait for this one, which is not the late one if a host is late.
    shared::extend_deadline(*inner_, call.timeout + kPatience);
    renumbered([&] { between_->run(call); }, call, kBetween, topology_.leaders);
    shared::extend_deadline(*inner_, kReportTime);  // the result is about to reach them
  }

  /// A message to or from another host. It involves only two ranks, so the others keep their
  /// timeouts; a rank of this host that times out on this one reports what this one waits for.
  void run_message(const Call& call) {
    shared::begin_elsewhere(*inner_, call);
    outer_->run(call);
    shared::end_elsewhere(*inner_);
  }

  /// Messages between all ranks. A rank that waits there for another host delays the ranks of its
  /// own host, which may already be in the next call, but is not the late one.
  void run_outer(Call call) {
    call.timeout += kReportTime;
    shared::extend_deadline(*inner_, call.timeout + kPatience);
    outer_->run(call);
    shared::extend_deadline(*inner_, kReportTime);
  }

  static Call barrier_of(const Call& call) {
    Call step = call;
    step.parent_call = &call;
    step.op = Op::barrier;
    step.root = -1;
    step.count = 0;
    step.counts = {};
    return step;
  }

  /// Calls that begin on different levels are not compared with each other, so they begin with
  /// this: the ranks of a host compare, then the leaders of all hosts. Other ranks continue
  /// meanwhile; if the leaders disagree, they end all levels, which notifies the other ranks.
  void compare(const Call& call) {
    if (call.check == Check::off) return;
    run_within(barrier_of(call));
    if (n_hosts() > 1 && is_leader()) run_between(barrier_of(call));
  }

  void run_within(const Call& call) {
    within([&] { inner_->run(call); }, call);
  }

  void dispatch(const Call& call) {
    if (n_hosts() == 1) return run_within(call);
    switch (call.op) {
      case Op::barrier:
        run_within(call);
        if (is_leader()) run_between(call);
        return run_within(call);
      case Op::all_reduce: return all_reduce(call);
      case Op::reduce: return reduce(call);
      case Op::broadcast: return broadcast(call);
      case Op::send:
      case Op::recv:
        if (topology_.leader_of(call.root) == topology_.leader_of(rank())) {
          Call message = call;
          message.root = topology_.place_of(call.root);
          return run_within(message);
        }
        return run_message(call);
      case Op::all_gather: return all_gather(call);
      case Op::gather:
      case Op::scatter:
      case Op::reduce_scatter:
      case Op::all_to_all: compare(call); return run_outer(call);
      case Op::split:
      case Op::allocate: break;
    }
  }

  /// Reduces every rank's values into `partial` on the leaders of all hosts, or of root's host.
  void reduce_to_leaders(const Call& call, const Wide& wide, void* partial, Op between) {
    Call step = call;
    step.parent_call = &call;
    step.op = Op::reduce;
    step.dtype = wide.dtype;
    step.count = call.count * wide.n_parts;
    step.reduce = call.reduce == ReduceOp::mean ? ReduceOp::sum : call.reduce;
    step.root = 0;
    step.in = partial;
    step.out = partial;
    run_within(step);
    if (!is_leader()) return;
    step.op = between;
    step.root = between == Op::reduce ? topology_.host_of(call.root) : -1;
    run_between(step);
  }

  void all_reduce(const Call& call) {
    const Wide wide = wide_type(call.dtype, call.reduce);
    std::vector<std::byte> room;
    void* partial = call.out;
    if (wide.dtype != call.dtype || wide.n_parts != 1) {
      room.resize(wide.n_bytes(call.count));
      partial = room.data();
    }
    widen(call.dtype, call.reduce, call.in, partial, call.count);
    reduce_to_leaders(call, wide, partial, Op::all_reduce);
    if (is_leader()) finish(call.dtype, call.reduce, partial, size(), call.out, call.count);
    Call step = call;
    step.parent_call = &call;
    step.op = Op::broadcast;
    step.root = 0;
    step.in = call.out;
    run_within(step);
  }

  void reduce(const Call& call) {
    const Wide wide = wide_type(call.dtype, call.reduce);
    std::vector<std::byte> partial(wide.n_bytes(call.count));
    widen(call.dtype, call.reduce, call.in, partial.data(), call.count);
    reduce_to_leaders(call, wide, partial.data(), Op::reduce);
    if (topology_.leader_of(call.root) != topology_.leader_of(rank())) return;
    if (is_leader()) {
      finish(call.dtype, call.reduce, partial.data(), size(),
             call.root == rank() ? call.out : partial.data(), call.count);
    }
    if (topology_.leader_of(call.root) == call.root) return;
    Call step = call;
    step.parent_call = &call;
    if (is_leader()) {
      step.op = Op::send;
      step.root = topology_.place_of(call.root);
      step.in = partial.data();
      run_within(step);
    } else if (call.root == rank()) {
      step.op = Op::recv;
      step.root = 0;
      run_within(step);
    }
  }

  void broadcast(const Call& call) {
    Call step = call;
    step.parent_call = &call;
    const bool is_here = topology_.leader_of(call.root) == topology_.leader_of(rank());
    if (is_here) {
      step.root = topology_.place_of(call.root);
      run_within(step);
    }
    if (is_leader()) {
      step.root = topology_.host_of(call.root);
      // The leader of the root's host has the data in `out` now.
      step.in = call.out;
      run_between(step);
    }
    if (is_here) return;
    step.root = 0;
    step.in = call.out;
    run_within(step);
  }

  /// To the leader of each host, between leaders, and to all ranks: once per host between hosts.
  void all_gather(const Call& call) {
    const std::size_t element = size_of(call.dtype);
    const auto count_of = [&call](int r) {
      return call.counts.empty() ? call.count : call.counts[static_cast<std::size_t>(r)];
    };
    std::vector<std::size_t> of_members;
    for (const int member : topology_.members) of_members.push_back(count_of(member));
    const std::vector<std::size_t> of_hosts = topology_.sums_by_host(count_of);
    const std::size_t total = std::accumulate(of_hosts.begin(), of_hosts.end(), std::size_t{0});
    const std::size_t here = of_hosts[static_cast<std::size_t>(topology_.host_of(rank()))];
    std::vector<std::byte> own(is_leader() ? here * element : 0), all;
    Call step = call;
    step.parent_call = &call;
    step.op = Op::gather;
    step.root = 0;
    step.counts = of_members;
    step.out = own.data();
    run_within(step);
    if (is_leader()) {
      const bool is_in_order = topology_.is_in_order();
      if (!is_in_order) all.resize(total * element);
      step.op = Op::all_gather;
      step.root = -1;
      step.count = here;
      step.counts = of_hosts;
      step.in = own.data();
      step.out = is_in_order ? call.out : all.data();
      run_between(step);
      if (!is_in_order) topology_.put_in_order(all, count_of, element, call.out);
    }
    step.op = Op::broadcast;
    step.root = 0;
    step.count = total;
    step.counts = {};
    step.in = step.out = call.out;
    run_within(step);
  }

  std::unique_ptr<Engine> outer_;    // all ranks
  std::unique_ptr<Engine> inner_;    // the ranks of this host
  std::unique_ptr<Engine> between_;  // one rank of each host; unused on the other ranks
  Topology topology_;
};

}  // namespace

std::unique_ptr<Engine> make(std::unique_ptr<Engine> outer, const std::vector<int>& hosts,
                             const Call& barrier, const std::optional<std::string>& tune) {
  Topology topology(hosts, outer->rank());
  if (topology.leaders.size() == hosts.size()) return outer;
  try {
    const std::vector<std::uint64_t> nonces = gather_values(*outer, barrier, draw_nonce());
    const auto leader = static_cast<std::size_t>(topology.leader_of(outer->rank()));
    auto inner = shared::bootstrap_world(fmt::format("hierarchical {:016x}", nonces[leader]),
                                         topology.place_of(outer->rank()),
                                         static_cast<int>(topology.members.size()), barrier, tune);
    auto between = leaders_of(*outer, topology, barrier);
    return std::make_unique<HierarchicalEngine>(std::move(outer), std::move(inner),
                                                std::move(between), std::move(topology));
  } catch (const std::exception& error) {
    if (outer) outer->abandon(error.what());
    throw;
  }
}

}  // namespace lockstep::hierarchical
