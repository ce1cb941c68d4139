#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <lockstep/dist.hpp>
#include <numeric>
#include <optional>
#include <vector>

#include "group/names_of_reductions.hpp"
#include "group/no_rank_text.hpp"
#include "python/call.hpp"
#include "python/core_module.hpp"
#include "python/data.hpp"
#include "python/exceptions.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lockstep::python {
namespace {

void barrier(const Group* group, nb::handle timeout) {
  const Call call("barrier", group, timeout);
  call.run([&] { call.group().barrier(call.timeout(), call.where()); });
}

void all_reduce(nb::handle data, nb::handle op, const Group* group, nb::handle timeout) {
  const Call call("all_reduce", group, timeout);
  const Data in_place(data, Access::write, call);
  const ReduceOp reduction = call.parse_op(op);
  in_place.bump_version();
  call.run([&] {
    call.group().all_reduce(in_place.elements(), reduction, call.timeout(), call.where());
  });
}

void broadcast(nb::handle data, nb::handle from, const Group* group, nb::handle timeout) {
  const Call call("broadcast", group, timeout);
  const int src = call.integer("src", from);
  const Access access = call.group().rank() == src ? Access::read : Access::write;
  const Data in_place(data, access, call);
  in_place.bump_version();
  call.run([&] { call.group().broadcast(in_place.elements(), src, call.timeout(), call.where()); });
}

/// The shape of one rank's array, as the ranks exchange it.
constexpr std::size_t kMostDimensions = 32;
struct Shape {
  std::int64_t n_dimensions = 0;
  std::array<std::int64_t, kMostDimensions> extents{};
};
static_assert(sizeof(Shape) == (1 + kMostDimensions) * sizeof(std::int64_t));

Shape shape_of(const nb::tuple& extents, const Call& call) {
  Shape shape;
  if (extents.size() > kMostDimensions) {
    call.reject(fmt::format("data has {} dimensions; it may have up to {}", extents.size(),
                            kMostDimensions));
  }
  for (const nb::handle extent : extents) {
    shape.extents[static_cast<std::size_t>(shape.n_dimensions++)] = nb::cast<std::int64_t>(extent);
  }
  return shape;
}

/// Every rank's data in one flat array, by rank, and their shapes. Only on dst, if it is not
/// negative; None elsewhere. make_flat(n): an array of n elements of the type of data.
nb::object gather(const char* operation, nb::handle data, const nb::tuple& extents, nb::handle to,
                  const nb::callable& make_flat, const Group* group, nb::handle timeout,
                  bool to_all) {
  const Call call(operation, group, timeout);
  const int dst = to_all ? -1 : call.integer("dst", to);
  const Data in(data, Access::read, call);
  const int n_ranks = call.group().size();
  if (!to_all && (dst < 0 || dst >= n_ranks)) {
    call.reject(internal::no_rank_text("dst", dst, n_ranks));
  }
  const detail::TimeLimit limit(call.timeout());
  const Shape own = shape_of(extents, call);
  std::size_t n_own = 1;
  for (std::int64_t i = 0; i < own.n_dimensions; ++i) {
    n_own *= static_cast<std::size_t>(own.extents[static_cast<std::size_t>(i)]);
  }
  if (n_own != in.elements().count) {
    call.reject(
        fmt::format("data has {} elements, but its shape has {}", in.elements().count, n_own));
  }
  std::vector<Shape> shapes(static_cast<std::size_t>(n_ranks));
  call.run([&] {
    call.group().all_gather(
        {.data = &own, .count = sizeof own, .dtype = DType::u8},
        {.data = shapes.data(), .count = shapes.size() * sizeof own, .dtype = DType::u8},
        limit.timeout(), call.where());
  });
  std::vector<std::size_t> counts;
  nb::list all_extents;
  for (const Shape& shape : shapes) {
    std::size_t count = 1;
    nb::list of_rank;
    for (std::int64_t i = 0; i < shape.n_dimensions; ++i) {
      const std::int64_t extent = shape.extents[static_cast<std::size_t>(i)];
      count *= static_cast<std::size_t>(extent);
      of_rank.append(extent);
    }
    counts.push_back(count);
    all_extents.append(nb::tuple(of_rank));
  }
  const ConstElements elements = in.elements();
  if (!to_all && dst != call.group().rank()) {
    call.run(
        [&] { call.group().gather(elements, {}, counts, dst, limit.timeout(), call.where()); });
    return nb::none();
  }
  nb::object flat;
  std::optional<Data> out;
  try {
    flat = make_flat(std::reduce(counts.begin(), counts.end()));
    out.emplace(flat, Access::write, call, "out");
  } catch (const std::exception& error) {  // the peers wait for this rank's second call
    const auto* const raised = dynamic_cast<const nb::python_error*>(&error);
    call.group().abandon(raised != nullptr ? text_of_error(*raised) : error.what());
    throw;
  }
  call.run([&] {
    if (to_all) {
      call.group().all_gather(elements, out->elements(), counts, limit.timeout(), call.where());
    } else {
      call.group().gather(elements, out->elements(), counts, dst, limit.timeout(), call.where());
    }
  });
  return nb::make_tuple(flat, all_extents);
}

int random_seed(const Group* group, nb::handle timeout) {
  const Call call("sync_random_seed", group, timeout);
  const auto seed =
      call.run([&] { return sync_random_seed(call.group(), call.timeout(), call.where()); });
  return static_cast<int>(seed & 0x7fff'ffffU);  // what every library's generator takes
}

}  // namespace

void define_arrays(nb::module_& module) {
  define_operation(module, "barrier", &barrier, "group"_a.none() = nb::none(),
                   "timeout"_a.none() = nb::none(), "Returns when every rank has called it.");
  define_operation(
      module, "all_reduce", &all_reduce, "data"_a.none(), "op"_a = "sum",
      "group"_a.none() = nb::none(), "timeout"_a.none() = nb::none(),
      fmt::format(
          "data <- reduction of every rank's data, in place, with the same bits on all ranks.\n\n"
          "op: {}; mean of integers truncates toward zero.\n"
          "The same count, type and op on all ranks.",
          internal::names_of_reductions())
          .c_str());
  define_operation(module, "broadcast", &broadcast, "data"_a.none(), "src"_a.none() = 0,
                   "group"_a.none() = nb::none(), "timeout"_a.none() = nb::none(),
                   "data <- src's data, in place.");
  module.def(
      "all_gather",
      [](nb::handle data, const nb::tuple& shape, const nb::callable& make_flat, const Group* group,
         nb::handle timeout) {
        return gather("all_gather", data, shape, nb::none(), make_flat, group, timeout,
                      /*to_all=*/true);
      },
      "data"_a.none(), "shape"_a, "make_flat"_a, "group"_a.none(), "timeout"_a.none());
  module.def(
      "gather",
      [](nb::handle data, const nb::tuple& shape, nb::handle dst, const nb::callable& make_flat,
         const Group* group, nb::handle timeout) {
        return gather("gather", data, shape, dst, make_flat, group, timeout,
                      /*to_all=*/false);
      },
      "data"_a.none(), "shape"_a, "dst"_a.none(), "make_flat"_a, "group"_a.none(),
      "timeout"_a.none());
  define_operation(
      module, "sync_random_seed", &random_seed, "group"_a.none() = nb::none(),
      "timeout"_a.none() = nb::none(),
      "A random seed of 31 bits, rank 0's, the same on all ranks. No generator is changed.");
}

}  // namespace lockstep::python
