#include "group/list_calls.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <functional>
#include <lockstep/error.hpp>
#include <memory>
#include <new>
#include <vector>

#include "base/bytes.hpp"
#include "group/argument_checks.hpp"
#include "group/calls.hpp"

namespace lockstep {
namespace internal {
namespace {

using base::bytes;
using base::copy_bytes;

/// A list call for an engine that takes one contiguous buffer: packs the parts, and unpacks the
/// results, unless they are contiguous already.
class PackedCall {
 public:
  explicit PackedCall(const Call& call) : call_(call), packed_(call) {
    packed_.ins = {};
    packed_.outs = {};
    if (!call.ins.empty()) packed_.in = block_of(call.ins, in_);
    if (!call.outs.empty()) packed_.out = block_of(call.outs, out_);
  }

  void run(Engine& engine) const {
    if (in_) {
      each(call_.ins, [&](const void* part, std::size_t begin, std::size_t n_bytes) {
        copy_bytes(in_.get() + begin, part, n_bytes);
      });
    }
    engine.run(packed_);
    if (out_) {
      each(call_.outs, [&](void* part, std::size_t begin, std::size_t n_bytes) {
        copy_bytes(part, out_.get() + begin, n_bytes);
      });
    }
  }

 private:
  /// use(address, bytes before it, bytes) of each part; returns the bytes of all.
  template <class Pointer, class Use>
  std::size_t each(std::span<Pointer const> parts, Use use) const {
    std::size_t begin = 0;
    for (std::size_t r = 0; r < parts.size(); ++r) {
      const std::size_t count = call_.counts.empty() ? call_.count : call_.counts[r];
      use(parts[r], begin, count * size_of(call_.dtype));
      begin += count * size_of(call_.dtype);
    }
    return begin;
  }
  template <class Pointer>
  Pointer block_of(std::span<Pointer const> parts, std::unique_ptr<std::byte[]>& block) const {
    bool is_block = parts.front() != nullptr;
    const std::size_t n_bytes =
        each(parts, [&](const void* part, std::size_t begin, std::size_t n) {
          is_block = is_block && (n == 0 || part == bytes(parts.front()) + begin);
        });
    if (is_block) return parts.front();
    block = std::make_unique_for_overwrite<std::byte[]>(n_bytes);
    return block.get();
  }

