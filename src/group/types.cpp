#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <lockstep/engine.hpp>
#include <lockstep/error.hpp>
#include <lockstep/types.hpp>
#include <string>

#include "group/names_of_reductions.hpp"

namespace lockstep {

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::u8: return "u8";
    case DType::i8: return "i8";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::f32: return "f32";
    case DType::f64: return "f64";
    case DType::boolean: return "bool";
    case DType::i16: return "i16";
    case DType::u16: return "u16";
    case DType::u32: return "u32";
    case DType::u64: return "u64";
  }
  return dtype == detail::kMoments ? "moments" : "unknown type";
}

std::string_view name_of(ReduceOp op) {
  const auto i = static_cast<std::size_t>(op);
  if (i < kReduceOps.size()) return kReduceOps[i].name;
  return "unknown reduction";
}

std::string_view name_of(Op op) {
  switch (op) {
    case Op::barrier: return "barrier";
    case Op::all_reduce: return "all_reduce";
    case Op::reduce: return "reduce";
    case Op::broadcast: return "broadcast";
    case Op::all_gather: return "all_gather";
    case Op::gather: return "gather";
    case Op::scatter: return "scatter";
    case Op::reduce_scatter: return "reduce_scatter";
    case Op::all_to_all: return "all_to_all";
    case Op::send: return "send";
    case Op::recv: return "recv";
    case Op::split: return "split";
    case Op::allocate: return "allocate";
  }
  return "unknown operation";
}

ReduceOp parse_reduce_op(std::string_view name) {
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const ReduceOpTraits& known : kReduceOps) {
    if (lower == known.name) return known.op;
  }
  throw UsageError(
      {.operation = "parse_reduce_op"},
      fmt::format("'{}' is not a reduction; use {}", name, internal::names_of_reductions()));
}

}  // namespace lockstep
