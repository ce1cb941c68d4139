#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <lockstep/detail/collective.hpp>
#include <lockstep/error.hpp>

#include "c/handles.hpp"

namespace lockstep::c {
namespace {

static_assert(LOCKSTEP_U8 == static_cast<int>(DType::u8));
static_assert(LOCKSTEP_I8 == static_cast<int>(DType::i8));
static_assert(LOCKSTEP_I32 == static_cast<int>(DType::i32));
static_assert(LOCKSTEP_I64 == static_cast<int>(DType::i64));
static_assert(LOCKSTEP_F16 == static_cast<int>(DType::f16));
static_assert(LOCKSTEP_BF16 == static_cast<int>(DType::bf16));
static_assert(LOCKSTEP_F32 == static_cast<int>(DType::f32));
static_assert(LOCKSTEP_F64 == static_cast<int>(DType::f64));
static_assert(LOCKSTEP_BOOL == static_cast<int>(DType::boolean));
static_assert(LOCKSTEP_I16 == static_cast<int>(DType::i16));
static_assert(LOCKSTEP_U16 == static_cast<int>(DType::u16));
static_assert(LOCKSTEP_U32 == static_cast<int>(DType::u32));
static_assert(LOCKSTEP_U64 == static_cast<int>(DType::u64));
static_assert(LOCKSTEP_SUM == static_cast<int>(ReduceOp::sum));
static_assert(LOCKSTEP_PRODUCT == static_cast<int>(ReduceOp::product));
static_assert(LOCKSTEP_MIN == static_cast<int>(ReduceOp::min));
static_assert(LOCKSTEP_MAX == static_cast<int>(ReduceOp::max));
static_assert(LOCKSTEP_BAND == static_cast<int>(ReduceOp::band));
static_assert(LOCKSTEP_BOR == static_cast<int>(ReduceOp::bor));
static_assert(LOCKSTEP_BXOR == static_cast<int>(ReduceOp::bxor));
static_assert(LOCKSTEP_MEAN == static_cast<int>(ReduceOp::mean));
static_assert(LOCKSTEP_MEAN + 1 == kReduceOps.size());

Timeout timeout_of(std::int64_t timeout_ms) {
  if (timeout_ms == LOCKSTEP_GROUP_TIMEOUT) return {};
  return std::chrono::milliseconds(timeout_ms);
}

}  // namespace

Arguments::Arguments(const char* operation, const lockstep_group* group, std::int64_t timeout_ms,
                     const lockstep_site* site)
    : operation_(operation),
      group_(group),
      where_(where_of(site)),
      timeout_(timeout_of(timeout_ms)) {
  check_given(group, "group");
  if (timeout_ms < LOCKSTEP_GROUP_TIMEOUT) {
    reject(fmt::format("timeout_ms is {}; give milliseconds, 0 or more, or LOCKSTEP_GROUP_TIMEOUT",
                       timeout_ms));
  }
}

std::size_t Arguments::count_of_all(std::size_t count) const {
  // The product must not wrap around to a size that the group would accept.
  if (count > SIZE_MAX / size()) {
    reject(fmt::format("count is {} for each of {} ranks, more than fit in memory", count, size()));
  }
  return count * size();
}

DType Arguments::dtype(int value) const {
  if (value < LOCKSTEP_U8 || value > LOCKSTEP_U64) {
    reject(fmt::format("element type {} does not exist; use a lockstep_dtype, as LOCKSTEP_F32",
                       value));
  }
  return static_cast<DType>(value);
}

ReduceOp Arguments::reduction(int value) const {
  if (static_cast<std::size_t>(value) >= kReduceOps.size()) {
    reject(fmt::format("reduction {} does not exist; use a lockstep_reduction, as LOCKSTEP_SUM",
                       value));
  }
  return static_cast<ReduceOp>(value);
}

void Arguments::check_given(const void* pointer, const char* name) const {
  if (pointer == nullptr) reject(fmt::format("{} is NULL", name));
}

void Arguments::reject(const std::string& text) const {
  ErrorContext context{.operation = operation_, .where = where_};
  if (group_ != nullptr) {
    context.group = group_->name;
    context.rank = group().rank();
    const Op op = context.operation == "send"   ? Op::send
                  : context.operation == "recv" ? Op::recv
                                                : Op::barrier;
    detail::Collective(operation_, group(), where_, op).refuse(text);
  }
  throw UsageError(std::move(context), text);
}

}  // namespace lockstep::c
