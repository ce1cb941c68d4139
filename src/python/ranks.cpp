#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <lockstep/elastic.hpp>
#include <lockstep/main_process.hpp>
#include <lockstep/world.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "python/call.hpp"
#include "python/core_module.hpp"
#include "python/exceptions.hpp"
#include "python/gil.hpp"
#include "python/interrupts.hpp"
#include "python/str.hpp"
#include "python/where.hpp"
#include "world/elastic_file.hpp"
#include "world/environment.hpp"
#include "world/session.hpp"
#include "world/variables.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lockstep::python {
namespace {

struct NamedLauncher {
  const char* name;
  Launcher launcher;
};
constexpr NamedLauncher kLaunchers[] = {
    {"infer", Launcher::infer},     {"none", Launcher::none},   {"lockstep", Launcher::lockstep},
    {"pytorch", Launcher::pytorch}, {"slurm", Launcher::slurm}, {"mpi", Launcher::mpi}};

Launcher parse_launcher(const std::string& name, const ErrorContext& context) {
  for (const auto& known : kLaunchers) {
    if (name == known.name) return known.launcher;
  }
  throw UsageError(context,
                   fmt::format("launcher is '{}'; expected infer, none, lockstep, pytorch, "
                               "slurm or mpi",
                               name));
}

const char* name_in_python(Launcher launcher) {
  for (const auto& known : kLaunchers) {
    if (launcher == known.launcher) return known.name;
  }
  return "none";
}

void init(const std::string& launcher, const std::string& backend, nb::handle timeout) {
  const ErrorContext context{.operation = "init_dist", .where = where()};
  InitOptions options{.launcher = parse_launcher(launcher, context), .backend = backend};
  if (!timeout.is_none()) {
    constexpr std::chrono::hours kCentury{876'000};
    const auto seconds = seconds_of(timeout, context);
    options.timeout = seconds < kCentury ? std::chrono::ceil<std::chrono::milliseconds>(seconds)
                                         : std::chrono::milliseconds(kCentury);
  }
  {
    const GilReleased released;
    init_dist(options, context.where);
  }
  if (default_group(context.where).size() > 1) watch_interrupts();
}

void destroy(const std::string& failure) {
  const auto caller = where();
  stop_watching_interrupts();
  const GilReleased released;
  destroy_dist(failure, caller);
}

/// (rank, size, generation, ((rank, generation, why), ...), (joined, ...))
nb::tuple regroup_here(nb::handle timeout) {
  const ErrorContext context{.operation = "regroup", .where = where()};
  const Timeout limit = timeout.is_none() ? Timeout() : Timeout(seconds_of(timeout, context));
  const Regrouped regrouped = [&] {
    const GilReleased released;
    return regroup(limit, context.where);
  }();
  if (regrouped.size > 1) watch_interrupts();
  nb::list lost, joined;
  for (const LostRank& each : regrouped.lost) {
    lost.append(nb::make_tuple(each.rank, each.generation, str_of(each.why)));
  }
  for (const int rank : regrouped.joined) joined.append(rank);
  return nb::make_tuple(regrouped.rank, regrouped.size, regrouped.generation, lost, joined);
}

/// OSError, of what std::system_error says.
template <class F>
auto with_os_errors(F f) {
  try {
    const GilReleased released;
    return f();
  } catch (const std::system_error& error) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
    throw nb::python_error();
  }
}

void replace_file(const std::string& path, const nb::bytes& data) {
  const ErrorContext context{.operation = "replace_file", .where = where()};
  with_os_errors([&] {
    internal::ElasticFile file(path);
    file.write({data.c_str(), data.size()});
    file.commit_to_disk(context);
  });
}

nb::bytes read_file(const std::string& path) {
  const std::string bytes = with_os_errors([&] { return internal::read_elastic_file(path); });
  return nb::bytes(bytes.data(), bytes.size());
}

/// `group`, or the default one.
Group group_or_default(const Group* group) {
  return group != nullptr ? *group : default_group(where());
}

nb::object main_process_first(const nb::callable& f, const Group* group, nb::handle timeout) {
  const Call call("main_process_first", group, timeout, Timeout::never());
  nb::object result;
  call.run([&] {
    const std::function<void()> body = [&] {
      in_python([&] {
        const InterruptibleCall in_f(nullptr);  // f may raise KeyboardInterrupt
        result = f();
      });
    };
    detail::run_first(detail::FirstScope::main_process, body, call.group(), call.timeout(),
                      call.where());
  });
  return result;
}

/// Context manager of an operation that starts in Python code: counts exceptions raised there as
/// refused calls.
class Operation {
 public:
  Operation(std::string name, nb::handle group)
      : name_(std::move(name)),
        group_(group_or_default(group_in(group, name_.c_str()))),
        collective_(name_, group_, where()) {}
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  /// Of a `with` block.
  void exit(nb::handle exception) const {
    if (exception.is_none()) return;
    const nb::module_ errors = nb::module_::import_("lockstep.errors");
    const bool is_error = nb::isinstance(exception, errors.attr("Error"));
    const bool is_refusal = nb::isinstance(exception, errors.attr("UsageError"));
    collective_.failed(fmt::format("{}: {}", name_of_type(exception), text_of(nb::str(exception))),
                       is_error && !is_refusal);
  }

