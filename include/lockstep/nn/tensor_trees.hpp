#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <torch/ordered_dict.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <map>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/nn/tensor_ops.hpp>
#include <lockstep/types.hpp>
#include <lockstep/world.hpp>

/// @file
/// The operations over nested containers of tensors: vector, array, map, torch::OrderedDict, pair,
/// tuple, optional, at any depth; other elements are unchanged. One message per tensor, in order.
/// A tensor that comes twice is reduced once, and of tensors that overlap every element once; where
/// the results differ (scatter, reduce_scatter, recv), tensors that share memory are a UsageError.
/// The containers must have the same structure on all ranks, otherwise MismatchError (or
/// TimeoutError, if one rank has more tensors).
namespace lockstep::nn {

namespace detail {

/// What a tree holds: tensors, other values, containers whose order may differ between ranks, types
/// that may hide a tensor from visit.
enum Holds : unsigned { kTensors = 1, kOthers = 2, kUnordered = 4, kOpaque = 8 };

/// Whether a T may own a tensor that visit cannot reach. Trivial types and strings own none.
template <class T>
inline constexpr bool kMayHideTensors =
    !std::is_convertible_v<T, std::string_view> && !std::is_same_v<T, std::vector<bool>> &&
    !std::is_same_v<T, at::Scalar> &&
    (!std::is_trivially_copyable_v<T> || std::is_pointer_v<T> ||
     std::is_convertible_v<T, at::TensorList>);

/// visit(values, f) calls f with the tensors at each place of values that have one structure, and
/// returns false if their structures differ. Primary template: no tensors inside.
template <class T>
struct Tree {
  static constexpr unsigned kHolds = kOthers | (kMayHideTensors<T> ? kOpaque : 0U);
  template <class F>
  static bool visit(const std::vector<T*>& /*values*/, const F& /*f*/) {
    return true;
  }
};
template <>
struct Tree<at::Tensor> {
  static constexpr unsigned kHolds = kTensors;
  template <class F>
  static bool visit(const std::vector<at::Tensor*>& tensors, const F& f) {
    f(tensors);
    return true;
  }
};

/// Visits item(value) of each value; it is null if the value has no such item.
template <class T, class Value, class Item, class F>
bool visit_item(const std::vector<Value*>& values, const Item& item, const F& f) {
  std::vector<T*> items;
  for (Value* value : values) {
    items.push_back(item(*value));
    if (items.back() == nullptr) return false;
  }
  return Tree<T>::visit(items, f);
}
template <class Value>
bool have_one_size(const std::vector<Value*>& values) {
  for (const Value* value : values) {
    if (value->size() != values[0]->size()) return false;
  }
  return true;
}

template <class List, class T>
struct ListTree {
  static constexpr unsigned kHolds = Tree<T>::kHolds;
  template <class F>
  static bool visit(const std::vector<List*>& values, const F& f) {
    bool are_alike = have_one_size(values);
    for (std::size_t i = 0; are_alike && i < values[0]->size(); ++i) {
      are_alike = visit_item<T>(
          values, [i](List& list) { return &list[i]; }, f);
    }
    return are_alike;
  }
};
template <class T>
requires(!std::same_as<T, bool>) struct Tree<std::vector<T>> : ListTree<std::vector<T>, T> {
};
template <class T, std::size_t N>
struct Tree<std::array<T, N>> : ListTree<std::array<T, N>, T> {};

template <class T>
struct Tree<std::optional<T>> {
  static constexpr unsigned kHolds = Tree<T>::kHolds;
  template <class F>
  static bool visit(const std::vector<std::optional<T>*>& values, const F& f) {
    const auto has_value = [](const std::optional<T>* value) { return value->has_value(); };
    if (std::ranges::none_of(values, has_value)) return true;
    return visit_item<T>(
        values, [](std::optional<T>& value) { return value ? &*value : nullptr; }, f);
  }
};

template <class Map, class T, unsigned kOrder = 0>
struct MapTree {
  static constexpr unsigned kHolds = Tree<T>::kHolds | kOrder;
  template <class F>
  static bool visit(const std::vector<Map*>& values, const F& f) {
    bool are_alike = have_one_size(values);
    for (auto i = values[0]->begin(); are_alike && i != values[0]->end(); ++i) {
      const auto item = [&key = i->first](Map& map) {
        const auto found = map.find(key);
        return found == map.end() ? nullptr : &found->second;
      };
      are_alike = visit_item<T>(values, item, f);
    }
    return are_alike;
  }
};
template <class K, class T, class... Rest>
struct Tree<std::map<K, T, Rest...>> : MapTree<std::map<K, T, Rest...>, T> {};
template <class K, class T, class... Rest>
struct Tree<std::unordered_map<K, T, Rest...>>
    : MapTree<std::unordered_map<K, T, Rest...>, T, kUnordered> {};
template <class K, class T>
struct Tree<torch::OrderedDict<K, T>> {
  using Dict = torch::OrderedDict<K, T>;
  static constexpr unsigned kHolds = Tree<T>::kHolds;
  template <class F>
  static bool visit(const std::vector<Dict*>& values, const F& f) {
    bool are_alike = have_one_size(values);
    for (std::size_t i = 0; are_alike && i < values[0]->size(); ++i) {
      const K& key = (*values[0])[i].key();
      are_alike = visit_item<T>(
          values, [&key](Dict& dict) { return dict.find(key); }, f);
    }
    return are_alike;
  }
};

template <class Tuple, class... Ts>
struct TupleTree {
  static constexpr unsigned kHolds = (0U | ... | Tree<Ts>::kHolds);
  template <class F>
  static bool visit(const std::vector<Tuple*>& values, const F& f) {
    return [&]<std::size_t... I>(std::index_sequence<I...> /*indices*/) {
      return (visit_item<Ts>(
                  values, [](Tuple& tuple) { return &std::get<I>(tuple); }, f) &&
              ...);
    }
    (std::index_sequence_for<Ts...>());
  }
};
template <class... Ts>
requires(std::is_object_v<Ts>&&...) struct Tree<std::tuple<Ts...>>
    : TupleTree<std::tuple<Ts...>, Ts...> {
};
template <class A, class B>
requires(std::is_object_v<A>&& std::is_object_v<B>) struct Tree<std::pair<A, B>>
    : TupleTree<std::pair<A, B>, A, B> {
};

template <class T>
inline constexpr bool kHasTensors = (Tree<T>::kHolds & kTensors) != 0;

template <class T>
std::vector<T*> pointers_to(std::vector<T>& values) {
  std::vector<T*> pointers;
  for (T& value : values) pointers.push_back(&value);
  return pointers;
}

/// Calls f with each tensor of one tree.
template <class T, class F>
void for_each_tensor(T& tree, const F& f) {
  Tree<T>::visit({&tree}, [&f](const std::vector<at::Tensor*>& tensors) { f(*tensors[0]); });
}

/// The common device of all tensors. Throws UsageError if they differ or there are none.
at::Device common_device(const std::vector<at::Tensor>& tensors, std::source_location where);

template <class T>
std::vector<at::Tensor> tensors_of(const T& tree) {
  std::vector<at::Tensor> tensors;
  T copy = tree;  // copies handles only
  for_each_tensor(copy, [&tensors](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

using TensorsOfTrees = std::vector<std::vector<at::Tensor>>;

/// What f makes of each.
template <class Range, class F>
TensorsOfTrees map_to_tensors(const Range& values, const F& f) {
  TensorsOfTrees result;
  for (const auto& value : values) result.push_back(f(value));
  return result;
}
/// Transposes parts per rank to parts per tensor. Throws UsageError unless there is one part per
/// rank of the group, with tensors of the shapes and types of `like`.
TensorsOfTrees parts_by_tensor(const char* operation, const TensorsOfTrees& parts,
                               const std::vector<at::Tensor>& like, const Group& group,
                               std::source_location where);
/// all_reduce, and reduce, of each tensor: of the values before the call also where two share
/// memory.
void all_reduce_each(const std::vector<at::Tensor>& tensors, ReduceOp op, const Group& group,
                     Timeout timeout, std::source_location where);
void reduce_each(const std::vector<at::Tensor>& tensors, int dst, ReduceOp op, const Group& group,
                 Timeout timeout, std::source_location where);
/// Throws UsageError if two of the tensors, which get different results, share memory. Replaces
/// those of `parts` that share memory with one of them by copies. src: of recv.
void separate(const char* operation, const std::vector<at::Tensor>& results, TensorsOfTrees& parts,
              const Group& group, std::source_location where, int src = -1);
/// The parts of a scatter or reduce_scatter by tensor, apart from those of data; none: they are not
/// used here.
template <class T>
TensorsOfTrees separate_parts(const char* operation, const T& data, const std::vector<T>& parts,
                              bool are_used, const Group& group, std::source_location where) {
  const auto mine = tensors_of(data);
  TensorsOfTrees by_tensor(mine.size());
  if (are_used) {
    by_tensor =
        parts_by_tensor(operation, map_to_tensors(parts, tensors_of<T>), mine, group, where);
  }
  separate(operation, mine, by_tensor, group, where);
  return by_tensor;
}
/// The i-th tensor of the r-th tree <- by_tensor[i][r].
template <class T>
std::vector<T> with_tensors(std::vector<T> trees, const TensorsOfTrees& by_tensor) {
  for (std::size_t rank = 0; rank < trees.size(); ++rank) {
    auto next = by_tensor.begin();
    for_each_tensor(trees[rank], [&](at::Tensor& t) { t = (*next++)[rank]; });
  }
  return trees;
}

}  // namespace detail

/// A container that holds tensors in the same order on all ranks; not a tensor itself.
template <class T>
concept TensorTree = detail::kHasTensors<T> && !(detail::Tree<T>::kHolds & detail::kUnordered) &&
                     !std::same_as<T, at::Tensor>;

/// The operations of tensor_ops.hpp on each tensor of a container, in its order.
template <TensorTree T>
void all_reduce(T& data, ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                Timeout timeout = {},
                std::source_location where = std::source_location::current()) {
  detail::all_reduce_each(detail::tensors_of(data), op, group, timeout, where);
}
template <TensorTree T>
void all_reduce(T& data, const CallOptions& options,
                std::source_location where = std::source_location::current()) {
  all_reduce(data, options.op, lockstep::detail::group_of(options, where), options.timeout, where);
}
template <TensorTree T>
void reduce(T& data, int dst = 0, ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
            Timeout timeout = {}, std::source_location where = std::source_location::current()) {
  detail::reduce_each(detail::tensors_of(data), dst, op, group, timeout, where);
}
template <TensorTree T>
void reduce(T& data, int dst, const CallOptions& options,
            std::source_location where = std::source_location::current()) {
  reduce(data, dst, options.op, lockstep::detail::group_of(options, where), options.timeout, where);
}
template <TensorTree T>
void broadcast(T& data, int src = 0, const Group& group = default_group(), Timeout timeout = {},
               std::source_location where = std::source_location::current()) {
  detail::for_each_tensor(data, [&](at::Tensor& t) { broadcast(t, src, group, timeout, where); });
}
/// Returns, indexed by rank, this rank's container with that rank's tensors.
template <TensorTree T>
std::vector<T> all_gather(const T& data, const Group& group = default_group(), Timeout timeout = {},
                          std::source_location where = std::source_location::current()) {
  const auto gathered = detail::map_to_tensors(detail::tensors_of(data), [&](const at::Tensor& t) {
    return all_gather(t, group, timeout, where);
  });
  return detail::with_tensors(std::vector<T>(static_cast<std::size_t>(group.size()), data),
                              gathered);
}
/// As all_gather, but only dst receives; returns an empty vector elsewhere.
template <TensorTree T>
std::vector<T> gather(const T& data, int dst = 0, const Group& group = default_group(),
                      Timeout timeout = {},
                      std::source_location where = std::source_location::current()) {
  const auto gathered = detail::map_to_tensors(detail::tensors_of(data), [&](const at::Tensor& t) {
    return gather(t, dst, group, timeout, where);
  });
  if (group.rank() != dst) return {};
  return detail::with_tensors(std::vector<T>(static_cast<std::size_t>(group.size()), data),
                              gathered);
}
/// The tensors of data <- those of src's parts[rank]; parts is not used on other ranks.
template <TensorTree T>
void scatter(T& data, const std::vector<T>& parts, int src = 0,
             const Group& group = default_group(), Timeout timeout = {},
             std::source_location where = std::source_location::current()) {
  const auto by_tensor = detail::separate_parts("scatter", data, parts,
                                                /*are_used=*/group.rank() == src, group, where);
  auto next = by_tensor.begin();
  detail::for_each_tensor(data,
                          [&](at::Tensor& t) { scatter(t, *next++, src, group, timeout, where); });
}
/// The tensors of data <- reductions over the ranks of those of parts[rank].
template <TensorTree T>
void reduce_scatter(T& data, const std::vector<T>& parts, ReduceOp op = ReduceOp::sum,
                    const Group& group = default_group(), Timeout timeout = {},
                    std::source_location where = std::source_location::current()) {
  const auto by_tensor =
      detail::separate_parts("reduce_scatter", data, parts, /*are_used=*/true, group, where);
  auto next = by_tensor.begin();
  detail::for_each_tensor(
      data, [&](at::Tensor& t) { reduce_scatter(t, *next++, op, group, timeout, where); });
}
template <TensorTree T>
void reduce_scatter(T& data, const std::vector<T>& parts, const CallOptions& options,
                    std::source_location where = std::source_location::current()) {
  reduce_scatter(data, parts, options.op, lockstep::detail::group_of(options, where),
                 options.timeout, where);
}
/// Returns, indexed by rank q, this rank's parts[q] with the tensors of rank q's parts[this rank].
template <TensorTree T>
std::vector<T> all_to_all(const std::vector<T>& parts, const Group& group = default_group(),
                          Timeout timeout = {},
                          std::source_location where = std::source_location::current()) {
  const auto mine = detail::map_to_tensors(parts, detail::tensors_of<T>);
  const auto by_tensor = detail::parts_by_tensor(
      "all_to_all", mine, mine.empty() ? std::vector<at::Tensor>() : mine[0], group, where);
  return detail::with_tensors(parts, detail::map_to_tensors(by_tensor, [&](const auto& of_tensor) {
                                return all_to_all(of_tensor, group, timeout, where);
                              }));
}
template <TensorTree T>
void send(const T& data, int dst, const Group& group = default_group(), Timeout timeout = {},
          std::source_location where = std::source_location::current()) {
  for (const at::Tensor& tensor : detail::tensors_of(data)) {
    send(tensor, dst, group, timeout, where);
  }
}
template <TensorTree T>
void recv(T& data, int src, const Group& group = default_group(), Timeout timeout = {},
          std::source_location where = std::source_location::current()) {
  detail::TensorsOfTrees no_parts;
  detail::separate("recv", detail::tensors_of(data), no_parts, group, where, src);
  detail::for_each_tensor(data, [&](at::Tensor& t) { recv(t, src, group, timeout, where); });
}

/// dict[key] <- reduction of every rank's dict[key], on all ranks; a tensor under two keys is
/// reduced once. If keys, element counts or op differ, every rank throws MismatchError, which names
/// the keys and the ranks, and nothing is changed.
void all_reduce_dict(std::map<std::string, at::Tensor>& dict, ReduceOp op = ReduceOp::sum,
                     const Group& group = default_group(), Timeout timeout = {},
                     std::source_location where = std::source_location::current());
inline void all_reduce_dict(std::map<std::string, at::Tensor>& dict, const CallOptions& options,
                            std::source_location where = std::source_location::current()) {
  all_reduce_dict(dict, options.op, lockstep::detail::group_of(options, where), options.timeout,
                  where);
}

/// Reduces parameters (or gradients, or any tensors) in place, in messages of up to bucket_size_mb
/// MiB; below 0: one message per type. coalesce = false: one message per tensor. A tensor that
/// comes twice, as a shared parameter does, is reduced once. Sums by default, as in mmengine: use
/// ReduceOp::mean to average.
void all_reduce_params(const std::vector<at::Tensor>& params, bool coalesce = true,
                       double bucket_size_mb = -1, ReduceOp op = ReduceOp::sum,
                       const Group& group = default_group(), Timeout timeout = {},
                       std::source_location where = std::source_location::current());
inline void all_reduce_params(const std::vector<at::Tensor>& params, bool coalesce,
                              double bucket_size_mb, const CallOptions& options,
                              std::source_location where = std::source_location::current()) {
  all_reduce_params(params, coalesce, bucket_size_mb, options.op,
                    lockstep::detail::group_of(options, where), options.timeout, where);
}

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
  detail::for_each_tensor(result, [device](at::Tensor& t) {
    if (t.defined()) t = t.to(device);
  });
  return result;
}

}  // namespace lockstep::nn
