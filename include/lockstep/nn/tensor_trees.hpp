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

/// The verbs over nested containers of tensors: vector, array, map, torch::OrderedDict, pair,
/// tuple, at any depth; what else stands in them is left as it is. One message per tensor, in
/// order; the containers are alike on all ranks, else MismatchError (or a TimeoutError, where one
/// has more).
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

/// The device of all of them. Throws UsageError where they differ or there are none.
at::Device common_device(const std::vector<at::Tensor>& tensors, std::source_location where);

template <class T>
std::vector<at::Tensor> tensors_of(const T& tree) {
  std::vector<at::Tensor> tensors;
  T copy = tree;  // of handles
  Tree<T>::visit(copy, [&tensors](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
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
/// By rank: this rank's container with that rank's tensors.
template <TensorTree T>
std::vector<T> all_gather(const T& data, const Group& group = default_group(),
                          Deadline deadline = {},
                          std::source_location where = std::source_location::current()) {
  std::vector<std::vector<at::Tensor>> gathered;  // by tensor, by rank
  for (const at::Tensor& tensor : detail::tensors_of(data)) {
    gathered.push_back(all_gather(tensor, group, deadline, where));
  }
  std::vector<T> result(static_cast<std::size_t>(group.size()), data);
  for (std::size_t rank = 0; rank < result.size(); ++rank) {
    auto next = gathered.begin();
    detail::Tree<T>::visit(result[rank], [&](at::Tensor& t) { t = (*next++)[rank]; });
  }
  return result;
}

/// dict[key] <- reduction of every rank's dict[key], on all ranks. MismatchError where keys,
/// numbers of elements or op differ, on every rank; it names the keys and the ranks, and nothing
/// has changed.
void all_reduce_dict(std::map<std::string, at::Tensor>& dict, ReduceOp op = ReduceOp::sum,
                     const Group& group = default_group(), Deadline deadline = {},
                     std::source_location where = std::source_location::current());

/// Reduces parameters (or gradients: any tensors) in place, in messages of up to bucket_size_mb
/// MiB; below 0: one message per type. coalesce false: one message per tensor.
void all_reduce_params(const std::vector<at::Tensor>& params, bool coalesce = true,
                       double bucket_size_mb = -1, ReduceOp op = ReduceOp::mean,
                       const Group& group = default_group(), Deadline deadline = {},
                       std::source_location where = std::source_location::current());

/// The device of all tensors in `data`, a tensor or a container.
/// Throws UsageError where they are on several, or there is none.
template <class T>
at::Device get_data_device(const T& data,
                           std::source_location where = std::source_location::current()) {
  return detail::common_device(detail::tensors_of(data), where);
}

/// The device whose tensors the group's verbs take: the CPU.
at::Device get_comm_device(const Group& group = default_group());

/// `data`, a tensor or a container, with its tensors on `device`; those there already are the same.
template <class T>
T cast_data_device(const T& data, at::Device device) {
  T result = data;
  detail::Tree<T>::visit(result, [device](at::Tensor& t) {
    if (t.defined()) t = t.to(device);
  });
  return result;
}

}  // namespace lockstep::nn
