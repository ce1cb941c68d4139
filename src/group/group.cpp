#include <fmt/format.h>

#include <exception>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

#include "group/argument_checks.hpp"
#include "group/group_state.hpp"
#include "group/native_engine.hpp"
#include "group/step.hpp"
#include "group/work.hpp"

namespace lockstep {

using internal::barrier_of;
using internal::GroupState;
using internal::reject;

namespace {

/// A call whose `in` and `out` are the same.
Call in_place(Op op, const Elements& data, ReduceOp reduce, int root, std::source_location where) {
  return {.op = op,
          .dtype = data.dtype,
          .reduce = reduce,
          .root = root,
          .count = data.count,
          .in = data.data,
          .out = data.data,
          .where = where};
}

// The checked call of each operation, for its blocking and asynchronous form. Each throws
// UsageError.

Call all_reduce_call(GroupState& group, const Elements& data, ReduceOp op,
                     std::source_location where) {
  const Call call = in_place(Op::all_reduce, data, op, /*root=*/-1, where);
  check_memory(group, call, data, "data");
  check_reduction(group, call);
  return call;
}

Call reduce_call(GroupState& group, const Elements& data, int dst, ReduceOp op,
                 std::source_location where) {
  const Call call = in_place(Op::reduce, data, op, dst, where);
  check_memory(group, call, data, "data");
  check_rank(group, call, "dst");
  check_reduction(group, call);
  return call;
}

Call broadcast_call(GroupState& group, const Elements& data, int src, std::source_location where) {
  const Call call = in_place(Op::broadcast, data, ReduceOp::sum, src, where);
  check_memory(group, call, data, "data");
  check_rank(group, call, "src");
  return call;
}

Call gather_call(GroupState& group, Op op, const ConstElements& in, const Elements& out,
                 const std::span<const std::size_t>* counts, int dst, std::source_location where) {
  const Call call{.op = op,
                  .dtype = in.dtype,
                  .root = dst,
                  .count = in.count,
                  .in = in.data,
                  .out = out.data,
                  .counts = counts != nullptr ? *counts : std::span<const std::size_t>(),
                  .where = where};
  if (op == Op::gather) check_rank(group, call, "dst");
  if (counts != nullptr) check_counts(group, call, in.count);
  if (op == Op::gather && dst != group.rank()) {
    check_memory(group, call, in, "in");
    return call;
  }
  check_pair(group, call, in, out);
  const std::size_t expected = counts != nullptr
                                   ? std::accumulate(counts->begin(), counts->end(), std::size_t{0})
                                   : in.count * static_cast<std::size_t>(group.size());
  check_count(group, call, "out", out.count, expected);
  return call;
}

Call scatter_call(GroupState& group, const ConstElements& in, const Elements& out, int src,
                  std::source_location where) {
  const Call call{.op = Op::scatter,
                  .dtype = out.dtype,
                  .root = src,
                  .count = out.count,
                  .in = in.data,
                  .out = out.data,
                  .where = where};
  check_rank(group, call, "src");
  if (src != group.rank()) {
    check_memory(group, call, out, "out");
    return call;
  }
  check_pair(group, call, in, out);
  check_count(group, call, "in", in.count, out.count * static_cast<std::size_t>(group.size()));
  return call;
}

Call reduce_scatter_call(GroupState& group, const ConstElements& in, const Elements& out,
                         ReduceOp op, std::source_location where) {
  const Call call{.op = Op::reduce_scatter,
                  .dtype = out.dtype,
                  .reduce = op,
                  .count = out.count,
                  .in = in.data,
                  .out = out.data,
                  .where = where};
  check_pair(group, call, in, out);
  check_reduction(group, call);
  check_count(group, call, "in", in.count, out.count * static_cast<std::size_t>(group.size()));
  return call;
}

Call all_to_all_call(GroupState& group, const ConstElements& in, const Elements& out,
                     std::source_location where) {
  const auto n = static_cast<std::size_t>(group.size());
  const Call call{.op = Op::all_to_all,
                  .dtype = in.dtype,
                  .count = in.count / n,
                  .in = in.data,
                  .out = out.data,
                  .where = where};
  check_pair(group, call, in, out);
  if (in.count % n != 0) {
    reject(group, call,
           fmt::format("in has {} elements, which cannot be divided equally among {} ranks",
                       in.count, n));
  }
  check_count(group, call, "out", out.count, in.count);
  return call;
}

Call send_call(GroupState& group, const ConstElements& data, int dst, std::source_location where) {
  const Call call{.op = Op::send,
                  .dtype = data.dtype,
                  .root = dst,
                  .count = data.count,
                  .in = data.data,
                  .where = where};
  check_peer(group, call, "dst");
  check_memory(group, call, data, "data");
  return call;
}

Call recv_call(GroupState& group, const Elements& data, int src, std::source_location where) {
  const Call call{.op = Op::recv,
                  .dtype = data.dtype,
                  .root = src,
                  .count = data.count,
                  .out = data.data,
                  .where = where};
  check_peer(group, call, "src");
  check_memory(group, call, data, "data");
  return call;
}

Call allocate_call(GroupState& group, std::size_t n_bytes, std::source_location where) {
  const Call call{.op = Op::allocate, .dtype = DType::u8, .count = n_bytes, .where = where};
  check_memory(group, call, {.data = &group, .count = n_bytes}, "the buffer");
  return call;
}

/// The asynchronous form of a call, after the checks of its arguments.
Work post(const std::shared_ptr<GroupState>& group, const Call& call, Timeout timeout) {
  const Engine* const engine = group->engine();
  if (engine != nullptr && !engine->why_one_thread().empty()) {
    reject(*group, call,
           "asynchronous calls run on a thread of their own, but " +
               std::string(engine->why_one_thread()));
  }
  try {
    return Work(std::make_shared<internal::WorkHandle>(group, call, timeout));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // no memory, or no thread: the call was not made
    group->refuse(call, name_of(call.op), error.what());
    throw;
  }
}

}  // namespace

namespace internal {

void NativeGroup::run(const Group& group, const Call& call, Timeout timeout) {
  group.state_->run(Call(call), timeout);
}

void NativeGroup::run(const Group& group, const Call& call, Timeout timeout, const Around& around) {
  group.state_->run(Call(call), timeout, [&](Engine& engine, const Call& numbered) {
    around([&] { engine.run(numbered); });
  });
}

std::vector<Group> NativeGroup::divide(const Group& group, std::span<const int> counts,
                                       std::source_location where) {
  GroupState& state = *group.state_;
  std::vector<Group> groups;
  state.run({.op = Op::split, .where = where}, {}, [&](Engine& engine, const Call& call) {
    auto* const native = dynamic_cast<NativeEngine*>(&engine);
    if (native == nullptr) {
      throw UsageError(context_of(call, engine.rank()),
                       "a rank can be several over lockstep's own engines only");
    }
    const std::string name = fmt::format("{}/shards{}", state.name(), state.count_child());
    for (auto& part : native->divide(call, counts)) {
      auto child = std::make_shared<GroupState>(std::move(part), name, state.timeout(),
                                                state.recorder(), state.check());
      child->share_membership(state);
      Group one(std::move(child));
      groups.push_back(std::move(one));
    }
    engine.run(barrier_of(call));  // either all ranks have their groups, or this group ends
  });
  return groups;
}

Group NativeGroup::split(const Group& group, const Part& part, std::source_location where) {
  GroupState& state = *group.state_;
  std::shared_ptr<GroupState> child;
  state.run({.op = Op::split, .where = where}, {}, [&](Engine& parent, const Call& call) {
    detail::TimeLimit limit(call.timeout);
    (void)limit.end();  // its time begins now, not at the first wait
    auto engine = parent.split(call, part.color, part.key);
    const int number = state.count_child();
    child = std::make_shared<GroupState>(
        std::move(engine),
        part.name.empty() ? fmt::format("{}/{}.{}", state.name(), number, part.color) : part.name,
        part.timeout, state.recorder(), state.check());
    child->share_membership(state);
    // Either all ranks have their new group, or this group ends and no rank has one.
    Call barrier = barrier_of(call);
    barrier.timeout = limit.of_step();
    parent.run(barrier);
  });
  return Group(std::move(child));
}

Work NativeGroup::post(const Group& group, const Call& call, Timeout timeout) {
  return lockstep::post(group.state_, call, timeout);
}

}  // namespace internal

Group::Group(std::unique_ptr<Engine> engine, std::string name, std::chrono::milliseconds timeout,
             Check check)
    : state_(
          std::make_shared<GroupState>(std::move(engine), std::move(name),
                                       internal::checked_timeout(timeout, {.operation = "Group"}),
                                       /*recorder=*/nullptr, check)) {}

int Group::rank() const noexcept { return state_->rank(); }
int Group::size() const noexcept { return state_->size(); }
std::string_view Group::backend() const noexcept { return state_->backend(); }
const std::string& Group::name() const noexcept { return state_->name(); }
std::chrono::milliseconds Group::timeout() const noexcept { return state_->timeout(); }
Check Group::check() const noexcept { return state_->check(); }

Group Group::split(int color, int key, Where where) const {
  if (color < 0) {
    reject(*state_, {.op = Op::split, .where = where},
           fmt::format("color is {}; colors are 0 or more. For a group of one rank, give it a "
                       "color that no other rank has",
                       color));
  }
  return internal::NativeGroup::split(
      *this, {.color = color, .key = key, .name = {}, .timeout = state_->timeout()}, where);
}

Group Group::duplicate(Where where) const { return split(/*color=*/0, /*key=*/0, where); }

SharedBuffer Group::allocate(std::size_t n_bytes, Where where) const {
  std::shared_ptr<SharedMemory> memory;
  state_->run(allocate_call(*state_, n_bytes, where), {},
              [&](Engine& engine, const Call& call) { memory = engine.allocate(call); });
  return {std::move(memory), n_bytes};
}

void Group::abandon(std::string_view reason) const noexcept { state_->abandon(reason); }

void Group::barrier(Timeout timeout, Where where) const {
  state_->run({.op = Op::barrier, .where = where}, timeout);
}
Work Group::barrier_async(Timeout timeout, Where where) const {
  return post(state_, {.op = Op::barrier, .where = where}, timeout);
}
void Group::all_reduce(const Elements& data, ReduceOp op, Timeout timeout, Where where) const {
  state_->run(all_reduce_call(*state_, data, op, where), timeout);
}
Work Group::all_reduce_async(const Elements& data, ReduceOp op, Timeout timeout,
                             Where where) const {
  return post(state_, all_reduce_call(*state_, data, op, where), timeout);
}
void Group::reduce(const Elements& data, int dst, ReduceOp op, Timeout timeout, Where where) const {
  state_->run(reduce_call(*state_, data, dst, op, where), timeout);
}
Work Group::reduce_async(const Elements& data, int dst, ReduceOp op, Timeout timeout,
                         Where where) const {
  return post(state_, reduce_call(*state_, data, dst, op, where), timeout);
}
void Group::broadcast(const Elements& data, int src, Timeout timeout, Where where) const {
  state_->run(broadcast_call(*state_, data, src, where), timeout);
}
Work Group::broadcast_async(const Elements& data, int src, Timeout timeout, Where where) const {
  return post(state_, broadcast_call(*state_, data, src, where), timeout);
}
void Group::all_gather(const ConstElements& in, const Elements& out, Timeout timeout,
                       Where where) const {
  state_->run(gather_call(*state_, Op::all_gather, in, out, nullptr, /*dst=*/-1, where), timeout);
}
void Group::all_gather(const ConstElements& in, const Elements& out,
                       std::span<const std::size_t> counts, Timeout timeout, Where where) const {
  state_->run(gather_call(*state_, Op::all_gather, in, out, &counts, /*dst=*/-1, where), timeout);
}
Work Group::all_gather_async(const ConstElements& in, const Elements& out, Timeout timeout,
                             Where where) const {
  return post(state_, gather_call(*state_, Op::all_gather, in, out, nullptr, /*dst=*/-1, where),
              timeout);
}
void Group::gather(const ConstElements& in, const Elements& out, int dst, Timeout timeout,
                   Where where) const {
  state_->run(gather_call(*state_, Op::gather, in, out, nullptr, dst, where), timeout);
}
void Group::gather(const ConstElements& in, const Elements& out,
                   std::span<const std::size_t> counts, int dst, Timeout timeout,
                   Where where) const {
  state_->run(gather_call(*state_, Op::gather, in, out, &counts, dst, where), timeout);
}
Work Group::gather_async(const ConstElements& in, const Elements& out, int dst, Timeout timeout,
                         Where where) const {
  return post(state_, gather_call(*state_, Op::gather, in, out, nullptr, dst, where), timeout);
}
void Group::scatter(const ConstElements& in, const Elements& out, int src, Timeout timeout,
                    Where where) const {
  state_->run(scatter_call(*state_, in, out, src, where), timeout);
}
Work Group::scatter_async(const ConstElements& in, const Elements& out, int src, Timeout timeout,
                          Where where) const {
  return post(state_, scatter_call(*state_, in, out, src, where), timeout);
}
void Group::reduce_scatter(const ConstElements& in, const Elements& out, ReduceOp op,
                           Timeout timeout, Where where) const {
  state_->run(reduce_scatter_call(*state_, in, out, op, where), timeout);
}
Work Group::reduce_scatter_async(const ConstElements& in, const Elements& out, ReduceOp op,
                                 Timeout timeout, Where where) const {
  return post(state_, reduce_scatter_call(*state_, in, out, op, where), timeout);
}
void Group::all_to_all(const ConstElements& in, const Elements& out, Timeout timeout,
                       Where where) const {
  state_->run(all_to_all_call(*state_, in, out, where), timeout);
}
Work Group::all_to_all_async(const ConstElements& in, const Elements& out, Timeout timeout,
                             Where where) const {
  return post(state_, all_to_all_call(*state_, in, out, where), timeout);
}
void Group::send(const ConstElements& data, int dst, Timeout timeout, Where where) const {
  state_->run(send_call(*state_, data, dst, where), timeout);
}
Work Group::send_async(const ConstElements& data, int dst, Timeout timeout, Where where) const {
  return post(state_, send_call(*state_, data, dst, where), timeout);
}
void Group::recv(const Elements& data, int src, Timeout timeout, Where where) const {
  state_->run(recv_call(*state_, data, src, where), timeout);
}
Work Group::recv_async(const Elements& data, int src, Timeout timeout, Where where) const {
  return post(state_, recv_call(*state_, data, src, where), timeout);
}

std::vector<std::size_t> detail::exchange_counts(std::size_t count, const Group& group,
                                                 Timeout timeout, std::source_location where) {
  static_assert(sizeof(std::size_t) == sizeof(std::uint64_t));
  std::vector<std::size_t> counts(static_cast<std::size_t>(group.size()));
  group.all_gather({.data = &count, .count = 1, .dtype = DType::u64},
                   {.data = counts.data(), .count = counts.size(), .dtype = DType::u64}, timeout,
                   where);
  return counts;
}

}  // namespace lockstep
