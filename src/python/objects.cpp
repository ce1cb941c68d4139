#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <filesystem>
#include <lockstep/objects.hpp>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/reduce.hpp"
#include "python/call.hpp"
#include "python/core_module.hpp"
#include "python/data.hpp"
#include "python/exceptions.hpp"
#include "python/str.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {
/// The name of the objects' type in errors.
struct Pickle {};
}  // namespace

/// Objects travel pickled: `dumps` and `loads` are pickle's, given by the Python half.
namespace lockstep::python {

namespace {

detail::ObjectCall object_call(const Call& call, detail::ObjectOp op, int root = -1) {
  return detail::object_call<Pickle>(op, call.group(), call.timeout(), call.where(), root);
}

/// f prepares this rank's message. If it throws, a Python exception too, the call is refused and
/// the other ranks are notified.
template <class F>
void prepare_in_python(detail::ObjectCall& call, F f) {
  detail::prepare(call, [&] { in_python(f); });
}

detail::Bytes pickle(const nb::callable& dumps, nb::handle object) {
  detail::Bytes bytes;
  const nb::bytes pickled = nb::cast<nb::bytes>(dumps(object));
  bytes.append(pickled.c_str(), pickled.size());
  return bytes;
}

nb::object unpickle(const nb::callable& loads, const std::byte* bytes, std::size_t n_bytes) {
  auto* const memory = reinterpret_cast<char*>(const_cast<std::byte*>(bytes));
  const auto view = nb::steal<nb::object>(
      PyMemoryView_FromMemory(memory, static_cast<Py_ssize_t>(n_bytes), PyBUF_READ));
  nb::object loaded = loads(view);
  view.attr("release")();  // the memory ends with the call
  return loaded;
}

/// The object of `sender`; MismatchError if it cannot be unpickled here.
nb::object object_of(const detail::ObjectCall& call, int sender, const nb::callable& loads,
                     std::span<const std::byte> bytes) {
  nb::object object;
  detail::decode_from(call, sender, [&] {
    object = in_unpickling([&] { return unpickle(loads, bytes.data(), bytes.size()); });
  });
  return object;
}

/// list(value). It must be one: of a dict that would be its keys, of a str its letters.
nb::list list_of(const Call& call, const char* parameter, nb::handle value) {
  if (nb::isinstance<nb::list>(value)) return nb::borrow<nb::list>(value);
  call.reject_type(fmt::format("{} is {}; it must be a list", parameter, name_of_type(value)));
}

/// to: dst; None: all ranks.
nb::object gather_objects(const char* operation, detail::ObjectOp op, nb::handle object,
                          const nb::callable& dumps, const nb::callable& loads, nb::handle to,
                          const Group* group, nb::handle timeout) {
  const Call call(operation, group, timeout);
  const bool to_all = op == detail::ObjectOp::all_gather_object;
  detail::ObjectCall objects = object_call(call, op);
  detail::Bytes pickled;
  prepare_in_python(objects, [&] {
    if (!to_all) objects.root = call.integer("dst", to);
    pickled = pickle(dumps, object);
  });
  const auto messages =
      call.run([&] { return detail::gather_messages(objects, std::move(pickled)); });
  if (!to_all && call.group().rank() != objects.root) return nb::none();
  nb::list all;
  for (std::size_t r = 0; r < messages.of_rank.size(); ++r) {
    all.append(object_of(objects, static_cast<int>(r), loads, messages.of_rank[r]));
  }
  return all;
}

/// src's list on the other ranks, None on src.
nb::object broadcast_objects(nb::handle list, const nb::callable& dumps, const nb::callable& loads,
                             nb::handle from, const Group* group, nb::handle timeout) {
  const Call call("broadcast_object_list", group, timeout);
  detail::ObjectCall objects = object_call(call, detail::ObjectOp::broadcast_object_list, 0);
  detail::Bytes pickled;
  prepare_in_python(objects, [&] {
    objects.root = call.integer("src", from);
    objects.agreed = objects.n_items = nb::len(list_of(call, "data", list));
    if (call.group().rank() == objects.root) pickled = pickle(dumps, list);
  });
  const auto received = call.run([&] { return detail::broadcast_message(objects, pickled); });
  if (call.group().rank() == objects.root) return nb::none();
  return object_of(objects, objects.root, loads, received.span());
}

/// check(): raises if an argument is wrong that only Python knows.
nb::object collect_results(nb::handle results_of_rank, nb::handle size, const nb::callable& dumps,
                           const nb::callable& loads, const nb::callable& check, nb::handle tmpdir,
                           const Group* group, nb::handle timeout) {
  const Call call("collect_results", group, timeout);
  detail::ObjectCall objects = object_call(call, detail::ObjectOp::collect_results, /*root=*/0);
  nb::list part;
  std::filesystem::path folder;
  prepare_in_python(objects, [&] {
    check();
    part = nb::list(nb::handle(list_of(call, "results", results_of_rank)));  // a copy
    if (!tmpdir.is_none()) folder = text_of(nb::module_::import_("os").attr("fspath")(tmpdir));
    std::uint64_t n_results = 0;
    if (!nb::try_cast(size, n_results)) {
      call.reject(fmt::format("size is {}; it must be an int, 0 or more", text_of(nb::repr(size))));
    }
    objects.agreed = n_results;
    objects.n_items = part.size();
  });
  nb::list all;
  const detail::Results results{
      .n_mine = part.size(),
      .encode =
          [&](std::size_t first, std::size_t last, detail::Bytes& out) {
            return in_python([&] {
              do {
                const nb::bytes item = nb::borrow<nb::bytes>(dumps(part[first++]));
                const std::uint64_t n_bytes = item.size();
                out.append(&n_bytes, sizeof n_bytes);
                out.append(item.c_str(), n_bytes);
              } while (first < last && out.size() < detail::kBatchBytes);
              return first;
            });
          },
      .make =
          [&](std::size_t n_results) {
            in_python([&] {
              for (std::size_t i = 0; i < n_results; ++i) all.append(nb::none());
            });
          },
      .keep = [&](std::size_t item,
                  std::size_t place) { in_python([&] { all[place] = part[item]; }); },
      .decode =
          [&](std::span<const std::byte> bytes, std::span<const std::size_t> places) {
            in_unpickling([&] {
              for (const std::size_t place : places) {
                std::uint64_t n_bytes = 0;
                if (bytes.size() < sizeof n_bytes)
                  throw std::length_error("the message is truncated");
                std::memcpy(&n_bytes, bytes.data(), sizeof n_bytes);
                bytes = bytes.subspan(sizeof n_bytes);
                if (bytes.size() < n_bytes) throw std::length_error("the message is truncated");
                all[place] = unpickle(loads, bytes.data(), n_bytes);
                bytes = bytes.subspan(n_bytes);
              }
            });
          },
  };
  call.run(
      [&] { detail::collect_results(objects, tmpdir.is_none() ? nullptr : &folder, results); });
  if (call.group().rank() != 0) return nb::none();
  return all;
}

// --- dicts --------------------------------------------------------------------------------------

/// A value of a dict: an array, or a number of Python's.
struct Value {
  nb::object name;
  std::string key;
  nb::object object;
  std::optional<Data> array;
  std::int64_t integer = 0;
  double real = 0;