 private:
  std::string name_;
  Group group_;
  detail::Collective collective_;
};

void define_group(nb::module_& module) {
  nb::class_<Operation>(module, "Operation",
                        "A block with an operation's calls and the lines before and between them: "
                        "an exception that leaves it before the first one counts as a refused "
                        "call, and a later one ends the group.")
      .def(nb::init<std::string, nb::handle>(), "name"_a, "group"_a.none())
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def(
          "__exit__",
          [](const Operation& operation, nb::handle /*type*/, nb::handle exception,
             nb::handle /*traceback*/) { operation.exit(exception); },
          "type"_a.none(), "exception"_a.none(), "traceback"_a.none());

  nb::class_<Group> group_class(
      module, "Group",
      "A group of communicating ranks; default_group() is the world. One call "
      "at a time per group: a second thread needs a duplicate().");
  group_class.def_prop_ro("rank", &Group::rank, "This rank, from 0.")
      .def_prop_ro("size", &Group::size, "The number of ranks.")
      .def_prop_ro(
          "name", [](const Group& group) { return group.name(); },
          "world, world/0.1, ...: for errors.")
      .def_prop_ro(
          "backend", [](const Group& group) { return std::string(group.backend()); },
          "shared, mpi, ...")
      .def_prop_ro(
          "timeout",
          [](const Group& group) { return std::chrono::duration<double>(group.timeout()).count(); },
          "Limit of one operation in seconds, if the call gives none.")
      .def(
          "abandon", [](const Group& group, const std::string& reason) { group.abandon(reason); },
          "reason"_a,
          "This rank cannot go on: calls of all ranks raise PeerFailed with this reason.")
      .def(
          "__eq__", [](const Group& group, const Group& other) { return group == other; },
          nb::is_operator())
      .def("__copy__", [](nb::handle self) { return nb::borrow(self); })
      .def("__deepcopy__", [](nb::handle self, nb::handle /*memo*/) { return nb::borrow(self); })
      .def("__hash__", [](const Group& group) { return std::hash<std::string>()(group.name()); })
      .def("__repr__", [](const Group& group) {
        return fmt::format("<lockstep.Group '{}': rank {} of {}, {}>", group.name(), group.rank(),
                           group.size(), group.backend());
      });
  define_operation(
      group_class, "split",
      [](const Group& self, nb::handle color, nb::handle key) {
        const Call call("split", &self, nb::none());
        const int color_here = call.integer("color", color), key_here = call.integer("key", key);
        return call.run([&] { return call.group().split(color_here, key_here, call.where()); });
      },
      "color"_a.none(), "key"_a.none() = -1,
      "A new group of the ranks that gave the same color (0 or more), ordered by key, then by "
      "rank. Collective.");
  define_operation(
      group_class, "duplicate",
      [](const Group& self) {
        const Call call("duplicate", &self, nb::none());
        return call.run([&] { return call.group().duplicate(call.where()); });
      },
      "The same ranks over a separate channel, for a second thread. Collective.");
}

}  // namespace

