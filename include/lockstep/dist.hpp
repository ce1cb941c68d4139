#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <source_location>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/detail/arguments.hpp>
#include <lockstep/detail/collective.hpp>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/types.hpp>

/// @file
/// The operations over typed data and the default group. Each converts its types and makes one or
/// more Group calls: see group.hpp for sizes, errors and threads. Data is an ArithmeticRange: any
/// contiguous range of numbers (vector, array, span, ...). Output must be neither const nor a
/// temporary that would take the result with it. The most likely mistakes fail to compile with a
/// message that says what to do.
namespace lockstep {

/// The caller's line: the last argument of every function that communicates, not to be passed.
using Where = std::source_location;

namespace detail {

template <Arithmetic T>
Elements erase(std::span<T> data) {
  return {data.data(), data.size(), kDTypeOf<T>};
}
template <Arithmetic T>
ConstElements erase(std::span<const T> data) {
  return {data.data(), data.size(), kDTypeOf<T>};
}

/// Every rank's count, by rank.
std::vector<std::size_t> exchange_counts(std::size_t count, const Group& group, Timeout timeout,
                                         Where where);

/// gather to dst, or all_gather if dst is negative, of data whose sizes differ: one Part per
/// rank.
template <class Part>
std::vector<Part> gather_parts(const ConstElements& data, const Group& group, int dst,
                               Timeout timeout, Where where) {
  using T = typename Part::value_type;
  const bool wanted = dst < 0 || dst == group.rank();
  std::vector<std::size_t> counts;
  std::unique_ptr<T[]> flat;  // a vector<bool> has no elements to point to
  Collective(name_of(dst < 0 ? Op::all_gather : Op::gather), group, where).run([&] {
    const TimeLimit limit(timeout);
    counts = exchange_counts(data.count, group, limit.timeout(), where);
    const std::size_t n_all = wanted ? std::reduce(counts.begin(), counts.end()) : 0;
    flat = std::make_unique<T[]>(n_all);
    const std::span<T> all(flat.get(), n_all);
    if (dst < 0) {
      group.all_gather(data, erase(all), counts, limit.timeout(), where);
    } else {
      group.gather(data, erase(all), counts, dst, limit.timeout(), where);
    }
  });
  std::vector<Part> parts;
  if (!wanted) return parts;
  parts.reserve(counts.size());
  const T* next = flat.get();
  for (const std::size_t count : counts) {
    parts.emplace_back(next, next + count);
    next += count;
  }
  return parts;
}

/// Checks and erases the data of a call. Always inlined: if an address is returned in a struct in
/// memory, gcc 12 assumes that it does not escape and keeps the caller's variable in a register
/// across the collective (at -O1; -fno-ipa-modref also prevents it).
template <Use kUse = Use::write, class R>
[[gnu::always_inline]] inline Elements written(R&& range) {
  check_data<R, kUse>();
  if constexpr (ArithmeticRange<std::remove_cvref_t<R>>) {
    if constexpr (!std::is_const_v<ElementOf<R>>) return erase(std::span<ElementOf<R>>(range));
  }
  return {};
}
template <Use kUse = Use::read, class R>
[[gnu::always_inline]] inline ConstElements read(R&& range) {
  check_data<R, kUse>();
  if constexpr (ArithmeticRange<std::remove_cvref_t<R>>) {
    return erase(std::span<const std::remove_const_t<ElementOf<R>>>(range));
  } else {
    return {};
  }
}
template <class R>
[[gnu::always_inline]] inline Elements written_later(R&& range) {
  return written<Use::write_later>(std::forward<R>(range));
}
template <class R>
[[gnu::always_inline]] inline ConstElements read_later(R&& range) {
  return read<Use::read_later>(std::forward<R>(range));
}

/// The container for another rank's data of a range of this type; for any other type check_data
/// reports the error.
template <class R>
struct PartOf {
  using Type = std::vector<char>;
};
template <ArithmeticRange R>
struct PartOf<R> {
  using Type = std::vector<std::ranges::range_value_t<R>>;
};
template <>
struct PartOf<std::string> {
  using Type = std::string;
};
template <class R>
using Parts = std::vector<typename PartOf<R>::Type>;

}  // namespace detail

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
  group.all_reduce(detail::written(std::forward<R>(data)), op, timeout, where);
}
template <class R, detail::NoReduceOp Second, class... Rest>
void all_reduce(R&&, Second&&, Rest&&...) {
  detail::explain_second<R, Second>();
}
/// The asynchronous form: data belongs to the operation until Work::wait has returned.
template <class R>
requires(!detail::kHasOwnOperations<R>) [[nodiscard]] Work
    all_reduce_async(R&& data, ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                     Timeout timeout = {}, Where where = Where::current()) {
  return group.all_reduce_async(detail::written_later(std::forward<R>(data)), op, timeout, where);
}
template <class R, detail::NoReduceOp Second, class... Rest>
Work all_reduce_async(R&&, Second&&, Rest&&...) {
  detail::explain_second<R, Second>();
  return {};
}

