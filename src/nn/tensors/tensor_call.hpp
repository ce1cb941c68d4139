#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <source_location>
#include <string_view>
#include <vector>

#include <lockstep/detail/collective.hpp>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>

#include "nn/elements/memory_ranges.hpp"

/// The way from the tensors of a program to a call of a group, and back. The blocking and the
/// asynchronous operations, those with a gradient and the backend of c10d all go it.
namespace lockstep::nn {

using Tensors = std::vector<at::Tensor>;

/// The types that a group reduces, for errors.
inline constexpr const char* kReducible = "bool, u8, i8, i16, i32, i64, f16, bf16, f32 or f64";

/// What the operations of lockstep::nn and those of c10d do otherwise.
struct Rules {
  bool takes_cuda;          ///< by copies on the CPU
  bool keeps_memory;        ///< that the tensor has now, whatever it is given later (x.data = y)
  bool tells_autograd;      ///< of memory that was written, as a graph may have saved it
  bool are_parts_alike;     ///< of one shape; else of one size
  bool refuses_alike;       ///< also ranks to whose tensor broadcast or reduce writes nothing
  bool reduces_bool_as_or;  ///< sum and max; product and min as "and", as NCCL does
};
inline constexpr Rules kOperations{.takes_cuda = true,
                                   .keeps_memory = true,
                                   .tells_autograd = true,
                                   .are_parts_alike = true,
                                   .refuses_alike = true,
                                   .reduces_bool_as_or = false};
inline constexpr Rules kOfC10d{.takes_cuda = false,
                               .keeps_memory = false,  // its Work does
                               .tells_autograd = false,
                               .are_parts_alike = false,
                               .refuses_alike = false,
                               .reduces_bool_as_or = true};

/// An operation on tensors, as a program gives it. The parts of all ranks are one tensor, in which
/// they lie one after the other, or a list of one tensor for each rank.
struct TensorCall {
  Op op = Op::barrier;
  ReduceOp reduce = ReduceOp::sum;
  int root = -1;  ///< or the peer, which is not checked
  /// None of all_reduce, reduce and broadcast, which are in place; of scatter only on the root.
  Tensors ins{};
  /// None where the rank gets nothing; or else a new tensor: see PreparedCall::rows.
  Tensors outs{};
};

/// A TensorCall that has been checked, with the memory that the group reads and writes. That is the
/// tensors' own where it holds their elements in order, on the CPU.
class PreparedCall {
 public:
  /// written: by other calls, which are prepared with this one. Throws UsageError.
  PreparedCall(TensorCall call, const Rules& rules, const Group& group, const ErrorContext& context,
               const std::vector<MemoryRange>& written = {});
  PreparedCall(PreparedCall&&) = default;
  PreparedCall& operator=(PreparedCall&&) = default;

  /// For a caller that runs it otherwise. Points to memory of this.
  const Call& call() const { return call_; }
  /// The memory of a call of one tensor.
  const at::Tensor& own() const { return ins_.empty() ? own_outs_.front() : ins_.front(); }
  void run(const Group& group, Timeout timeout) const;
  /// This must live until the Work is done.
  Work post(const Group& group, Timeout timeout) const;
  /// The results to the program's tensors.
  void write_back() const;
  /// The result where the program gave no tensor for it: one for each rank; none where the rank
  /// gets nothing. On the device of the input.
  Tensors rows() const;

 private:
  friend class PreparedCalls;
  bool is_in_place() const { return call_.in == call_.out; }
  /// Of the memory, which is ready.
  void make_call(const TensorCall& call, const Group& group, const ErrorContext& context);
  /// Works on a copy of the values.
  void set_apart();

  Rules rules_;
  Tensors outs_;            // the program's
  Tensors ins_, own_outs_;  // dense, on the CPU
  at::Device device_ = at::kCPU;
  bool is_written_ = false;
  std::vector<const void*> in_addresses_;
  std::vector<void*> out_addresses_;
  std::vector<std::size_t> counts_;
  Call call_;  // points into the vectors, which keep their memory when they are moved
};

/// Several that are one operation: run one after the other, with the values from before the first.
class PreparedCalls {
 public:
  /// Throws UsageError, also if two tensors share memory and get different results.
  PreparedCalls(std::vector<TensorCall> calls, const Rules& rules, const Group& group,
                const ErrorContext& context);
  /// Also writes the results back. timeout: of each; or of_all of all together.
  void run(const Group& group, Timeout timeout,
           const lockstep::detail::TimeLimit* of_all = nullptr);

 private:
  std::vector<PreparedCall> calls_;
};

/// Guards an operation of lockstep::nn.
inline lockstep::detail::Collective guard_of(Op op, const Group& group,
                                             std::source_location where) {
  return {name_of(op), group, where, op};
}

/// Throws UsageError for a tensor that the group cannot read.
void check_tensor(const at::Tensor& tensor, const Rules& rules, const ErrorContext& context);
/// Throws UsageError for one that a result cannot be written to.
void check_result(const at::Tensor& tensor, const ErrorContext& context);
/// All of that, and of tensors of different types, and of results that share memory.
void check_tensors(const Tensors& ins, const Tensors& outs, bool are_results, const Rules& rules,
                   const ErrorContext& context);
/// Throws UsageError if elements of this type cannot be reduced so.
void check_reduction(at::ScalarType type, ReduceOp op, const ErrorContext& context);
void check_n_parts(std::size_t n, const Group& group, const ErrorContext& context);
/// Throws UsageError unless there is one part for each rank, all like `like`. are_rows: their first
/// sizes may differ.
void check_parts(const Tensors& parts, const at::Tensor& like, const Group& group,
                 const Rules& rules, const ErrorContext& context, bool are_rows = false);

/// Every rank's rows, in rank order, of which they have n_rows: this rank `rows`. On the CPU.
at::Tensor all_gather_rows(const at::Tensor& rows, at::IntArrayRef n_rows, const Rules& rules,
                           const Group& group, Timeout timeout, const ErrorContext& context);
/// The sum of the ranks' sparse COO tensors, by divisor. On the CPU. The limit is that of each of
/// its messages.
at::Tensor all_reduce_sparse(const at::Tensor& own, int divisor, const Rules& rules,
                             const Group& group, Timeout timeout, const ErrorContext& context);

/// Removes duplicates. libtorch's parameters() lists a tensor twice if it is registered under two
/// names.
Tensors unique_tensors(const Tensors& tensors);

}  // namespace lockstep::nn
