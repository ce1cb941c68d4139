#include "engines/mpi/mpi.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <lockstep/error.hpp>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/cpus.hpp"
#include "base/wait_policy.hpp"
#include "engines/message/message_engine.hpp"
#include "engines/message/module_transport.hpp"
#include "engines/modules.hpp"
#include "engines/mpi/mpi_abi.hpp"
#include "group/failure.hpp"
#include "group/leave_on_exception.hpp"

namespace lockstep::mpi {
namespace {

namespace fs = std::filesystem;

using Kind = internal::Failure::Kind;
using ControlKind = message::ControlMessage::Kind;

/// For one host, so that a piece is still in the cache when it is reduced: docs/mpi.md has others.
constexpr std::size_t kPieceBytes = 512 << 10;

struct Hosts {
  base::WaitPolicy policy;  ///< by the ranks and the cores of this host
  bool are_one;             ///< all ranks of the world are on one host
};

/// The ranks of one Group.
class Transport final : public message::ModuleTransport {
 public:
  Transport(const LockstepMpi& mpi, message::ModuleGroup group, std::int32_t last_channel,
            Hosts hosts, int rank, int size, std::string why_one_thread)
      : ModuleTransport(mpi.transport, std::move(group), hosts.policy, rank, size,
                        std::move(why_one_thread)),
        mpi_(mpi),
        last_channel_(last_channel),
        hosts_(hosts) {}

  bool is_on_one_host() const noexcept override { return hosts_.are_one; }
  std::size_t piece_bytes() const noexcept override {
    return hosts_.are_one ? kPieceBytes : message::Transport::piece_bytes();
  }
  std::int32_t last_channel() const noexcept override { return last_channel_; }
  std::unique_ptr<message::Transport> split(const std::vector<int>& members, std::int32_t channel,
                                            std::span<const std::byte> /*addresses*/) override {
    const auto mine = static_cast<int>(std::ranges::find(members, rank()) - members.begin());
    void* part = nullptr;
    check(mpi_.part(group(), members.data(), members.size(), channel, &part));
    return std::make_unique<Transport>(
        mpi_, message::ModuleGroup(part, mpi_.transport.release), last_channel_, hosts_, mine,
        static_cast<int>(members.size()), std::string(why_one_thread()));
  }

 private:
  void note(const message::ControlMessage& message) const noexcept override {
    // After a mismatch all ranks are present.
    const bool is_harmless =
        message.kind == ControlKind::failure
            ? message.failure.kind == Kind::mismatch
            : message.kind != ControlKind::departure || message.failure.kind == Kind::peer_left;
    if (!is_harmless) mpi_.skip_finalize();
  }

  const LockstepMpi& mpi_;
  const std::int32_t last_channel_;
  const Hosts hosts_;
};

}  // namespace

engines::Module find_module(const std::string& mpi) {
  if (mpi.empty()) return {{}, "needs ranks that mpirun (or srun with PMIx) started"};
  if (mpi.find('/') != std::string::npos) {
    std::error_code ignored;
    if (fs::exists(mpi, ignored)) return {mpi, {}};
    return {{}, fmt::format("is not available: LOCKSTEP_MPI is '{}', which does not exist", mpi)};
  }
  if (mpi != "openmpi" && mpi != "mpich") {
    return {{},
            fmt::format("is not available: LOCKSTEP_MPI is '{}'; it takes openmpi, mpich, or "
                        "the path of a liblockstep-mpi-*.so",
                        mpi)};
  }
  const std::string path = engines::module_file("mpi", mpi);
  if (!path.empty()) return {path, {}};
  return {{},
          fmt::format("needs its module liblockstep-mpi-{}.so, which is built where that MPI's "
                      "headers are; LOCKSTEP_MPI may give its path",
                      mpi)};
}

std::unique_ptr<Engine> join(internal::World& world, const Call& barrier) {
  const ErrorContext context = context_of(barrier, world.rank);
  const std::string module = find_module(world.mpi).path;
  const auto& mpi = engines::load_module<LockstepMpi>(
      module, {kLockstepMpiSymbol, kLockstepMpiVersion, "an MPI module"}, context);
  int rank = 0;
  int n_ranks = 0;
  if (const int code = mpi.start(&rank, &n_ranks); code != 0) {
    throw EngineError(context, message::text_of(mpi.transport, code));
  }
  if (rank != world.rank || n_ranks != world.size) {
    throw UsageError(
        context, fmt::format("MPI says rank {} of {}, the environment rank {} of {}: is {} the MPI "
                             "whose mpirun started this? LOCKSTEP_MPI=openmpi|mpich chooses",
                             rank, n_ranks, world.rank, world.size, mpi.transport.library()));
  }
  std::string why_one_thread;
  std::int32_t is_that_thread = 0;
  if (const char* const level = mpi.one_thread(&is_that_thread); level != nullptr) {
    why_one_thread = fmt::format(
        "MPI was initialised with {}: only the thread that did so may call it. Let the program "
        "call MPI_Init_thread with MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE, or let init_dist "
        "initialise MPI",
        level);
    if (is_that_thread == 0)
      throw UsageError(context, "called on another thread; " + why_one_thread);
  }
  void* all = nullptr;
  std::int32_t last_channel = 0;
  if (const int code = mpi.world(Transport::kWorld, &all, &last_channel); code != 0) {
    throw EngineError(context, message::text_of(mpi.transport, code));
  }
  message::ModuleGroup group(all, mpi.transport.release);
  base::CpuMask cores = base::allowed_cpus();
  int n_host_ranks = 0;
  if (const int code = mpi.host_ranks(cores.data(), cores.size(), &n_host_ranks); code != 0) {
    throw EngineError(context, message::text_of(mpi.transport, code));
  }
  const int n_cores = base::n_usable_cores(cores, base::cpu_quota());
  const Hosts hosts{.policy = base::WaitPolicy::of_messages(n_host_ranks, n_cores),
                    .are_one = n_host_ranks == n_ranks};
  auto engine =
      message::make("mpi", std::make_unique<Transport>(mpi, std::move(group), last_channel, hosts,
                                                       rank, n_ranks, std::move(why_one_thread)));
  internal::leave_on_exception(*engine, [&] { engine->run(barrier); });
  return engine;
}

}  // namespace lockstep::mpi
