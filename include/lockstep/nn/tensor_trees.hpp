#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <array>
#include <concepts>
#include <map>
#include <source_location>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/nn/tensor_ops.hpp>
#include <lockstep/types.hpp>

/// The operations over nested containers of tensors: vector, array, map, torch::OrderedDict, pair,
/// tuple, at any depth; other elements are unchanged. One message per tensor, in order. The
/// containers must have the same structure on all ranks, otherwise MismatchError (or TimeoutError,
/// if one rank has more tensors).
namespace lockstep::nn {

namespace detail {

template <class T>
struct Tree {
  static constexpr bool kHasTensors = false;
  template <class F>
  static void visit(T& /*value*/, const F& /*f*/) {}
};
template <>
struct Tree<at::Tensor> {
  static constexpr bool kHasTensors = true;
  template <class F>
  static void visit(at::Tensor& value, const F& f) {
    f(value);
  }
};
template <class List, class T>
struct ListTree {
  static constexpr bool kHasTensors = Tree<T>::kHasTensors;
  template <class F>
  static void visit(List& value, const F& f) {
    for (T& item : value) Tree<T>::visit(item, f);
  }
};
template <class T>
struct Tree<std::vector<T>> : ListTree<std::vector<T>, T> {};
template <>
struct Tree<std::vector<bool>> : Tree<bool> {
  template <class F>
  static void visit(std::vector<bool>& /*value*/, const F& /*f*/) {}
};
template <class T, std::size_t N>
struct Tree<std::array<T, N>> : ListTree<std::array<T, N>, T> {};
template <class K, class T, class... Rest>
struct Tree<std::map<K, T, Rest...>> {
  static constexpr bool kHasTensors = Tree<T>::kHasTensors;
  template <class F>
  static void visit(std::map<K, T, Rest...>& value, const F& f) {
    for (auto& item : value) Tree<T>::visit(item.second, f);
  }
};
template <class K, class T>
struct Tree<torch::OrderedDict<K, T>> {
  static constexpr bool kHasTensors = Tree<T>::kHasTensors;
  template <class F>
  static void visit(torch::OrderedDict<K, T>& value, const F& f) {
    for (auto& item : value) Tree<T>::visit(item.value(), f);
  }
};
template <class Tuple, class... Ts>
struct TupleTree {
  static constexpr bool kHasTensors = (Tree<Ts>::kHasTensors || ...);
  template <class F>
  static void visit(Tuple& value, const F& f) {
    std::apply([&f](Ts&... items) { (Tree<Ts>::visit(items, f), ...); }, value);
  }
};
template <class... Ts>
struct Tree<std::tuple<Ts...>> : TupleTree<std::tuple<Ts...>, Ts...> {};
template <class A, class B>
struct Tree<std::pair<A, B>> : TupleTree<std::pair<A, B>, A, B> {};

/// The common device of all tensors. Throws UsageError if they differ or there are none.
at::Device common_device(const std::vector<at::Tensor>& tensors, std::source_location where);

template <class T>
std::vector<at::Tensor> tensors_of(const T& tree) {
  std::vector<at::Tensor> tensors;
  T copy = tree;  // copies handles only
  Tree<T>::visit(copy, [&tensors](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

using TensorsOfTrees = std::vector<std::vector<at::Tensor>>;

template <class T>
TensorsOfTrees tensors_of_each(const std::vector<T>& trees) {
  TensorsOfTrees result;
  for (const T& tree : trees) result.push_back(tensors_of(tree));
  return result;
}
/// Transposes parts per rank to parts per tensor. Throws UsageError unless there is one part per
/// rank of the group, with tensors of the shapes and types of `like`.
TensorsOfTrees parts_by_tensor(const char* operation, const TensorsOfTrees& parts,
                               const std::vector<at::Tensor>& like, const Group& group,
                               std::source_location where);
/// The i-th tensor of the r-th tree <- by_tensor[i][r].
template <class T>
std::vector<T> with_tensors(std::vector<T> trees, const TensorsOfTrees& by_tensor) {
  for (std::size_t rank = 0; rank < trees.size(); ++rank) {
    auto next = by_tensor.begin();
    Tree<T>::visit(trees[rank], [&](at::Tensor& t) { t = (*next++)[rank]; });
  }
  return trees;
}

}  // namespace detail

/// A container that holds tensors; not a tensor itself.
template <class T>
concept TensorTree = detail::Tree<T>::kHasTensors && !std::same_as<T, at::Tensor>;

template <TensorTree T>
void all_reduce(T& data, ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                Deadline deadline = {},
                std::source_location where = std::source_location::current()) {
  detail::Tree<T>::visit(data, [&](at::Tensor& t) { all_reduce(t, op, group, deadline, where); });
}
template <TensorTree T>
void reduce(T& data, int dst = 0, ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
            Deadline deadline = {}, std::source_location where = std::source_location::current()) {
  detail::Tree<T>::visit(data, [&](at::Tensor& t) { reduce(t, dst, op, group, deadline, where); });
}
template <TensorTree T>
void broadcast(T& data, int src = 0, const Group& group = default_group(), Deadline deadline = {},
               std::source_location where = std::source_location::current()) {
  detail::Tree<T>::visit(data, [&](at::Tensor& t) { broadcast(t, src, group, deadline, where); });
}
/// Returns, indexed by rank, this rank's container with that rank's tensors.
template <TensorTree T>
std::vector<T> all_gather(const T& data, const Group& group = default_group(),
                          Deadline deadline = {},
                          std::source_location where = std::source_location::current()) {
  detail::TensorsOfTrees gathered;
  for (const at::Tensor& tensor : detail::tensors_of(data)) {
    gathered.push_back(all_gather(tensor, group, deadline, where));
  }
  return detail::with_tensors(std::vector<T>(static_cast<std::size_t>(group.size()), data),
                              gathered);
}
/// As all_gather, but only dst receives; returns an empty vector elsewhere.
template <TensorTree T>
std::vector<T> gather(const T& data, int dst = 0, const Group& group = default_group(),
                      Deadline deadline = {},
                      std::source_location where = std::source_location::current()) {
  detail::TensorsOfTrees gathered;
  for (const at::Tensor& tensor : detail::tensors_of(data)) {
    gathered.push_back(gather(tensor, dst, group, deadline, where));
  }
  if (group.rank() != dst) return {};
  return detail::with_tensors(std::vector<T>(static_cast<std::size_t>(group.size()), data),
                              gathered);
}
/// The tensors of data <- those of src's parts[rank]; parts is not used on other ranks.
template <TensorTree T>
void scatter(T& data, const std::vector<T>& parts, int src = 0,
             const Group& group = default_group(), Deadline deadline = {},
             std::source_location where = std::source_location::current()) {
  const auto mine = detail::tensors_of(data);
  detail::TensorsOfTrees by_tensor(mine.size());
  if (group.rank() == src) {
    by_tensor =
        detail::parts_by_tensor("scatter", detail::tensors_of_each(parts), mine, group, where);
  }
  auto next = by_tensor.begin();
  detail::Tree<T>::visit(data,
                         [&](at::Tensor& t) { scatter(t, *next++, src, group, deadline, where); });
}
/// The tensors of data <- reductions over the ranks of those of parts[rank].
template <TensorTree T>
void reduce_scatter(T& data, const std::vector<T>& parts, ReduceOp op = ReduceOp::sum,
                    const Group& group = default_group(), Deadline deadline = {},
                    std::source_location where = std::source_location::current()) {
  const auto by_tensor = detail::parts_by_tensor("reduce_scatter", detail::tensors_of_each(parts),
                                                 detail::tensors_of(data), group, where);
  auto next = by_tensor.begin();
  detail::Tree<T>::visit(
      data, [&](at::Tensor& t) { reduce_scatter(t, *next++, op, group, deadline, where); });
}
/// Returns, indexed by rank q, this rank's parts[q] with the tensors of rank q's parts[this rank].
template <TensorTree T>
std::vector<T> all_to_all(const std::vector<T>& parts, const Group& group = default_group(),
                          Deadline deadline = {},
                          std::source_location where = std::source_location::current()) {
  const auto mine = detail::tensors_of_each(parts);
  detail::TensorsOfTrees received;
  for (const auto& of_tensor : detail::parts_by_tensor(
           "all_to_all", mine, mine.empty() ? std::vector<at::Tensor>() : mine[0], group, where)) {
    received.push_back(all_to_all(of_tensor, group, deadline, where));
  }
  return detail::with_tensors(parts, received);
}
template <TensorTree T>
void send(const T& data, int dst, const Group& group = default_group(), Deadline deadline = {},
          std::source_location where = std::source_location::current()) {
  for (const at::Tensor& tensor : detail::tensors_of(data)) {
    send(tensor, dst, group, deadline, where);
  }
}
template <TensorTree T>
void recv(T& data, int src, const Group& group = default_group(), Deadline deadline = {},
          std::source_location where = std::source_location::current()) {
  detail::Tree<T>::visit(data, [&](at::Tensor& t) { recv(t, src, group, deadline, where); });
}

/// dict[key] <- reduction of every rank's dict[key], on all ranks. If keys, element counts or op
/// differ, every rank throws MismatchError, which names the keys and the ranks, and nothing is
/// changed.
void all_reduce_dict(std::map<std::string, at::Tensor>& dict, ReduceOp op = ReduceOp::sum,
                     const Group& group = default_group(), Deadline deadline = {},
                     std::source_location where = std::source_location::current());

/// Reduces parameters (or gradients, or any tensors) in place, in messages of up to bucket_size_mb
/// MiB; below 0: one message per type. coalesce = false: one message per tensor. Sums by default,
/// as in mmengine: use ReduceOp::mean to average.
void all_reduce_params(const std::vector<at::Tensor>& params, bool coalesce = true,
                       double bucket_size_mb = -1, ReduceOp op = ReduceOp::sum,
                       const Group& group = default_group(), Deadline deadline = {},
                       std::source_location where = std::source_location::current());

/// The device of all tensors in `data`, a tensor or a container.
/// Throws UsageError if they are on several devices, or there is no tensor.
template <class T>
at::Device get_data_device(const T& data,
                           std::source_location where = std::source_location::current()) {
  return detail::common_device(detail::tensors_of(data), where);
}

/// The device of tensors for the group's operations: the CPU.
at::Device get_comm_device(const Group& group = default_group());

/// `data`, a tensor or a container, with its tensors on `device`; no copy if already there.
template <class T>
T cast_data_device(const T& data, at::Device device) {
  T result = data;
  detail::Tree<T>::visit(result, [device](at::Tensor& t) {
    if (t.defined()) t = t.to(device);
  });
  return result;
}

}  // namespace lockstep::nn
