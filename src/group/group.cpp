#include <fmt/format.h>

#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <numeric>
#include <utility>

#include "group/group_state.hpp"
#include "group/work.hpp"

namespace lockstep {

using internal::GroupState;

namespace {

[[noreturn]] void refuse(const GroupState& group, const Call& call, const std::string& text) {
  ErrorContext context = context_of(call, group.rank());
  context.group = group.name();
  throw UsageError(std::move(context), text);
}

void check_rank(const GroupState& group, const Call& call, std::string_view parameter) {
  if (call.root < 0 || call.root >= group.size()) {
    refuse(group, call,
           fmt::format("{} is {}; the group's ranks are 0 to {}", parameter, call.root,
                       group.size() - 1));
  }
}

void check_reduction(const GroupState& group, const Call& call) {
  const bool is_bool = call.dtype == DType::boolean;
  switch (call.reduce) {
    case ReduceOp::min:
    case ReduceOp::max: return;
    case ReduceOp::sum:
    case ReduceOp::product:
    case ReduceOp::mean:
      if (!is_bool) return;
      refuse(
          group, call,
          fmt::format("{} of bool: use bor (any), band (all), bxor, min or max; to count, use an "
                      "integer type",
                      name_of(call.reduce)));
    case ReduceOp::band:
    case ReduceOp::bor:
    case ReduceOp::bxor:
      if (!is_floating(call.dtype)) return;
      refuse(group, call,
             fmt::format("{} of {}: bit operations are for integers and bool; use sum, product, "
                         "min, max or mean",
                         name_of(call.reduce), name_of(call.dtype)));
  }
  refuse(group, call, fmt::format("reduction {} does not exist", static_cast<int>(call.reduce)));
}

void check_memory(const GroupState& group, const Call& call, const ConstElements& data,
                  std::string_view parameter) {
  if (size_of(data.dtype) == 0) {
    refuse(group, call,
           fmt::format("{} has element type {}, which does not exist; use a DType, as DType::f32",
                       parameter, static_cast<int>(data.dtype)));
  }
  if (data.count > 0 && data.data == nullptr) {
    refuse(group, call, fmt::format("{} is null but has {} elements", parameter, data.count));
  }
  // Far enough below SIZE_MAX that the total size over all ranks cannot overflow either.
  constexpr std::size_t kMost = std::size_t{1} << 46U;
  if (data.count > kMost) {
    refuse(group, call,
           fmt::format("{} has {} elements, more than fit in memory", parameter, data.count));
  }
}

/// Checks both buffers of a call whose `in` and `out` differ.
void check_pair(const GroupState& group, const Call& call, const ConstElements& in,
                const ConstElements& out) {
  check_memory(group, call, in, "in");
  check_memory(group, call, out, "out");
  if (in.dtype != out.dtype) {
    refuse(group, call,
           fmt::format("in holds {}, out {}; both must have the same type", name_of(in.dtype),
                       name_of(out.dtype)));
  }
  const auto* a = static_cast<const std::byte*>(in.data);
  const auto* b = static_cast<const std::byte*>(out.data);
  if (in.count > 0 && out.count > 0 && a < b + out.n_bytes() && b < a + in.n_bytes()) {
    refuse(group, call, "in and out overlap; use separate buffers");
  }
}

void check_count(const GroupState& group, const Call& call, std::string_view parameter,
                 std::size_t got, std::size_t expected) {
  if (got != expected) {
    refuse(group, call,
           fmt::format("{} has {} elements, expected {} ({} ranks)", parameter, got, expected,
                       group.size()));
  }
}

void check_counts(const GroupState& group, const Call& call, std::size_t in_count) {
  if (call.counts.size() != static_cast<std::size_t>(group.size())) {
    refuse(group, call,
           fmt::format("counts has {} entries, expected one for each of the {} ranks",
                       call.counts.size(), group.size()));
  }
  const std::size_t mine = call.counts[static_cast<std::size_t>(group.rank())];
  if (mine != in_count) {
    refuse(group, call,
           fmt::format("counts has {} elements for this rank, in has {}", mine, in_count));
  }
}

/// The checked call of each operation, shared by the blocking and the asynchronous form.

Call barrier_call(GroupState&, std::source_location where) {
  return {.op = Op::barrier, .where = where};
}

Call in_place_call(GroupState& group, Op op, const Elements& data, std::source_location where) {
  const Call call{.op = op,
                  .dtype = data.dtype,
                  .count = data.count,
                  .in = data.data,
                  .out = data.data,
                  .where = where};
  check_memory(group, call, data, "data");
  return call;
}

Call all_reduce_call(GroupState& group, const Elements& data, ReduceOp op,
                     std::source_location where) {
  Call call = in_place_call(group, Op::all_reduce, data, where);
  call.reduce = op;
  check_reduction(group, call);
  return call;
}

Call reduce_call(GroupState& group, const Elements& data, int dst, ReduceOp op,
                 std::source_location where) {
  Call call = in_place_call(group, Op::reduce, data, where);
  call.root = dst;
  call.reduce = op;
  check_rank(group, call, "dst");
  check_reduction(group, call);
  return call;
}

Call broadcast_call(GroupState& group, const Elements& data, int src, std::source_location where) {
  Call call = in_place_call(group, Op::broadcast, data, where);
  call.root = src;
  check_rank(group, call, "src");
  return call;
}

Call gather_call(GroupState& group, const ConstElements& in, const Elements& out,
                 std::span<const std::size_t> counts, bool has_counts, int dst, bool to_all,
                 std::source_location where) {
  const Call call{.op = to_all ? Op::all_gather : Op::gather,
                  .dtype = in.dtype,
                  .root = to_all ? -1 : dst,
                  .count = in.count,
                  .in = in.data,
                  .out = out.data,
                  .counts = counts,
                  .where = where};
  if (!to_all) check_rank(group, call, "dst");
  if (has_counts) check_counts(group, call, in.count);
  if (!to_all && dst != group.rank()) {
    check_memory(group, call, in, "in");
    return call;
  }
  check_pair(group, call, in, out);
  const std::size_t expected = has_counts
                                   ? std::accumulate(counts.begin(), counts.end(), std::size_t{0})
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
    refuse(group, call,
           fmt::format("in has {} elements, which cannot be divided equally among {} ranks",
                       in.count, n));
  }
  check_count(group, call, "out", out.count, in.count);
  return call;
}

void check_peer(const GroupState& group, const Call& call, std::string_view parameter) {
  check_rank(group, call, parameter);
  if (call.root == group.rank()) {
    refuse(group, call,
           fmt::format("{} is this rank itself ({}); the peer must be another rank", parameter,
                       call.root));
  }
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

// A Call is passed by reference: a copy would stall on the recent bytewise stores.

void run(GroupState& group, Call&& call, Deadline deadline) {
  group.prepare(call, deadline);
  group.run(call, [&call](Engine& engine) { engine.run(call); });
}

Work post(const std::shared_ptr<GroupState>& group, Call&& call, Deadline deadline) {
  group->prepare(call, deadline);
  return Work(std::make_shared<internal::WorkHandle>(group, group->post(call)));
}

}  // namespace

Group::Group(std::unique_ptr<Engine> engine, std::string name, std::chrono::milliseconds timeout,
             Check check)
    : state_(
          std::make_shared<GroupState>(std::move(engine), std::move(name),
                                       internal::checked_timeout(timeout, {.operation = "Group"}),
                                       /*recorder=*/nullptr, check)) {}

int Group::rank() const noexcept { return state_->rank(); }
int Group::size() const noexcept { return state_->size(); }
std::string_view Group::backend() const noexcept { return state_->engine().name(); }
bool Group::has_low_latency() const noexcept { return state_->engine().has_low_latency(); }
const std::string& Group::name() const noexcept { return state_->name(); }
std::chrono::milliseconds Group::timeout() const noexcept { return state_->timeout(); }
Check Group::check() const noexcept { return state_->check(); }

Group Group::split(int color, int key, Where where) const {
  Call call{.op = Op::split, .where = where};
  if (color < 0) {
    refuse(*state_, call,
           fmt::format("color is {}; colors are 0 or more. For a group of one rank, give it a "
                       "color that no other rank has",
                       color));
  }
  state_->prepare(call, {});
  auto engine = state_->run(call, [&](Engine& parent) { return parent.split(call, color, key); });
  auto child = std::make_shared<GroupState>(
      std::move(engine), fmt::format("{}/{}.{}", state_->name(), state_->count_child(), color),
      state_->timeout(), state_->recorder(), state_->check());
  child->share_async_groups(*state_);
  return Group(std::move(child));
}

Group Group::duplicate(Where where) const { return split(/*color=*/0, /*key=*/0, where); }

SharedBuffer Group::allocate(std::size_t n_bytes, Where where) const {
  Call call{.op = Op::allocate, .dtype = DType::u8, .count = n_bytes, .where = where};
  check_memory(*state_, call, {.data = this, .count = n_bytes}, "the buffer");
  state_->prepare(call, {});
  std::shared_ptr<SharedMemory> memory =
      state_->run(call, [&](Engine& engine) { return engine.allocate(call); });
  return {std::move(memory), n_bytes};
}

void Group::abandon(std::string_view reason) const noexcept { state_->abandon(reason); }

void Group::barrier(Deadline deadline, Where where) const {
  run(*state_, barrier_call(*state_, where), deadline);
}
Work Group::barrier_async(Deadline deadline, Where where) const {
  return post(state_, barrier_call(*state_, where), deadline);
}

void Group::all_reduce(const Elements& data, ReduceOp op, Deadline deadline, Where where) const {
  run(*state_, all_reduce_call(*state_, data, op, where), deadline);
}
Work Group::all_reduce_async(const Elements& data, ReduceOp op, Deadline deadline,
                             Where where) const {
  return post(state_, all_reduce_call(*state_, data, op, where), deadline);
}

void Group::reduce(const Elements& data, int dst, ReduceOp op, Deadline deadline,
                   Where where) const {
  run(*state_, reduce_call(*state_, data, dst, op, where), deadline);
}
Work Group::reduce_async(const Elements& data, int dst, ReduceOp op, Deadline deadline,
                         Where where) const {
  return post(state_, reduce_call(*state_, data, dst, op, where), deadline);
}

void Group::broadcast(const Elements& data, int src, Deadline deadline, Where where) const {
  run(*state_, broadcast_call(*state_, data, src, where), deadline);
}
Work Group::broadcast_async(const Elements& data, int src, Deadline deadline, Where where) const {
  return post(state_, broadcast_call(*state_, data, src, where), deadline);
}

void Group::all_gather(const ConstElements& in, const Elements& out, Deadline deadline,
                       Where where) const {
  run(*state_, gather_call(*state_, in, out, {}, /*has_counts=*/false, -1, /*to_all=*/true, where),
      deadline);
}
void Group::all_gather(const ConstElements& in, const Elements& out,
                       std::span<const std::size_t> counts, Deadline deadline, Where where) const {
  run(*state_,
      gather_call(*state_, in, out, counts, /*has_counts=*/true, -1, /*to_all=*/true, where),
      deadline);
}
Work Group::all_gather_async(const ConstElements& in, const Elements& out, Deadline deadline,
                             Where where) const {
  return post(state_,
              gather_call(*state_, in, out, {}, /*has_counts=*/false, -1, /*to_all=*/true, where),
              deadline);
}

void Group::gather(const ConstElements& in, const Elements& out, int dst, Deadline deadline,
                   Where where) const {
  run(*state_,
      gather_call(*state_, in, out, {}, /*has_counts=*/false, dst, /*to_all=*/false, where),
      deadline);
}
void Group::gather(const ConstElements& in, const Elements& out,
                   std::span<const std::size_t> counts, int dst, Deadline deadline,
                   Where where) const {
  run(*state_,
      gather_call(*state_, in, out, counts, /*has_counts=*/true, dst, /*to_all=*/false, where),
      deadline);
}
Work Group::gather_async(const ConstElements& in, const Elements& out, int dst, Deadline deadline,
                         Where where) const {
  return post(state_,
              gather_call(*state_, in, out, {}, /*has_counts=*/false, dst, /*to_all=*/false, where),
              deadline);
}

void Group::scatter(const ConstElements& in, const Elements& out, int src, Deadline deadline,
                    Where where) const {
  run(*state_, scatter_call(*state_, in, out, src, where), deadline);
}
Work Group::scatter_async(const ConstElements& in, const Elements& out, int src, Deadline deadline,
                          Where where) const {
  return post(state_, scatter_call(*state_, in, out, src, where), deadline);
}

void Group::reduce_scatter(const ConstElements& in, const Elements& out, ReduceOp op,
                           Deadline deadline, Where where) const {
  run(*state_, reduce_scatter_call(*state_, in, out, op, where), deadline);
}
Work Group::reduce_scatter_async(const ConstElements& in, const Elements& out, ReduceOp op,
                                 Deadline deadline, Where where) const {
  return post(state_, reduce_scatter_call(*state_, in, out, op, where), deadline);
}

void Group::all_to_all(const ConstElements& in, const Elements& out, Deadline deadline,
                       Where where) const {
  run(*state_, all_to_all_call(*state_, in, out, where), deadline);
}
Work Group::all_to_all_async(const ConstElements& in, const Elements& out, Deadline deadline,
                             Where where) const {
  return post(state_, all_to_all_call(*state_, in, out, where), deadline);
}

void Group::send(const ConstElements& data, int dst, Deadline deadline, Where where) const {
  run(*state_, send_call(*state_, data, dst, where), deadline);
}
Work Group::send_async(const ConstElements& data, int dst, Deadline deadline, Where where) const {
  return post(state_, send_call(*state_, data, dst, where), deadline);
}

void Group::recv(const Elements& data, int src, Deadline deadline, Where where) const {
  run(*state_, recv_call(*state_, data, src, where), deadline);
}
Work Group::recv_async(const Elements& data, int src, Deadline deadline, Where where) const {
  return post(state_, recv_call(*state_, data, src, where), deadline);
}

}  // namespace lockstep
