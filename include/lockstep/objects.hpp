#pragma once

#include <algorithm>
#include <cereal/types/array.hpp>
#include <cereal/types/chrono.hpp>
#include <cereal/types/complex.hpp>
#include <cereal/types/deque.hpp>
#include <cereal/types/list.hpp>
#include <cereal/types/map.hpp>
#include <cereal/types/optional.hpp>
#include <cereal/types/set.hpp>
#include <cereal/types/string.hpp>
#include <cereal/types/tuple.hpp>
#include <cereal/types/unordered_map.hpp>
#include <cereal/types/unordered_set.hpp>
#include <cereal/types/utility.hpp>
#include <cereal/types/variant.hpp>
#include <cereal/types/vector.hpp>
#include <concepts>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <ranges>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include <lockstep/detail/codec.hpp>
#include <lockstep/dist.hpp>
#include <lockstep/group.hpp>
#include <lockstep/types.hpp>
#include <lockstep/world.hpp>

/// @file
/// Collectives over objects. An object is of any type that cereal can serialise (standard
/// containers, optional, variant, tuple, types with a `serialize` member; for other types include
/// cereal's header), or a nlohmann::json. Its size may differ per rank, from 0 bytes to available
/// memory. src and dst are ranks of the group.
///
/// All are collective over the group. Errors, in addition to those of every collective (group.hpp):
/// - MismatchError on every rank, if the ranks differ in function, type, src or dst, length or
/// keys:
///   a header with these is exchanged first, and nothing is changed. On the receiving ranks, if a
///   message is damaged or cannot be decoded as the type. In both cases the group stays usable,
///   unlike after a MismatchError of an operation of group.hpp.
/// - What a rank throws before it sends: UsageError if src or dst is not a rank, or if an object is
///   nested more than 2000 levels deep; std::bad_alloc; an exception of the object's serialize
///   function, unchanged. The other ranks throw PeerFailed with its text, and the group stays
///   usable.
///
/// An exception between two messages (no memory for what the peers announce) ends the group with
/// PeerFailed.
/// A timeout applies to the whole call; if none is given, the group's timeout applies to each of
/// the collectives that the call consists of (usually two).
/// Threads: as for the Group.
namespace lockstep {

/// Types that can be sent as objects: default-constructible, movable, and known to cereal.
template <class T>
concept Serializable = std::default_initializable<T> && std::movable<T> &&
    cereal::traits::is_output_serializable<T, detail::Writer>::value &&
    cereal::traits::is_input_serializable<T, detail::Reader>::value;

namespace detail {

/// Compiles if T is an object; otherwise fails with a message that says what is wrong.
template <class T>
consteval void check_object() {
  if constexpr (TensorLike<T> && !Serializable<T>) {  // <lockstep/nn.hpp> makes them objects
    static_assert(kNever<T>,
                  "lockstep: tensors are sent by the functions of lockstep::nn: include "
                  "<lockstep/nn.hpp> and call all_gather, gather or broadcast there");
  } else if constexpr (std::is_array_v<T> || std::is_pointer_v<T>) {
    static_assert(kNever<T>,
                  "lockstep: an array, a string literal or a pointer is not an object: pass a "
                  "std::string, std::array or std::vector, or what it points to");
  } else {
    static_assert(Serializable<T>,
                  "lockstep: the type is not serialisable: give it a default constructor, moves "
                  "and a member template <class A> void serialize(A& archive) { archive(member, "
                  "...); }, or include cereal's header of the standard type");
  }
}

/// The return type for array arguments, so that check_object's error is the only one.
template <class T>
using ObjectsOfArrays =
    std::vector<std::conditional_t<std::same_as<T, char>, std::string, std::vector<T>>>;

/// One call of a function of this header, type-erased.
struct ObjectCall {
  ObjectOp op;
  const std::type_info& type;
  const Group& group;
  TimeLimit limit;  ///< of all its collectives together
  Where where;
  int root = -1;
  std::uint64_t agreed = 0;
  std::uint64_t n_items = 1;
  /// Why this rank cannot do its part. The ranks exchange this in their headers, so that the call
  /// fails on every rank and the group stays usable.
  std::exception_ptr refusal{};
};

/// A call with objects of type T.
template <class T>
ObjectCall object_call(ObjectOp op, const Group& group, Timeout timeout, Where where, int root = -1,
                       std::size_t agreed = 0, std::size_t n_items = 1) {
  return {.op = op,
          .type = typeid(T),
          .group = group,
          .limit = TimeLimit(timeout),
          .where = where,
          .root = root,
          .agreed = agreed,
          .n_items = n_items};
}

/// Runs f, which prepares this rank's message; its exception is the call's refusal.
template <class F>
void prepare(ObjectCall& call, F f) {
  try {
    f();
  } catch (...) {
    call.refusal = std::current_exception();
  }
}

/// One message per rank, in one contiguous buffer.
struct Messages {
  Bytes bytes;
  std::vector<std::span<const std::byte>> of_rank;
};

/// Exchanges headers and checks them on every rank; then sends every rank's bytes to all ranks, or
/// to the root if the call has one. Frees `mine` as soon as it has been sent.
Messages gather_messages(const ObjectCall& call, Bytes mine);
/// Returns the root's bytes on every other rank, and none on the root.
Bytes broadcast_message(const ObjectCall& call, const Bytes& mine);
[[noreturn]] void throw_undecodable(const ObjectCall& call, int sender,
                                    const std::exception& reason);

template <class F>
void decode_from(const ObjectCall& call, int sender, F decode_it) {
  try {
    decode_it();
  } catch (const std::exception& error) {
    throw_undecodable(call, sender, error);
  }
}

template <class T>
std::vector<T> decode_all(const ObjectCall& call, const Messages& messages) {
  std::vector<T> objects;
  objects.reserve(messages.of_rank.size());
  for (std::size_t r = 0; r < messages.of_rank.size(); ++r) {
    T object;
    decode_from(call, static_cast<int>(r), [&] { decode(messages.of_rank[r], object); });
    objects.push_back(std::move(object));
  }
  return objects;
}

/// This rank's part of the results, and all results, type-erased.
struct Results {
  std::size_t n_mine;
  /// Appends one message of about kBatchBytes with the items from `first` on, at least one and at
  /// most up to `last` (exclusive). Returns the index of the next item.
  std::function<std::size_t(std::size_t first, std::size_t last, Bytes& out)> encode;
  std::function<void(std::size_t n_results)> make;
  /// Copies this rank's item `item` to its place in the results.
  std::function<void(std::size_t item, std::size_t place)> keep;
  /// Decodes a message of items into these places.
  std::function<void(std::span<const std::byte>, std::span<const std::size_t> places)> decode;
};
inline constexpr std::size_t kBatchBytes = std::size_t{4} << 20;

void collect_results(const ObjectCall& call, const std::filesystem::path* tmpdir,
                     const Results& results);

template <class T>
std::optional<std::vector<T>> collect_results(const std::vector<T>& part, std::size_t size,
                                              const std::filesystem::path* tmpdir,
                                              const Group& group, Timeout timeout, Where where) {
  std::vector<T> all;
  const Results results{
      .n_mine = part.size(),
      .encode =
          [&part](std::size_t first, std::size_t last, Bytes& out) {
            Writer writer(out);
            do {
              writer(static_cast<const T&>(part[first++]));
            } while (first < last && out.size() < kBatchBytes);
            writer.finish();
            return first;
          },
      .make = [&all](std::size_t n_results) { all.resize(n_results); },
      .keep = [&](std::size_t item, std::size_t place) { all[place] = part[item]; },
      .decode =
          [&all](std::span<const std::byte> bytes, std::span<const std::size_t> places) {
            Reader reader(bytes);
            for (const std::size_t place : places) {
              T item;
              reader(item);
              all[place] = std::move(item);
            }
            reader.finish();
          },
  };
  collect_results(object_call<T>(ObjectOp::collect_results, group, timeout, where, /*root=*/0,
                                 /*agreed=*/size, part.size()),
                  tmpdir, results);
  if (group.rank() != 0) return std::nullopt;
  return all;
}

/// One entry of a dict, type-erased.
struct DictEntry {
  std::string_view key;
  std::size_t count;
};

/// Throws MismatchError on every rank if the entries or the reduction differ.
void check_dicts(const ObjectCall& call, std::span<const DictEntry> entries, ReduceOp op);

template <class V>
struct DictValue;
template <Arithmetic V>
struct DictValue<V> {
  using Element = V;
  static std::span<V> elements(V& value) { return {&value, 1}; }
};
template <Arithmetic E>
requires(!std::same_as<E, bool>) struct DictValue<std::vector<E>> {
  using Element = E;
  static std::span<E> elements(std::vector<E>& value) { return value; }
};

template <class D>
concept Dict = std::same_as<typename D::key_type, std::string> && requires {
  typename DictValue<typename D::mapped_type>::Element;
};

}  // namespace detail

/// Returns every rank's object, indexed by rank, on every rank.
template <class T>
std::vector<T> all_gather_object(const T& object, const Group& group = default_group(),
                                 Timeout timeout = {}, Where where = Where::current()) {
  detail::check_object<T>();
  auto call = detail::object_call<T>(detail::ObjectOp::all_gather_object, group, timeout, where);
  detail::Bytes mine;
  detail::prepare(call, [&] { detail::encode(mine, object); });
  return detail::decode_all<T>(call, detail::gather_messages(call, std::move(mine)));
}
template <class T, std::size_t N, class... Rest>
detail::ObjectsOfArrays<T> all_gather_object(const T (&)[N], Rest&&...) {
  detail::check_object<T[N]>();
  return {};
}

/// Returns every rank's object, indexed by rank, on dst; nullopt elsewhere, without using memory.
template <class T>
std::optional<std::vector<T>> gather_object(const T& object, int dst = 0,
                                            const Group& group = default_group(),
                                            Timeout timeout = {}, Where where = Where::current()) {
  detail::check_object<T>();
  auto call = detail::object_call<T>(detail::ObjectOp::gather_object, group, timeout, where, dst);
  detail::Bytes mine;
  detail::prepare(call, [&] { detail::encode(mine, object); });
  const detail::Messages messages = detail::gather_messages(call, std::move(mine));
  if (group.rank() != dst) return std::nullopt;
  return detail::decode_all<T>(call, messages);
}
template <class T, std::size_t N, class... Rest>
std::optional<detail::ObjectsOfArrays<T>> gather_object(const T (&)[N], Rest&&...) {
  detail::check_object<T[N]>();
  return {};
}

/// object <- src's object. If this throws, object is unchanged.
template <class T>
requires(!std::is_const_v<T>) void broadcast_object(T& object, int src = 0,
                                                    const Group& group = default_group(),
                                                    Timeout timeout = {},
                                                    Where where = Where::current()) {
  detail::check_object<T>();
  auto call =
      detail::object_call<T>(detail::ObjectOp::broadcast_object, group, timeout, where, src);
  detail::Bytes mine;
  detail::prepare(call, [&] {
    if (group.rank() == src) detail::encode(mine, object);
  });
  const detail::Bytes bytes = detail::broadcast_message(call, mine);
  if (group.rank() == src) return;
  T received;
  detail::decode_from(call, src, [&] { detail::decode(bytes.span(), received); });
  object = std::move(received);
}

/// objects <- src's objects, in place. The lists must have the same length on all ranks; otherwise
/// every rank throws MismatchError with the lengths.
template <class T>
void broadcast_object_list(std::vector<T>& objects, int src = 0,
                           const Group& group = default_group(), Timeout timeout = {},
                           Where where = Where::current()) {
  detail::check_object<T>();
  auto call = detail::object_call<T>(detail::ObjectOp::broadcast_object_list, group, timeout, where,
                                     src, /*agreed=*/objects.size(), objects.size());
  detail::Bytes mine;
  detail::prepare(call, [&] {
    if (group.rank() == src) detail::encode(mine, objects);
  });
  const detail::Bytes bytes = detail::broadcast_message(call, mine);
  if (group.rank() == src) return;
  std::vector<T> received;
  detail::decode_from(call, src, [&] {
    detail::decode(bytes.span(), received);
    if (received.size() != objects.size()) throw detail::DecodeError("its list has another length");
  });
  std::move(received.begin(), received.end(), objects.begin());
}

/// Returns, on rank 0, the ranks' parts interleaved: item 0 of rank 0, of rank 1, ..., item 1 of
/// rank 0, ...; ranks that have no more items are skipped. Truncated to `size` items (the same size
/// on all ranks); fewer if the parts have fewer in total. Empty items are kept. nullopt on the
/// other ranks.
/// Memory on rank 0: the results and one batch (4 MiB, or one item if that is larger).
/// If the serialize function of an item throws on another rank, rank 0 throws PeerFailed with its
/// text, and the group stays usable.
template <class T>
std::optional<std::vector<T>> collect_results(const std::vector<T>& part, std::size_t size,
                                              const Group& group = default_group(),
                                              Timeout timeout = {},
                                              Where where = Where::current()) {
  detail::check_object<T>();
  return detail::collect_results(part, size, /*tmpdir=*/nullptr, group, timeout, where);
}

/// The same out of core: the items are passed in one file per rank in `tmpdir`, an existing
/// directory that all ranks share. The files are removed before the call returns or throws; the
/// directory and its other contents stay. Throws SystemError on a rank that cannot write or read a
/// file, and PeerFailed with its text on the others; the group stays usable.
template <class T>
std::optional<std::vector<T>> collect_results(const std::vector<T>& part, std::size_t size,
                                              const std::filesystem::path& tmpdir,
                                              const Group& group = default_group(),
                                              Timeout timeout = {},
                                              Where where = Where::current()) {
  detail::check_object<T>();
  return detail::collect_results(part, size, &tmpdir, group, timeout, where);
}

/// dict[key] <- reduction of every rank's dict[key], on all ranks, in one all_reduce.
/// Dict: a std::map or std::unordered_map from std::string to an Arithmetic type or a std::vector
/// of one. If keys, lengths or op differ, every rank throws MismatchError, which names the keys and
/// the ranks, and the dicts are unchanged.
template <detail::Dict D>
requires(!std::is_const_v<D>) void all_reduce_dict(D& dict, ReduceOp op = ReduceOp::sum,
                                                   const Group& group = default_group(),
                                                   Timeout timeout = {},
                                                   Where where = Where::current()) {
  using Value = detail::DictValue<typename D::mapped_type>;
  using Element = typename Value::Element;
  const auto call = detail::object_call<typename D::mapped_type>(detail::ObjectOp::all_reduce_dict,
                                                                 group, timeout, where);
  std::vector<typename D::pointer> sorted;  // by key: unordered_map order may differ per rank
  std::size_t n_elements = 0;
  for (auto& entry : dict) {
    sorted.push_back(&entry);
    n_elements += Value::elements(entry.second).size();
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const auto* a, const auto* b) { return a->first < b->first; });
  std::vector<detail::DictEntry> entries;
  const auto flat = std::make_unique<Element[]>(n_elements);
  Element* next = flat.get();
  for (auto* const entry : sorted) {
    const auto elements = Value::elements(entry->second);
    entries.push_back({entry->first, elements.size()});
    next = std::copy(elements.begin(), elements.end(), next);
  }
  detail::check_dicts(call, entries, op);
  all_reduce(std::span<Element>(flat.get(), n_elements), op, group, call.limit.timeout(), where);
  next = flat.get();
  for (auto* const entry : sorted) {
    const auto elements = Value::elements(entry->second);
    std::copy_n(next, elements.size(), elements.begin());
    next += elements.size();
  }
}
template <detail::Dict D>
requires(!std::is_const_v<D>) void all_reduce_dict(D& dict, const CallOptions& options,
                                                   Where where = Where::current()) {
  all_reduce_dict(dict, options.op, detail::group_of(options, where), options.timeout, where);
}

}  // namespace lockstep
