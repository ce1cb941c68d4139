#include "group/argument_checks.hpp"

#include <fmt/format.h>

#include <lockstep/error.hpp>
#include <utility>

#include "group/no_rank_text.hpp"

namespace lockstep::internal {

void reject(GroupState& group, const Call& call, const std::string& text) {
  ErrorContext context = context_of(call, group.rank());
  context.group = group.name();
  group.refuse(call, context.operation, text);
  throw UsageError(std::move(context), text);
}

std::string why_no_reduction(ReduceOp op, DType dtype) {
  if (static_cast<std::size_t>(op) >= kReduceOps.size()) {
    return fmt::format("reduction {} does not exist", static_cast<int>(op));
  }
  if (dtype == DType::boolean) {
    return fmt::format(
        "{} of bool: use bor (any), band (all), bxor, min or max; to count, use an integer type",
        name_of(op));
  }
  if (dtype == detail::kMoments) {
    return fmt::format("{} of moments: they have only a sum", name_of(op));
  }
  return fmt::format(
      "{} of {}: bit operations are for integers and bool; use sum, product, min, max or mean",
      name_of(op), name_of(dtype));
}

void reject_reduction(GroupState& group, const Call& call) {
  reject(group, call, why_no_reduction(call.reduce, call.dtype));
}

void reject_memory(GroupState& group, const Call& call, const ConstElements& data,
                   std::string_view parameter) {
  if (size_of(data.dtype) == 0) {
    reject(group, call,
           fmt::format("{} has element type {}, which does not exist; use a DType, as DType::f32",
                       parameter, static_cast<int>(data.dtype)));
  }
  if (data.data == nullptr) {
    reject(group, call, fmt::format("{} is null but has {} elements", parameter, data.count));
  }
  reject(group, call,
         fmt::format("{} has {} elements, more than fit in memory", parameter, data.count));
}

void check_pair(GroupState& group, const Call& call, const ConstElements& in,
                const ConstElements& out) {
  check_memory(group, call, in, "in");
  check_memory(group, call, out, "out");
  if (in.dtype != out.dtype) {
    reject(group, call,
           fmt::format("in holds {}, out {}; both must have the same type", name_of(in.dtype),
                       name_of(out.dtype)));
  }
  const auto* a = static_cast<const std::byte*>(in.data);
  const auto* b = static_cast<const std::byte*>(out.data);
  if (in.count > 0 && out.count > 0 && a < b + out.n_bytes() && b < a + in.n_bytes()) {
    reject(group, call, "in and out overlap; use separate buffers");
  }
}

void check_rank(GroupState& group, const Call& call, std::string_view parameter) {
  if (call.root < 0 || call.root >= group.size()) {
    reject(group, call, no_rank_text(parameter, call.root, group.size()));
  }
}

void check_peer(GroupState& group, const Call& call, std::string_view parameter) {
  const std::string text = why_no_peer(parameter, call.root, group.rank(), group.size());
  if (!text.empty()) reject(group, call, text);
}

void check_count(GroupState& group, const Call& call, std::string_view parameter, std::size_t got,
                 std::size_t expected) {
  if (got != expected) {
    reject(group, call,
           fmt::format("{} has {} elements, expected {} ({} ranks)", parameter, got, expected,
                       group.size()));
  }
}

void check_counts(GroupState& group, const Call& call, std::size_t in_count) {
  if (call.counts.size() != static_cast<std::size_t>(group.size())) {
    reject(group, call,
           fmt::format("counts has {} entries, expected one for each of the {} ranks",
                       call.counts.size(), group.size()));
  }
  const std::size_t mine = call.counts[static_cast<std::size_t>(group.rank())];
  if (mine != in_count) {
    reject(group, call,
           fmt::format("counts has {} elements for this rank, in has {}", mine, in_count));
  }
}

}  // namespace lockstep::internal