/// The reduction of every rank's value, on all ranks.
template <class T>
T all_reduce_value(T value, ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                   Timeout timeout = {}, Where where = Where::current()) {
  if constexpr (Arithmetic<T>) {
    group.all_reduce(detail::erase(std::span<T>(&value, 1)), op, timeout, where);
  } else {
    static_assert(
        detail::kNever<T>,
        "lockstep: a value is a bool, an integer of 8 to 64 bits, Float16, BFloat16, float "
        "or double: static_cast to one of them; for several use all_reduce, for tensors "
        "lockstep::nn::all_reduce");
  }
  return value;
}
template <class T, detail::NoReduceOp Second, class... Rest>
T all_reduce_value(T value, Second&&, Rest&&...) {
  detail::explain_second<T, Second>();
  return value;
}

/// On dst: data <- reduction of every rank's data. On other ranks data is unchanged.
template <class R>
void reduce(R&& data, int dst = 0, ReduceOp op = ReduceOp::sum,
            const Group& group = default_group(), Timeout timeout = {},
            Where where = Where::current()) {
  group.reduce(detail::written(std::forward<R>(data)), dst, op, timeout, where);
}
template <class R>
requires(!detail::kHasOwnOperations<R>) [[nodiscard]] Work
    reduce_async(R&& data, int dst = 0, ReduceOp op = ReduceOp::sum,
                 const Group& group = default_group(), Timeout timeout = {},
                 Where where = Where::current()) {
  return group.reduce_async(detail::written_later(std::forward<R>(data)), dst, op, timeout, where);
}

/// data <- src's data.
template <class R>
void broadcast(R&& data, int src = 0, const Group& group = default_group(), Timeout timeout = {},
               Where where = Where::current()) {
  group.broadcast(detail::written(std::forward<R>(data)), src, timeout, where);
}
template <class R>
requires(!detail::kHasOwnOperations<R>) [[nodiscard]] Work
    broadcast_async(R&& data, int src = 0, const Group& group = default_group(),
                    Timeout timeout = {}, Where where = Where::current()) {
  return group.broadcast_async(detail::written_later(std::forward<R>(data)), src, timeout, where);
}

/// Returns every rank's data, indexed by rank: as vectors, or as strings if data is a std::string.
/// Sizes may differ per rank.
template <class R>
detail::Parts<R> all_gather(const R& data, const Group& group = default_group(),
                            Timeout timeout = {}, Where where = Where::current()) {
  return detail::gather_parts<typename detail::PartOf<R>::Type>(detail::read(data), group,
                                                                /*dst=*/-1, timeout, where);
}

/// all <- every rank's data, in rank order: group size * data.size() elements, no allocation.
template <class In, class Out>
requires detail::TwoRanges<In, Out>
void all_gather(const In& data, Out&& all, const Group& group = default_group(),
                Timeout timeout = {}, Where where = Where::current()) {
  group.all_gather(detail::read(data), detail::written(std::forward<Out>(all)), timeout, where);
}
template <class In, class Out>
requires detail::TwoRanges<In, Out>
[[nodiscard]] Work all_gather_async(In&& data, Out&& all, const Group& group = default_group(),
                                    Timeout timeout = {}, Where where = Where::current()) {
  return group.all_gather_async(detail::read_later(std::forward<In>(data)),
                                detail::written_later(std::forward<Out>(all)), timeout, where);
}

