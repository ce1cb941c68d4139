#include "layer_ranks.hpp"

#include <torch/version.h>

#include <lockstep/nn/c10d.hpp>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "support/ranks.hpp"

namespace lockstep::nn::testing {
namespace {

Group make_gloo_group(const c10::intrusive_ptr<c10d::HashStore>& store, int rank, int n) {
  using Gloo = c10d::ProcessGroupGloo;
  const auto options = Gloo::Options::create();
  options->devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
  auto gloo = c10::make_intrusive<Gloo>(store, rank, n, options);
#if TORCH_VERSION_MAJOR < 2
  return make_group(gloo, "mine", kWatchdog);
#else
  auto process_group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, n);
  process_group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::GLOO,
                            c10::intrusive_ptr<c10d::Backend>(gloo));
  process_group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  return make_group(process_group, "mine", kWatchdog);
#endif
}

}  // namespace

void on_hosts(int n, const std::function<void(int)>& body) {
  test::run_as(
      {test::Form::hosts, n}, [&body] { body(get_rank()); }, kWatchdog);
}

void on_gloo(int n, const std::function<void(int)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const GroupScope scope(make_gloo_group(store, rank, n));
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<Over> over_each() {
  return {{"shared_memory", on_ranks}, {"hosts", on_hosts}, {"gloo", on_gloo}};
}

void PrintTo(const Over& over, std::ostream* out) { *out << over.name; }

}  // namespace lockstep::nn::testing