void define_ranks(nb::module_& module) {
  define_group(module);
  module.def("init_dist", &init, "launcher"_a, "backend"_a, "timeout"_a.none());
  module.def("destroy_dist", &destroy, "failure"_a);
  module.def(
      "joined", [] { return internal::variable(internal::kJoined).value_or(""); },
      "LOCKSTEP_JOINED; empty if it is not set.");
  module.def("keep_daemons_in_calls", &keep_daemons_in_calls);
  module.def("regroup", &regroup_here, "timeout"_a.none());
  module.def("step_done", &step_done,
             "Tells the launcher that this rank has completed a step: call it after each.\n\n"
             "If three generations in a row end by a lost rank or an error before a step was "
             "completed, the "
             "job ends; and the delay\nbefore a replacement, doubled each time, begins anew. Does "
             "nothing if not elastic.");
  module.def(
      "finish_elastic", &internal::finish_elastic,
      "Tells the launcher that this rank has done its part, which all ranks have completed: for "
      "run_elastic, after\nits last barrier. The launcher no longer waits for this rank when "
      "others are lost. Does nothing if not elastic.");
  module.def("has_earlier_steps", &internal::has_earlier_steps,
             "Whether an earlier generation of the world has completed a step: where no rank has "
             "its result, it is lost.");
  module.def("replace_file", &replace_file, "path"_a, "data"_a,
             "Replaces a file atomically, and waits for the disk; on several elastic hosts not one "
             "that a later generation has written.");
  module.def("read_file", &read_file, "path"_a, "What replace_file has written.");
  module.def(
      "is_beside_elastic", &internal::is_beside_elastic,
      "Whether `lockstep run --elastic` has started this rank, and its world is over another "
      "backend, which the\nlauncher does not keep running.");
  module.def("is_elastic", &is_elastic,
             "Whether `lockstep run --elastic` has started this rank, and it has joined the world: "
             "then regroup() goes on after a lost rank.");
  module.def("has_waiting_replacements", &has_waiting_replacements,
             "Whether a replacement waits for the ranks to call regroup(). The ranks may see "
             "different answers: reduce\nthem (op \"max\") before acting on one. False if not "
             "elastic.");
  module.def("infer_launcher", [] { return name_in_python(infer_launcher()); });
  module.def(
      "is_distributed", [] { return is_distributed(); },
      "Whether this process is a rank: between init_dist and destroy_dist, if a launcher started "
      "it.");
  module.def(
      "default_group", [] { return default_group(where()); },
      "The world; a group of one rank if not distributed.");
  module.def(
      "local_group", [] { return local_group(where()); }, "The world's ranks on this host.");
  module.def(
      "get_backend", [](const Group* group) { return get_backend(group_or_default(group)); },
      "group"_a.none() = nb::none());
  module.def(
      "get_rank", [](const Group* group) { return group_or_default(group).rank(); },
      "group"_a.none() = nb::none());
  module.def(
      "get_world_size", [](const Group* group) { return group_or_default(group).size(); },
      "group"_a.none() = nb::none());
  define_operation(
      module, "main_process_first", &main_process_first, "function"_a,
      "group"_a.none() = nb::none(), "timeout"_a.none() = nb::none(),
      "Rank 0 runs function; then the other ranks run it, concurrently. Returns its result. "
      "Collective.\n\n"
      "For work that the others can reuse: a download, a cache. timeout: how long the others wait "
      "for rank 0,\nby default forever (they notice its death). If function raises on rank 0, the "
      "others raise PeerFailed\nwith its text and do not run it; the group stays usable. "
      "Collectives inside raise UsageError.");
  module.def(
      "refuse_arguments",
      [](const std::string& operation, const std::string& text, nb::handle group) {
        refuse_arguments(operation.c_str(), group, text);
      },
      "operation"_a, "text"_a, "group"_a.none());
}

}  // namespace lockstep::python
