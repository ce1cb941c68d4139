#pragma once

#include <smpi/mpi.h>

#include <compare>
#include <functional>
#include <lockstep/engine.hpp>
#include <memory>
#include <simgrid/s4u.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engines/shared/algorithms/host_engine.hpp"

/// A simulated cluster: its cost model, and the ranks on it.
namespace growth {

inline constexpr int kRanksPerHost = 8;
inline constexpr double kMessageSeconds = 0.25e-6;   // per message, at the sender and the receiver
inline constexpr double kCoreBytesPerSecond = 10e9;  // reading and writing during a reduction

int rank_of(MPI_Comm comm);
int size_of(MPI_Comm comm);

/// A subset of the ranks: first, first + step ...
struct Some {
  int first;
  int step;
  int n;
  auto operator<=>(const Some&) const = default;
};

/// A barrier without cost: MPI_Barrier releases the ranks one after the other.
simgrid::s4u::BarrierPtr start_line(const Some& some);
MPI_Comm comm_of(const Some& some);
/// The mpi engine over these ranks, of which this is one.
std::unique_ptr<lockstep::Engine> join(const Some& some, const lockstep::Call& barrier);

/// The part of an Engine that a test of an algorithm needs.
class Part : public lockstep::Engine {
 public:
  Part(int rank, int size) : rank_(rank), size_(size) {}
  std::string_view name() const noexcept override { return "simulated"; }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  std::unique_ptr<lockstep::Engine> split(const lockstep::Call&, int, int) override {
    return nullptr;
  }
  std::unique_ptr<lockstep::SharedMemory> allocate(const lockstep::Call&) override {
    return nullptr;
  }
  void abandon(std::string_view reason) noexcept override;
  void leave(std::string_view) noexcept override {}

 protected:
  const int rank_;
  const int size_;
};

/// In place of the shared engine of a host.
class Host final : public lockstep::shared::HostEngine {
 public:
  explicit Host(std::unique_ptr<lockstep::Engine> engine) : engine_(std::move(engine)) {}
  std::string_view name() const noexcept override { return engine_->name(); }
  int rank() const noexcept override { return engine_->rank(); }
  int size() const noexcept override { return engine_->size(); }
  void run(const lockstep::Call& call) override { engine_->run(call); }
  std::unique_ptr<HostEngine> split_host(const lockstep::Call&, int, int) override {
    return nullptr;
  }
  std::vector<std::unique_ptr<HostEngine>> divide_host(const lockstep::Call&,
                                                       std::span<const int>) override {
    return {};
  }
  std::unique_ptr<lockstep::SharedMemory> allocate(const lockstep::Call& call) override {
    return engine_->allocate(call);
  }
  void abandon(std::string_view reason) noexcept override { engine_->abandon(reason); }
  void leave(std::string_view failure) noexcept override { engine_->leave(failure); }
  std::shared_ptr<lockstep::internal::Recorder> recorder() const noexcept override {
    return nullptr;
  }
  std::shared_ptr<lockstep::shared::TaggedMessages> make_messages(const lockstep::Call&) override {
    return nullptr;
  }

 private:
  std::unique_ptr<lockstep::Engine> engine_;
};

/// Runs `run_rank` on `n_actors` contexts per host, which are consecutive ranks if `are_together`,
/// else n_hosts apart, over the module of the mpi engine.
struct Cluster {
  std::string module;
  int n_hosts = 0;
  double gbits = 0;
  int n_actors = kRanksPerHost;
  bool are_together = true;
};
void simulate(simgrid::s4u::Engine& simulation, const Cluster& cluster,
              const std::function<void()>& run_rank);

}  // namespace growth
