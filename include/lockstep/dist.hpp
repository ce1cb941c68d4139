#pragma once

#include <cstdint>
#include <source_location>
#include <utility>

#include <lockstep/detail/arguments.hpp>
#include <lockstep/group.hpp>
#include <lockstep/types.hpp>
#include <lockstep/world.hpp>

/// @file
/// The typed operations of Group as functions, over the default group if none is given: see
/// group.hpp for data, sizes, errors and threads. Where an operation has op, group and timeout,
/// they may also be given by name, as CallOptions:
///
///     all_reduce(values, ReduceOp::max, group, 5s);
///     all_reduce(values, {.op = ReduceOp::max, .timeout = 5s});
///     group.all_reduce(values, ReduceOp::max, 5s);
namespace lockstep {

/// The caller's line: the last argument of every function that communicates, not to be passed.
using Where = std::source_location;

/// Returns when every rank has called it.
inline void barrier(const Group& group = default_group(), Timeout timeout = {},
                    Where where = Where::current()) {
  group.barrier(timeout, where);
}
[[nodiscard]] inline Work barrier_async(const Group& group = default_group(), Timeout timeout = {},
                                        Where where = Where::current()) {
  return group.barrier_async(timeout, where);
}

/// data <- reduction of every rank's data, on all ranks.
template <class R>
void all_reduce(R&& data, ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                Timeout timeout = {}, Where where = Where::current()) {
  group.all_reduce(std::forward<R>(data), op, timeout, where);
}
template <class R>
void all_reduce(R&& data, const CallOptions& options, Where where = Where::current()) {
  detail::group_of(options, where)
      .all_reduce(std::forward<R>(data), options.op, options.timeout, where);
}
template <class R, detail::NoReduceOp Second = detail::AnyOptions, class... Rest>
void all_reduce(R&&, const Second&, Rest&&...) {
  detail::explain_op<R, Second>();
}
/// The asynchronous form: data belongs to the operation until Work::wait has returned.
template <class R>
requires(!detail::kHasOwnOperations<R>) [[nodiscard]] Work
    all_reduce_async(R&& data, ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                     Timeout timeout = {}, Where where = Where::current()) {
  return group.all_reduce_async(std::forward<R>(data), op, timeout, where);
}
template <class R>
requires(!detail::kHasOwnOperations<R>) [[nodiscard]] Work
    all_reduce_async(R&& data, const CallOptions& options, Where where = Where::current()) {
  return detail::group_of(options, where)
      .all_reduce_async(std::forward<R>(data), options.op, options.timeout, where);
}
template <class R, detail::NoReduceOp Second = detail::AnyOptions, class... Rest>
requires(!detail::kHasOwnOperations<R>) Work all_reduce_async(R&&, const Second&, Rest&&...) {
  detail::explain_op<R, Second>();
  return {};
}

/// The reduction of every rank's value, on all ranks.
template <class T>
T all_reduce_value(T value, ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                   Timeout timeout = {}, Where where = Where::current()) {
  return group.all_reduce_value(value, op, timeout, where);
}
template <class T>
T all_reduce_value(T value, const CallOptions& options, Where where = Where::current()) {
  return detail::group_of(options, where)
      .all_reduce_value(value, options.op, options.timeout, where);
}
template <class T, detail::NoReduceOp Second = detail::AnyOptions, class... Rest>
T all_reduce_value(T value, const Second&, Rest&&...) {
  detail::explain_op<T, Second>();
  return value;
}

/// On dst: data <- reduction of every rank's data. On other ranks data is unchanged.
template <class R>
void reduce(R&& data, int dst = 0, ReduceOp op = ReduceOp::sum,
            const Group& group = default_group(), Timeout timeout = {},
            Where where = Where::current()) {
  group.reduce(std::forward<R>(data), dst, op, timeout, where);
}
template <class R>
requires(!detail::kHasOwnOperations<R>) [[nodiscard]] Work
    reduce_async(R&& data, int dst = 0, ReduceOp op = ReduceOp::sum,
                 const Group& group = default_group(), Timeout timeout = {},
                 Where where = Where::current()) {
  return group.reduce_async(std::forward<R>(data), dst, op, timeout, where);
}
template <class R>
void reduce(R&& data, int dst, const CallOptions& options, Where where = Where::current()) {
  detail::group_of(options, where)
      .reduce(std::forward<R>(data), dst, options.op, options.timeout, where);
}
template <class R>
requires(!detail::kHasOwnOperations<R>) [[nodiscard]] Work
    reduce_async(R&& data, int dst, const CallOptions& options, Where where = Where::current()) {
  return detail::group_of(options, where)
      .reduce_async(std::forward<R>(data), dst, options.op, options.timeout, where);
}
template <class R, detail::NoReduceOp Third = detail::AnyOptions, class... Rest>
void reduce(R&&, int, const Third&, Rest&&...) {
  detail::explain_op<R, Third>();
}

/// data <- src's data.
template <class R>
void broadcast(R&& data, int src = 0, const Group& group = default_group(), Timeout timeout = {},
               Where where = Where::current()) {
  group.broadcast(std::forward<R>(data), src, timeout, where);
}
template <class R>
requires(!detail::kHasOwnOperations<R>) [[nodiscard]] Work
    broadcast_async(R&& data, int src = 0, const Group& group = default_group(),
                    Timeout timeout = {}, Where where = Where::current()) {
  return group.broadcast_async(std::forward<R>(data), src, timeout, where);
}

/// Returns every rank's data, indexed by rank: as vectors, or as strings if data is a std::string.
/// Sizes may differ per rank.
template <class R>
detail::Parts<R> all_gather(const R& data, const Group& group = default_group(),
                            Timeout timeout = {}, Where where = Where::current()) {
  return group.all_gather(data, timeout, where);
}

/// all <- every rank's data, in rank order: group size * data.size() elements, no allocation.
template <class In, class Out>
requires detail::TwoRanges<In, Out>
void all_gather(const In& data, Out&& all, const Group& group = default_group(),
                Timeout timeout = {}, Where where = Where::current()) {
  group.all_gather(data, std::forward<Out>(all), timeout, where);
}
template <class In, class Out>
requires detail::TwoRanges<In, Out>
[[nodiscard]] Work all_gather_async(In&& data, Out&& all, const Group& group = default_group(),
                                    Timeout timeout = {}, Where where = Where::current()) {
  return group.all_gather_async(std::forward<In>(data), std::forward<Out>(all), timeout, where);
}

/// The same on dst; empty elsewhere.
template <class R>
detail::Parts<R> gather(const R& data, int dst = 0, const Group& group = default_group(),
                        Timeout timeout = {}, Where where = Where::current()) {
  return group.gather(data, dst, timeout, where);
}

/// part <- this rank's chunk of src's all (equal chunks). On the other ranks, all may be empty.
template <class In, class Out>
requires detail::TwoRanges<In, Out>
void scatter(const In& all, Out&& part, int src = 0, const Group& group = default_group(),
             Timeout timeout = {}, Where where = Where::current()) {
  group.scatter(all, std::forward<Out>(part), src, timeout, where);
}
template <class In, class Out>
requires detail::TwoRanges<In, Out>
[[nodiscard]] Work scatter_async(In&& all, Out&& part, int src = 0,
                                 const Group& group = default_group(), Timeout timeout = {},
                                 Where where = Where::current()) {
  return group.scatter_async(std::forward<In>(all), std::forward<Out>(part), src, timeout, where);
}

/// part <- reduction over the ranks of chunk rank() of all: group size equal chunks, rank-major.
template <class In, class Out>
requires detail::TwoRanges<In, Out>
void reduce_scatter(const In& all, Out&& part, ReduceOp op = ReduceOp::sum,
                    const Group& group = default_group(), Timeout timeout = {},
                    Where where = Where::current()) {
  group.reduce_scatter(all, std::forward<Out>(part), op, timeout, where);
}
template <class In, class Out>
requires detail::TwoRanges<In, Out>
[[nodiscard]] Work reduce_scatter_async(In&& all, Out&& part, ReduceOp op = ReduceOp::sum,
                                        const Group& group = default_group(), Timeout timeout = {},
                                        Where where = Where::current()) {
  return group.reduce_scatter_async(std::forward<In>(all), std::forward<Out>(part), op, timeout,
                                    where);
}
template <class In, class Out>
requires detail::TwoRanges<In, Out>
void reduce_scatter(const In& all, Out&& part, const CallOptions& options,
                    Where where = Where::current()) {
  detail::group_of(options, where)
      .reduce_scatter(all, std::forward<Out>(part), options.op, options.timeout, where);
}
template <class In, class Out>
requires detail::TwoRanges<In, Out>
[[nodiscard]] Work reduce_scatter_async(In&& all, Out&& part, const CallOptions& options,
                                        Where where = Where::current()) {
  return detail::group_of(options, where)
      .reduce_scatter_async(std::forward<In>(all), std::forward<Out>(part), options.op,
                            options.timeout, where);
}

/// Chunk q of received <- chunk rank() of rank q's sent.
template <class In, class Out>
requires detail::TwoRanges<In, Out>
void all_to_all(const In& sent, Out&& received, const Group& group = default_group(),
                Timeout timeout = {}, Where where = Where::current()) {
  group.all_to_all(sent, std::forward<Out>(received), timeout, where);
}
template <class In, class Out>
requires detail::TwoRanges<In, Out>
[[nodiscard]] Work all_to_all_async(In&& sent, Out&& received, const Group& group = default_group(),
                                    Timeout timeout = {}, Where where = Where::current()) {
  return group.all_to_all_async(std::forward<In>(sent), std::forward<Out>(received), timeout,
                                where);
}

/// Sends data to dst, another rank, which calls recv with the same count and type.
template <class R>
void send(const R& data, int dst, const Group& group = default_group(), Timeout timeout = {},
          Where where = Where::current()) {
  group.send(data, dst, timeout, where);
}
template <class R>
requires(!detail::kHasOwnOperations<R>) [[nodiscard]] Work
    send_async(R&& data, int dst, const Group& group = default_group(), Timeout timeout = {},
               Where where = Where::current()) {
  return group.send_async(std::forward<R>(data), dst, timeout, where);
}

/// data <- the next message from src, another rank, of the same count and type.
template <class R>
void recv(R&& data, int src, const Group& group = default_group(), Timeout timeout = {},
          Where where = Where::current()) {
  group.recv(std::forward<R>(data), src, timeout, where);
}
template <class R>
requires(!detail::kHasOwnOperations<R>) [[nodiscard]] Work
    recv_async(R&& data, int src, const Group& group = default_group(), Timeout timeout = {},
               Where where = Where::current()) {
  return group.recv_async(std::forward<R>(data), src, timeout, where);
}

/// Returns one random 64-bit number, the same on every rank, that rank 0 draws from the system's
/// random source. No generator of the caller is used.
std::uint64_t sync_random_seed(const Group& group = default_group(), Timeout timeout = {},
                               Where where = Where::current());

}  // namespace lockstep
