#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <source_location>
#include <type_traits>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/types.hpp>
#include <lockstep/world.hpp>

/// @file
/// The operations over tensors. Sizes are those of the tensors; errors and threads as for the
/// Group's operations (group.hpp). Tensors that are not contiguous or are on CUDA are copied to
/// contiguous host memory and back. Autograd counts a result as a change in place: backward of a
/// graph that saved the tensor before throws. Sums and means of complex tensors are those of their
/// two parts. UsageError for a reduction that the type does not have (ReduceOp), another device, a
/// sparse or undefined tensor.
namespace lockstep::nn {

namespace detail {
/// A const or temporary tensor, to which a result cannot be written.
template <class T>
concept ConstTensor =
    std::same_as<std::remove_cvref_t<T>, at::Tensor> && !std::same_as<T, at::Tensor&>;
template <class T>
consteval void refuse_const_tensor() {
  static_assert(!ConstTensor<T>,
                "lockstep: the result is written to this tensor: pass a named at::Tensor that is "
                "not const; a copy, as of parameter.grad(), shares the memory");
}
}  // namespace detail

/// data <- reduction of every rank's data, on all ranks. Not recorded by autograd.
void all_reduce(at::Tensor& data, ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                Timeout timeout = {}, std::source_location where = std::source_location::current());
inline void all_reduce(at::Tensor& data, const CallOptions& options,
                       std::source_location where = std::source_location::current()) {
  all_reduce(data, options.op, lockstep::detail::group_of(options, where), options.timeout, where);
}
template <detail::ConstTensor T, class Given = CallOptions, class... Rest>
void all_reduce(T&&, const Given& = {}, Rest&&...) {
  detail::refuse_const_tensor<T>();
}

/// data <- src's data. Any element type, the same on all ranks.
void broadcast(at::Tensor& data, int src = 0, const Group& group = default_group(),
               Timeout timeout = {}, std::source_location where = std::source_location::current());
template <detail::ConstTensor T, class... Rest>
void broadcast(T&&, Rest&&...) {
  detail::refuse_const_tensor<T>();
}

/// Returns every rank's data, indexed by rank: contiguous tensors of data's shape, which must be
/// the same on all ranks. Any element type.
std::vector<at::Tensor> all_gather(const at::Tensor& data, const Group& group = default_group(),
                                   Timeout timeout = {},
                                   std::source_location where = std::source_location::current());

/// On dst: data <- reduction of every rank's data. On other ranks data is unchanged.
void reduce(at::Tensor& data, int dst = 0, ReduceOp op = ReduceOp::sum,
            const Group& group = default_group(), Timeout timeout = {},
            std::source_location where = std::source_location::current());
inline void reduce(at::Tensor& data, int dst, const CallOptions& options,
                   std::source_location where = std::source_location::current()) {
  reduce(data, dst, options.op, lockstep::detail::group_of(options, where), options.timeout, where);
}
template <detail::ConstTensor T, class... Rest>
void reduce(T&&, Rest&&...) {
  detail::refuse_const_tensor<T>();
}

/// As all_gather, but only dst receives; returns an empty vector elsewhere.
std::vector<at::Tensor> gather(const at::Tensor& data, int dst = 0,
                               const Group& group = default_group(), Timeout timeout = {},
                               std::source_location where = std::source_location::current());

/// data <- parts[rank] of src: size() tensors of data's shape and type; not used on other ranks.
/// Any element type.
void scatter(at::Tensor& data, const std::vector<at::Tensor>& parts, int src = 0,
             const Group& group = default_group(), Timeout timeout = {},
             std::source_location where = std::source_location::current());
template <detail::ConstTensor T, class... Rest>
void scatter(T&&, Rest&&...) {
  detail::refuse_const_tensor<T>();
}

/// data <- reduction of every rank's parts[rank]: size() tensors of data's shape and type.
void reduce_scatter(at::Tensor& data, const std::vector<at::Tensor>& parts,
                    ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                    Timeout timeout = {},
                    std::source_location where = std::source_location::current());
inline void reduce_scatter(at::Tensor& data, const std::vector<at::Tensor>& parts,
                           const CallOptions& options,
                           std::source_location where = std::source_location::current()) {
  reduce_scatter(data, parts, options.op, lockstep::detail::group_of(options, where),
                 options.timeout, where);
}
template <detail::ConstTensor T, class... Rest>
void reduce_scatter(T&&, Rest&&...) {
  detail::refuse_const_tensor<T>();
}

/// Returns, indexed by rank q, rank q's parts[this rank]. parts: size() tensors of one shape and
/// type, the same on all ranks. Any element type.
std::vector<at::Tensor> all_to_all(const std::vector<at::Tensor>& parts,
                                   const Group& group = default_group(), Timeout timeout = {},
                                   std::source_location where = std::source_location::current());

/// To and from another rank. The receiver's tensor must have the sender's type and element count.
void send(const at::Tensor& data, int dst, const Group& group = default_group(),
          Timeout timeout = {}, std::source_location where = std::source_location::current());
void recv(at::Tensor& data, int src, const Group& group = default_group(), Timeout timeout = {},
          std::source_location where = std::source_location::current());
template <detail::ConstTensor T, class... Rest>
void recv(T&&, Rest&&...) {
  detail::refuse_const_tensor<T>();
}

/// The DType of a tensor's elements. Throws UsageError for a type without one.
DType dtype_of(const at::Tensor& tensor,
               std::source_location where = std::source_location::current());

/// A view of a contiguous CPU tensor's elements, for the operations of Group.
/// Throws UsageError for any other tensor.
Elements elements_of(const at::Tensor& tensor,
                     std::source_location where = std::source_location::current());

}  // namespace lockstep::nn