  bool is_integer() const { return !array && nb::isinstance<nb::int_>(object); }
  Elements elements() {
    if (array) return array->elements();
    if (is_integer()) return {&integer, 1, DType::i64};
    return {&real, 1, DType::f64};
  }
};

/// An int of Python has no width, so that the result is the exact one; the mean is a float.
nb::object reduced(ReduceOp op, std::span<const std::int64_t> of_ranks) {
  const auto fold = [&](auto combine) {
    nb::object result = nb::int_(of_ranks.front());
    for (const std::int64_t next : of_ranks.subspan(1)) result = combine(result, nb::int_(next));
    return result;
  };
  const auto sum = [&] {
    return fold([](const nb::object& a, const nb::int_& b) { return a + b; });
  };
  if (op == ReduceOp::sum) return sum();
  if (op == ReduceOp::mean) return sum() / nb::int_(of_ranks.size());
  if (op == ReduceOp::product) {
    return fold([](const nb::object& a, const nb::int_& b) { return a * b; });
  }
  // The others do not leave the range of their arguments.
  std::vector<const void*> in;
  for (const std::int64_t& integer : of_ranks) in.push_back(&integer);
  std::int64_t result = 0;
  kernels::reduce(DType::i64, op, in.data(), static_cast<int>(in.size()), &result, 1);
  return nb::int_(result);
}

void read_value(const Call& call, Value& value) {
  const nb::handle object = value.object;
  const std::string parameter = fmt::format("data['{}']", value.key);
  if (nb::isinstance<nb::bool_>(object)) {
    call.reject(fmt::format("{} is a bool; to count, use int(x)", parameter));
  }
  if (nb::isinstance<nb::float_>(object)) {
    value.real = nb::cast<double>(object);
  } else if (nb::isinstance<nb::int_>(object)) {
    if (!nb::try_cast(object, value.integer)) {
      call.reject(fmt::format("{} does not fit 64 bits", parameter));
    }
  } else {
    value.array.emplace(object, Access::write, call, parameter.c_str());
  }
}

/// By type and key, integers last: the order of insertion may differ per rank.
using SortedValues = std::map<std::tuple<bool, DType, std::string>, Value*>;

/// Values as they travel: the elements of each type, and the integers, which each rank gets of all.
struct PackedValues {
  std::vector<std::string> names;  ///< of the entries
  std::vector<detail::DictEntry> entries;
  std::map<DType, detail::Bytes> flat;
  std::vector<std::int64_t> integers, integers_of_ranks;
};

PackedValues pack(const SortedValues& sorted, int n_ranks) {
  PackedValues packed;
  packed.names.reserve(sorted.size());
  for (const auto& [by, value] : sorted) {
    const Elements elements = value->elements();
    packed.names.push_back(
        fmt::format("{}: {}", value->key, value->is_integer() ? "int" : name_of(elements.dtype)));
    packed.entries.push_back({packed.names.back(), elements.count});
    if (value->is_integer()) {
      packed.integers.push_back(value->integer);
    } else {
      packed.flat[elements.dtype].append(elements.data, elements.n_bytes());
    }
  }
  packed.integers_of_ranks.resize(packed.integers.size() * static_cast<std::size_t>(n_ranks));
  return packed;
}

void reduce(PackedValues& packed, const detail::ObjectCall& call, ReduceOp op) {
  for (const auto& [dtype, bytes] : packed.flat) {
    call.group.all_reduce(
        {.data = bytes.data(), .count = bytes.size() / size_of(dtype), .dtype = dtype}, op,
        call.limit.timeout(), call.where);
  }
  const std::size_t n = packed.integers.size();
  if (n == 0) return;
  std::vector<std::int64_t>& all = packed.integers_of_ranks;
  call.group.all_gather({.data = packed.integers.data(), .count = n, .dtype = DType::i64},
                        {.data = all.data(), .count = all.size(), .dtype = DType::i64},
                        call.limit.timeout(), call.where);
}

/// Writes the results to the arrays, and in place of the numbers of data.
void unpack(const PackedValues& packed, const SortedValues& sorted, ReduceOp op, nb::dict& data) {
  std::map<DType, const std::byte*> next;
  for (const auto& [dtype, bytes] : packed.flat) next[dtype] = bytes.data();
  std::size_t n_reduced = 0;
  for (const auto& [by, value] : sorted) {
    if (value->is_integer()) {
      std::vector<std::int64_t> of_ranks;
      for (std::size_t i = n_reduced++; i < packed.integers_of_ranks.size();
           i += packed.integers.size()) {
        of_ranks.push_back(packed.integers_of_ranks[i]);
      }
      data[value->name] = reduced(op, of_ranks);
      continue;
    }
    const Elements elements = value->elements();
    if (elements.count == 0) continue;
    if (value->array) value->array->bump_version();
    std::memcpy(elements.data, next[elements.dtype], elements.n_bytes());
    next[elements.dtype] += elements.n_bytes();
    if (!value->array) data[value->name] = nb::float_(value->real);
  }
}

/// convert_numbers(data): a copy of a dict, which is returned with the results.
nb::object all_reduce_dict(nb::handle given, const nb::callable& convert_numbers, nb::handle op,
                           const Group* group, nb::handle timeout) {
  const Call call("all_reduce_dict", group, timeout);
  detail::ObjectCall objects = object_call(call, detail::ObjectOp::all_reduce_dict);
  ReduceOp reduction = ReduceOp::sum;
  std::deque<Value> values;  // a Data does not move
  nb::dict data;
  prepare_in_python(objects, [&] {
    data = nb::cast<nb::dict>(convert_numbers(given));
    reduction = call.parse_op(op);
    for (const auto [key, object] : data) {
      if (!nb::isinstance<nb::str>(key)) {
        call.reject(fmt::format("the key {} of data must be a str", text_of(nb::repr(key))));
      }
      auto& value = values.emplace_back();
      value.name = nb::borrow<nb::object>(key);
      value.key = text_of(key);
      value.object = nb::borrow<nb::object>(object);
      read_value(call, value);
    }
  });
  if (objects.refusal) values.clear();
  SortedValues sorted;
  for (auto& value : values) {
    sorted.emplace(std::tuple(value.is_integer(), value.elements().dtype, value.key), &value);
  }
  PackedValues packed = pack(sorted, call.group().size());
  const detail::Collective collective("all_reduce_dict", call.group(), call.where());
  call.run([&] {
    detail::check_dicts(objects, packed.entries, reduction);
    collective.run([&] { reduce(packed, objects, reduction); });
  });
  unpack(packed, sorted, reduction, data);
  return data;
}

}  // namespace

void define_objects(nb::module_& module) {
  define_operation(
      module, "all_gather_object",
      [](nb::handle data, const nb::callable& dumps, const nb::callable& loads, const Group* group,
         nb::handle timeout) {
        return gather_objects("all_gather_object", detail::ObjectOp::all_gather_object, data, dumps,
                              loads, nb::none(), group, timeout);
      },
      "data"_a.none(), "dumps"_a, "loads"_a, "group"_a.none(), "timeout"_a.none());
  define_operation(
      module, "gather_object",
      [](nb::handle data, const nb::callable& dumps, const nb::callable& loads, nb::handle dst,
         const Group* group, nb::handle timeout) {
        return gather_objects("gather_object", detail::ObjectOp::gather_object, data, dumps, loads,
                              dst, group, timeout);
      },
      "data"_a.none(), "dumps"_a, "loads"_a, "dst"_a.none(), "group"_a.none(), "timeout"_a.none());
  define_operation(module, "broadcast_objects", &broadcast_objects, "data"_a.none(), "dumps"_a,
                   "loads"_a, "src"_a.none(), "group"_a.none(), "timeout"_a.none());
  define_operation(module, "collect_results", &collect_results, "results"_a.none(), "size"_a.none(),
                   "dumps"_a, "loads"_a, "check"_a, "tmpdir"_a.none(), "group"_a.none(),
                   "timeout"_a.none());
  define_operation(module, "all_reduce_dict", &all_reduce_dict, "data"_a.none(),
                   "convert_numbers"_a, "op"_a.none(), "group"_a.none(), "timeout"_a.none());
}

}  // namespace lockstep::python