  const Call& call_;
  Call packed_;
  std::unique_ptr<std::byte[]> in_, out_;
};

PackedCall pack_call(Engine& engine, const Call& call) try {
  return PackedCall(call);
} catch (const std::bad_alloc&) {
  const SystemError error(context_of(call, engine.rank()), ENOMEM,
                          "no memory to pack the parts of a list");
  engine.end_with(error);  // the peers wait in this call
  throw SystemError(error);
}

void run_on(Engine& engine, const Call& call) { engine.run_lists(call); }

void run(GroupState& group, const Call& call, Timeout timeout) {
  group.run(Call(call), timeout, &run_on);
}

/// The addresses of the parts, one for each rank.
template <class Pointer, class Part>
std::vector<Pointer> addresses(GroupState& group, const Call& call, std::span<const Part> parts,
                               const char* parameter) {
  if (parts.size() != static_cast<std::size_t>(group.size())) {
    reject(group, call,
           fmt::format("{} has {} parts for {} ranks", parameter, parts.size(), group.size()));
  }
  std::vector<Pointer> result;
  result.reserve(parts.size());
  for (const Part& part : parts) result.push_back(part.data);
  return result;
}

/// The same, if each has call.count elements; check(part) of each.
template <class Pointer, class Part, class Check>
std::vector<Pointer> equal_parts(GroupState& group, const Call& call, std::span<const Part> parts,
                                 const char* parameter, Check check) {
  std::vector<Pointer> result = addresses<Pointer>(group, call, parts, parameter);
  for (std::size_t r = 0; r < parts.size(); ++r) {
    check(parts[r]);
    if (parts[r].count == call.count) continue;
    reject(group, call,
           fmt::format("part {} of {} has {} elements, expected {}", r, parameter, parts[r].count,
                       call.count));
  }
  return result;
}

/// The parts that this rank gives where each rank gets one, `out`.
std::vector<const void*> inputs_for(GroupState& group, const Call& call,
                                    std::span<const ConstElements> ins, const Elements& out) {
  return equal_parts<const void*>(
      group, call, ins, "ins", [&](const ConstElements& in) { check_pair(group, call, in, out); });
}

}  // namespace

void ListCalls::all_reduce(const Group& group, const Elements& data, ReduceOp op, int tag,
                           Timeout timeout, std::source_location where) {
  Call call = all_reduce_call(*group.state_, data, op, where);
  call.root = tag;
  run(*group.state_, call, timeout);
}

void ListCalls::all_gather(const Group& group, const ConstElements& in, const Elements& out,
                           int tag, Timeout timeout, std::source_location where) {
  Call call =
      gather_call(*group.state_, Op::all_gather, in, out, /*counts=*/nullptr, /*dst=*/-1, where);
  call.root = tag;
  run(*group.state_, call, timeout);
}

void ListCalls::all_gather(const Group& group, const ConstElements& in,
                           std::span<const Elements> outs, Timeout timeout,
                           std::source_location where) {
  GroupState& state = *group.state_;
  Call call{
      .op = Op::all_gather, .dtype = in.dtype, .count = in.count, .in = in.data, .where = where};
  const auto pointers = addresses<void*>(state, call, outs, "outs");
  call.outs = pointers;
  std::vector<std::size_t> counts;
  for (const Elements& out : outs) {
    check_pair(state, call, in, out);
    counts.push_back(out.count);
  }
  // As a Group's all_gather without counts, if it can be one.
  const bool is_even = std::ranges::adjacent_find(counts, std::not_equal_to<>()) == counts.end();
  if (!is_even) call.counts = counts;
  const auto rank = static_cast<std::size_t>(state.rank());
  check_count(state, call, "in", in.count, counts[rank]);
  run(state, call, timeout);
}

void ListCalls::gather(const Group& group, const ConstElements& in, std::span<const Elements> outs,
                       int dst, Timeout timeout, std::source_location where) {
  GroupState& state = *group.state_;
  Call call{.op = Op::gather,
            .dtype = in.dtype,
            .root = dst,
            .count = in.count,
            .in = in.data,
            .where = where};
  check_rank(state, call, "dst");
  const auto pointers = equal_parts<void*>(
      state, call, outs, "outs", [&](const Elements& out) { check_pair(state, call, in, out); });
  call.outs = pointers;
  run(state, call, timeout);
}

void ListCalls::scatter(const Group& group, std::span<const ConstElements> ins, const Elements& out,
                        int src, Timeout timeout, std::source_location where) {
  GroupState& state = *group.state_;
  Call call{.op = Op::scatter,
            .dtype = out.dtype,
            .root = src,
            .count = out.count,
            .out = out.data,
            .where = where};
  check_rank(state, call, "src");
  const auto pointers = inputs_for(state, call, ins, out);
  call.ins = pointers;
  run(state, call, timeout);
}

void ListCalls::reduce_scatter(const Group& group, std::span<const ConstElements> ins,
                               const Elements& out, ReduceOp op, Timeout timeout,
                               std::source_location where) {
  GroupState& state = *group.state_;
  Call call{.op = Op::reduce_scatter,
            .dtype = out.dtype,
            .reduce = op,
            .count = out.count,
            .out = out.data,
            .where = where};
  const auto pointers = inputs_for(state, call, ins, out);
  call.ins = pointers;
  check_reduction(state, call);
  run(state, call, timeout);
}

void ListCalls::all_to_all(const Group& group, std::span<const ConstElements> ins,
                           std::span<const Elements> outs, Timeout timeout,
                           std::source_location where) {
  GroupState& state = *group.state_;
  Call call{.op = Op::all_to_all, .where = where};
  if (!ins.empty()) {
    call.dtype = ins.front().dtype;
    call.count = ins.front().count;
  }
  const auto in_pointers = equal_parts<const void*>(
      state, call, ins, "ins",
      [&](const ConstElements& in) { check_memory(state, call, in, "ins"); });
  const auto out_pointers = equal_parts<void*>(state, call, outs, "outs", [&](const Elements& out) {
    check_memory(state, call, out, "outs");
  });
  call.ins = in_pointers;
  call.outs = out_pointers;
  // All pairs are checked only for inputs that lie between the outputs.
  const std::byte* const begin = bytes(std::ranges::min(out_pointers));
  const std::byte* const end = bytes(std::ranges::max(out_pointers)) + outs.front().n_bytes();
  for (std::size_t r = 0; r < ins.size(); ++r) {
    check_pair(state, call, ins[r], outs[r]);
    const std::byte* const in = bytes(ins[r].data);
    if (in >= end || in + ins[r].n_bytes() <= begin) continue;
    for (const Elements& out : outs) check_pair(state, call, ins[r], out);
  }
  run(state, call, timeout);
}

}  // namespace internal

void Engine::run_lists(const Call& call) { internal::pack_call(*this, call).run(*this); }

}  // namespace lockstep
