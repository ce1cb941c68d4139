#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <ranges>
#include <source_location>
#include <span>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/types.hpp>

/// The verbs over typed spans and the default group. Each converts its types and makes a Group
/// call: group.hpp has the sizes, errors and threads. Every span may be given as any contiguous
/// range (vector, array, ...).
namespace lockstep {

using Where = std::source_location;

template <class R>
concept ArithmeticRange = std::ranges::contiguous_range<R> && std::ranges::sized_range<R> &&
    Arithmetic<std::ranges::range_value_t<R>>;

namespace detail {

template <class R>
auto as_span(R&& range) {
  return std::span<std::remove_reference_t<std::ranges::range_reference_t<R>>>(range);
}
template <class R>
auto as_const_span(const R& range) {
  return std::span<const std::ranges::range_value_t<R>>(range);
}

template <Arithmetic T>
Elements erase(std::span<T> data) {
  return {data.data(), data.size(), kDTypeOf<T>};
}
template <Arithmetic T>
ConstElements erase(std::span<const T> data) {
  return {data.data(), data.size(), kDTypeOf<T>};
}

/// Every rank's count, by rank.
std::vector<std::size_t> exchange_counts(std::size_t count, const Group& group, Deadline deadline,
                                         Where where);

/// gather to dst, or all_gather where dst is negative, cut into one vector per rank.
template <Arithmetic T>
std::vector<std::vector<T>> gather_parts(std::span<const T> data,
                                         std::span<const std::size_t> counts, const Group& group,
                                         int dst, Deadline deadline, Where where) {
  const bool wanted = dst < 0 || dst == group.rank();
  std::vector<T> flat(wanted ? std::reduce(counts.begin(), counts.end()) : 0);
  if (dst < 0) {
    group.all_gather(erase(data), erase(std::span<T>(flat)), counts, deadline, where);
  } else {
    group.gather(erase(data), erase(std::span<T>(flat)), counts, dst, deadline, where);
  }
  std::vector<std::vector<T>> parts;
  if (!wanted) return parts;
  parts.reserve(counts.size());
  auto next = flat.begin();
  for (const std::size_t count : counts) {
    parts.emplace_back(next, next + static_cast<std::ptrdiff_t>(count));
    next += static_cast<std::ptrdiff_t>(count);
  }
  return parts;
}

}  // namespace detail

inline void barrier(const Group& group = default_group(), Deadline deadline = {},
                    Where where = Where::current()) {
  group.barrier(deadline, where);
}

/// data <- reduction of every rank's data, on all ranks.
template <Arithmetic T>
void all_reduce(std::span<T> data, ReduceOp op = ReduceOp::sum,
                const Group& group = default_group(), Deadline deadline = {},
                Where where = Where::current()) {
  group.all_reduce(detail::erase(data), op, deadline, where);
}
template <ArithmeticRange R>
void all_reduce(R&& data, ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                Deadline deadline = {}, Where where = Where::current()) {
  all_reduce(detail::as_span(data), op, group, deadline, where);
}

/// The reduction of every rank's value, on all ranks.
template <Arithmetic T>
T all_reduce_value(T value, ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                   Deadline deadline = {}, Where where = Where::current()) {
  all_reduce(std::span<T>(&value, 1), op, group, deadline, where);
  return value;
}

/// data <- reduction of every rank's data, on dst; elsewhere data is left as it was.
template <Arithmetic T>
void reduce(std::span<T> data, int dst = 0, ReduceOp op = ReduceOp::sum,
            const Group& group = default_group(), Deadline deadline = {},
            Where where = Where::current()) {
  group.reduce(detail::erase(data), dst, op, deadline, where);
}
template <ArithmeticRange R>
void reduce(R&& data, int dst = 0, ReduceOp op = ReduceOp::sum,
            const Group& group = default_group(), Deadline deadline = {},
            Where where = Where::current()) {
  reduce(detail::as_span(data), dst, op, group, deadline, where);
}

/// data <- src's data.
template <Arithmetic T>
void broadcast(std::span<T> data, int src = 0, const Group& group = default_group(),
               Deadline deadline = {}, Where where = Where::current()) {
  group.broadcast(detail::erase(data), src, deadline, where);
}
template <ArithmeticRange R>
void broadcast(R&& data, int src = 0, const Group& group = default_group(), Deadline deadline = {},
               Where where = Where::current()) {
  broadcast(detail::as_span(data), src, group, deadline, where);
}

/// Every rank's data, by rank. Sizes may differ per rank.
template <Arithmetic T>
std::vector<std::vector<T>> all_gather(std::span<const T> data,
                                       const Group& group = default_group(), Deadline deadline = {},
                                       Where where = Where::current()) {
  const auto counts = detail::exchange_counts(data.size(), group, deadline, where);
  return detail::gather_parts<T>(data, counts, group, /*dst=*/-1, deadline, where);
}
template <ArithmeticRange R>
auto all_gather(const R& data, const Group& group = default_group(), Deadline deadline = {},
                Where where = Where::current()) {
  return all_gather(detail::as_const_span(data), group, deadline, where);
}

/// all <- every rank's data, in rank order: world size * data.size() elements, no allocation.
template <Arithmetic T>
void all_gather(std::span<const T> data, std::span<T> all, const Group& group = default_group(),
                Deadline deadline = {}, Where where = Where::current()) {
  group.all_gather(detail::erase(data), detail::erase(all), deadline, where);
}
template <ArithmeticRange In, ArithmeticRange Out>
void all_gather(const In& data, Out&& all, const Group& group = default_group(),
                Deadline deadline = {}, Where where = Where::current()) {
  all_gather(detail::as_const_span(data), detail::as_span(all), group, deadline, where);
}

/// Every rank's data, by rank, on dst; empty elsewhere. Sizes may differ per rank.
template <Arithmetic T>
std::vector<std::vector<T>> gather(std::span<const T> data, int dst = 0,
                                   const Group& group = default_group(), Deadline deadline = {},
                                   Where where = Where::current()) {
  const auto counts = detail::exchange_counts(data.size(), group, deadline, where);
  return detail::gather_parts<T>(data, counts, group, dst, deadline, where);
}
template <ArithmeticRange R>
auto gather(const R& data, int dst = 0, const Group& group = default_group(),
            Deadline deadline = {}, Where where = Where::current()) {
  return gather(detail::as_const_span(data), dst, group, deadline, where);
}

/// part <- this rank's of the equal parts of src's all. Elsewhere than src, all may be empty.
template <Arithmetic T>
void scatter(std::span<const T> all, std::span<T> part, int src = 0,
             const Group& group = default_group(), Deadline deadline = {},
             Where where = Where::current()) {
  group.scatter(detail::erase(all), detail::erase(part), src, deadline, where);
}
template <ArithmeticRange In, ArithmeticRange Out>
void scatter(const In& all, Out&& part, int src = 0, const Group& group = default_group(),
             Deadline deadline = {}, Where where = Where::current()) {
  scatter(detail::as_const_span(all), detail::as_span(part), src, group, deadline, where);
}

/// part <- reduction of every rank's chunk of all that belongs to this rank.
template <Arithmetic T>
void reduce_scatter(std::span<const T> all, std::span<T> part, ReduceOp op = ReduceOp::sum,
                    const Group& group = default_group(), Deadline deadline = {},
                    Where where = Where::current()) {
  group.reduce_scatter(detail::erase(all), detail::erase(part), op, deadline, where);
}
template <ArithmeticRange In, ArithmeticRange Out>
void reduce_scatter(const In& all, Out&& part, ReduceOp op = ReduceOp::sum,
                    const Group& group = default_group(), Deadline deadline = {},
                    Where where = Where::current()) {
  reduce_scatter(detail::as_const_span(all), detail::as_span(part), op, group, deadline, where);
}

/// Part q of received <- this rank's part of rank q's sent.
template <Arithmetic T>
void all_to_all(std::span<const T> sent, std::span<T> received,
                const Group& group = default_group(), Deadline deadline = {},
                Where where = Where::current()) {
  group.all_to_all(detail::erase(sent), detail::erase(received), deadline, where);
}
template <ArithmeticRange In, ArithmeticRange Out>
void all_to_all(const In& sent, Out&& received, const Group& group = default_group(),
                Deadline deadline = {}, Where where = Where::current()) {
  all_to_all(detail::as_const_span(sent), detail::as_span(received), group, deadline, where);
}

template <Arithmetic T>
void send(std::span<const T> data, int dst, const Group& group = default_group(),
          Deadline deadline = {}, Where where = Where::current()) {
  group.send(detail::erase(data), dst, deadline, where);
}
template <ArithmeticRange R>
void send(const R& data, int dst, const Group& group = default_group(), Deadline deadline = {},
          Where where = Where::current()) {
  send(detail::as_const_span(data), dst, group, deadline, where);
}

template <Arithmetic T>
void recv(std::span<T> data, int src, const Group& group = default_group(), Deadline deadline = {},
          Where where = Where::current()) {
  group.recv(detail::erase(data), src, deadline, where);
}
template <ArithmeticRange R>
void recv(R&& data, int src, const Group& group = default_group(), Deadline deadline = {},
          Where where = Where::current()) {
  recv(detail::as_span(data), src, group, deadline, where);
}

/// One random 64-bit number, the same on every rank: drawn on rank 0 from the system's source.
/// No generator of the caller's is touched.
std::uint64_t sync_random_seed(const Group& group = default_group(), Deadline deadline = {},
                               Where where = Where::current());

}  // namespace lockstep
