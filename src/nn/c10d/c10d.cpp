#include <iterator>
#include <lockstep/nn/c10d.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engines/catalog.hpp"
#include "engines/message/message_engine.hpp"
#include "group/leave_on_exception.hpp"
#include "nn/c10d/c10d_rendezvous.hpp"
#include "nn/c10d/c10d_transport.hpp"
#include "world/variables.hpp"

namespace lockstep::nn::detail {
namespace {

// The libtorch layer's rows of the engine catalog.

template <bool kIsGloo>
engines::Availability available(const internal::World&) {
  if (!has_backend(kIsGloo ? "gloo" : "nccl")) {
    return {false, kIsGloo ? "needs a libtorch with Gloo, and Gloo's headers (Debian: libgloo-dev) "
                             "where lockstep::nn is built"
                           : "needs a libtorch with CUDA and NCCL, and NCCL's headers where "
                             "lockstep::nn is built"};
  }
  return {internal::variable("MASTER_ADDR") && internal::variable("MASTER_PORT"),
          "needs MASTER_ADDR and MASTER_PORT: the address of rank 0's host, and a free port there"};
}

template <bool kIsGloo>
engines::Joined join(const internal::World& world, const Call& barrier) {
  constexpr std::string_view kName = kIsGloo ? "gloo" : "nccl";
  auto engine = message::make(std::string(kName),
                              std::make_unique<Transport>(rendezvous(kName, world, barrier)),
                              message::parse_costs(world.env.network));
  // No rank may proceed, and possibly exit, while peers are still connecting.
  internal::leave_on_exception(*engine, [&] { engine->run(barrier); });
  return {.engine = std::move(engine)};
}

constexpr engines::Entry kEntries[] = {{"gloo", available<true>, join<true>},
                                       {"nccl", available<false>, join<false>}};

}  // namespace
}  // namespace lockstep::nn::detail

namespace lockstep {

Group nn::make_group(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::string name,
                     std::chrono::milliseconds timeout) {
  std::string backend = process_group->getBackendName();
  auto wire = detail::Wire::make(std::move(process_group), c10::intrusive_ptr<c10d::Store>());
  return Group(
      // Only init_dist compares LOCKSTEP_NETWORK between the ranks, so it is not used here.
      message::make(std::move(backend), std::make_unique<detail::Transport>(std::move(wire)),
                    message::Costs{}),
      std::move(name), timeout,
      internal::session() != nullptr ? internal::session()->world().env.check : Env::read().check);
}

}  // namespace lockstep

extern "C" void lockstep_nn_engines(std::vector<lockstep::engines::Entry>& entries) {
  using lockstep::nn::detail::kEntries;
  entries.insert(entries.end(), std::begin(kEntries), std::end(kEntries));
}
