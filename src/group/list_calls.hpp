#pragma once

#include <lockstep/group.hpp>
#include <source_location>
#include <span>

namespace lockstep::internal {

/// Operations of Group on lists: one part per rank, each in memory of its own, as torch.distributed
/// has them. As Group's otherwise; a rank may call these, and its peers Group's.
struct ListCalls {
  /// The sizes of outs may differ.
  static void all_gather(const Group& group, const ConstElements& in,
                         std::span<const Elements> outs, Timeout timeout,
                         std::source_location where);
  /// On dst. All of outs have the size of in.
  static void gather(const Group& group, const ConstElements& in, std::span<const Elements> outs,
                     int dst, Timeout timeout, std::source_location where);
  /// On src. All of ins have the size of out.
  static void scatter(const Group& group, std::span<const ConstElements> ins, const Elements& out,
                      int src, Timeout timeout, std::source_location where);
  /// All of ins have the size of out.
  static void reduce_scatter(const Group& group, std::span<const ConstElements> ins,
                             const Elements& out, ReduceOp op, Timeout timeout,
                             std::source_location where);
  /// All of ins and outs have the same size.
  static void all_to_all(const Group& group, std::span<const ConstElements> ins,
                         std::span<const Elements> outs, Timeout timeout,
                         std::source_location where);
};

}  // namespace lockstep::internal
