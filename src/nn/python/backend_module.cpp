#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <lockstep/env.hpp>

#include "nn/python/backend_join.hpp"
#include "nn/python/torch_error.hpp"
#include "nn/python/torch_module.hpp"

namespace py = pybind11;

namespace lockstep::python {
namespace {

/// earlier: of the default group, if this is not it; global_ranks: its ranks there.
Meeting meet_in(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::string name,
                std::chrono::milliseconds timeout, const Meeting* earlier,
                std::vector<int> global_ranks) {
  const std::source_location where = core().where();
  const Membership membership{.rank = rank,
                              .size = size,
                              .name = std::move(name),
                              // The program's own, if it is not torch's default. "For ever" may be
                              // more than clocks can add to now.
                              .timeout = timeout != kBackendDefaultTimeout
                                             ? Timeout(timeout).or_else({})
                                             : Env::read().timeout.value_or(timeout)};
  const WithoutGil released;
  return meet(*store, membership, {.meeting = earlier, .ranks = std::move(global_ranks)}, where);
}

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                               const Meeting& meeting,
                                               std::vector<std::uint64_t> global_ranks,
                                               const py::function& make_messages,
                                               c10::intrusive_ptr<c10d::ProcessGroup> between) {
  const std::source_location where = core().where();
  auto options =
      c10::make_intrusive<c10d::Backend::Options>("lockstep", meeting.membership.timeout);
  options->global_ranks_in_group = std::move(global_ranks);
  auto joined = [&] {
    const WithoutGil released;
    return join(meeting, std::move(between), where);
  }();
  if (meeting.membership.size > 1) core().watch_interrupts();
  options->timeout = joined.group.timeout();
  c10::intrusive_ptr<c10d::Backend> messages;
  if (meeting.membership.size > 1 && !joined.messages) {
    messages = make_messages().cast<c10::intrusive_ptr<c10d::Backend>>();
  }
  auto backend = c10::make_intrusive<Backend>(
      std::move(joined), std::move(options), std::move(messages), MonitoredBarrier(store, meeting));
  LivingBackends::add(backend);
  return backend;
}

void leave_all(const std::string& failure) {
  const WithoutGil released;
  auto living = LivingBackends::all();
  for (const auto& backend : living) backend->leave(failure);
  // Python ends the threads that enter it later, in the midst of a destructor.
  for (const auto& backend : living) backend->end_callbacks(failure);
  living.clear();
}

}  // namespace

void define_backend(py::module_& module) {
  const py::object file = py::module_::import("torch").attr("__file__");
  const auto folder = py::module_::import("os.path").attr("dirname")(file).cast<std::string>();
  core().add_folder(folder.c_str());
  const py::object entry_point = py::module_::import("lockstep_torch").attr("__path__");
  core().add_folder(entry_point[py::int_(0)].cast<std::string>().c_str());
  register_torch_errors();
  py::class_<Meeting>(module, "Meeting")
      .def_property_readonly("is_on_one_host", &Meeting::is_on_one_host);
  module.def("meet", &meet_in, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("name"),
             py::arg("timeout"), py::arg("earlier").none(true), py::arg("global_ranks"));
  module.def("make_backend", &make_backend, py::arg("store"), py::arg("meeting"),
             py::arg("global_ranks"), py::arg("make_messages"), py::arg("between"));
  module.def("leave_all", &leave_all, py::arg("failure"));
}

}  // namespace lockstep::python