/// The same on dst; empty elsewhere.
template <class R>
detail::Parts<R> gather(const R& data, int dst = 0, const Group& group = default_group(),
                        Timeout timeout = {}, Where where = Where::current()) {
  return detail::gather_parts<typename detail::PartOf<R>::Type>(detail::read(data), group, dst,
                                                                timeout, where);
}

/// part <- this rank's chunk of src's all (equal chunks). On the other ranks, all may be empty.
template <class In, class Out>
requires detail::TwoRanges<In, Out>
void scatter(const In& all, Out&& part, int src = 0, const Group& group = default_group(),
             Timeout timeout = {}, Where where = Where::current()) {
  group.scatter(detail::read(all), detail::written(std::forward<Out>(part)), src, timeout, where);
}
template <class In, class Out>
requires detail::TwoRanges<In, Out>
[[nodiscard]] Work scatter_async(In&& all, Out&& part, int src = 0,
                                 const Group& group = default_group(), Timeout timeout = {},
                                 Where where = Where::current()) {
  return group.scatter_async(detail::read_later(std::forward<In>(all)),
                             detail::written_later(std::forward<Out>(part)), src, timeout, where);
}

/// part <- reduction over the ranks of chunk rank() of all: group size equal chunks, rank-major.
template <class In, class Out>
requires detail::TwoRanges<In, Out>
void reduce_scatter(const In& all, Out&& part, ReduceOp op = ReduceOp::sum,
                    const Group& group = default_group(), Timeout timeout = {},
                    Where where = Where::current()) {
  group.reduce_scatter(detail::read(all), detail::written(std::forward<Out>(part)), op, timeout,
                       where);
}
template <class In, class Out>
requires detail::TwoRanges<In, Out>
[[nodiscard]] Work reduce_scatter_async(In&& all, Out&& part, ReduceOp op = ReduceOp::sum,
                                        const Group& group = default_group(), Timeout timeout = {},
                                        Where where = Where::current()) {
  return group.reduce_scatter_async(detail::read_later(std::forward<In>(all)),
                                    detail::written_later(std::forward<Out>(part)), op, timeout,
                                    where);
}

/// Chunk q of received <- chunk rank() of rank q's sent.
template <class In, class Out>
requires detail::TwoRanges<In, Out>
void all_to_all(const In& sent, Out&& received, const Group& group = default_group(),
                Timeout timeout = {}, Where where = Where::current()) {
  group.all_to_all(detail::read(sent), detail::written(std::forward<Out>(received)), timeout,
                   where);
}
template <class In, class Out>
requires detail::TwoRanges<In, Out>
[[nodiscard]] Work all_to_all_async(In&& sent, Out&& received, const Group& group = default_group(),
                                    Timeout timeout = {}, Where where = Where::current()) {
  return group.all_to_all_async(detail::read_later(std::forward<In>(sent)),
                                detail::written_later(std::forward<Out>(received)), timeout, where);
}

/// Sends data to dst, another rank, which calls recv with the same count and type.
template <class R>
void send(const R& data, int dst, const Group& group = default_group(), Timeout timeout = {},
          Where where = Where::current()) {
  group.send(detail::read(data), dst, timeout, where);
}
template <class R>
requires(!detail::kHasOwnOperations<R>) [[nodiscard]] Work
    send_async(R&& data, int dst, const Group& group = default_group(), Timeout timeout = {},
               Where where = Where::current()) {
  return group.send_async(detail::read_later(std::forward<R>(data)), dst, timeout, where);
}

/// data <- the next message from src, another rank, of the same count and type.
template <class R>
void recv(R&& data, int src, const Group& group = default_group(), Timeout timeout = {},
          Where where = Where::current()) {
  group.recv(detail::written(std::forward<R>(data)), src, timeout, where);
}
template <class R>
requires(!detail::kHasOwnOperations<R>) [[nodiscard]] Work
    recv_async(R&& data, int src, const Group& group = default_group(), Timeout timeout = {},
               Where where = Where::current()) {
  return group.recv_async(detail::written_later(std::forward<R>(data)), src, timeout, where);
}

/// Returns one random 64-bit number, the same on every rank, that rank 0 draws from the system's
/// random source. No generator of the caller is used.
std::uint64_t sync_random_seed(const Group& group = default_group(), Timeout timeout = {},
                               Where where = Where::current());

}  // namespace lockstep
