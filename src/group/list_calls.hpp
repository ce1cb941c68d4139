#pragma once

#include <lockstep/group.hpp>
#include <source_location>
#include <span>

namespace lockstep::internal {

/// Operations of Group in the forms that the layers above need. They match Group's own: a rank may
/// call these while its peers call Group's. On lists: one part per rank, each in separate memory,
/// as in torch.distributed. With a tag: identifies what the call is for; if ranks give different
/// tags, they throw MismatchError; 0 or more, or -1 for none, as Group's own calls.
struct ListCalls {
  static void all_reduce(const Group& group, const Elements& data, ReduceOp op, int tag,
                         Timeout timeout, std::source_location where);
  static void all_gather(const Group& group, const ConstElements& in, const Elements& out, int tag,
                         Timeout timeout, std::source_location where);
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
