#include "engines/ucx/ucx.hpp"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <lockstep/error.hpp>
#include <optional>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/fd.hpp"
#include "base/patience.hpp"
#include "base/wait_policy.hpp"
#include "engines/message/message_engine.hpp"
#include "engines/message/module_transport.hpp"
#include "engines/modules.hpp"
#include "engines/shared/bootstrap/launcher_socket.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/shared/segment/membership.hpp"
#include "engines/ucx/ucx_abi.hpp"
#include "group/failure.hpp"
#include "group/leave_on_exception.hpp"

namespace lockstep::ucx {
namespace {

using internal::Failure;
using message::TransportError;

/// What a rank tells the others. Versions of UCX may differ in what they send.
struct Address {
  std::array<char, 32> library;
  LockstepUcxAddress data;
  LockstepUcxAddress control;
};
static_assert(sizeof(Address) <= shared::kMaxAddressBytes);

struct CloseWorker {
  const LockstepUcx* ucx;
  void operator()(void* worker) const { ucx->close(worker); }
};
using Worker = std::unique_ptr<void, CloseWorker>;

bool lacks_descriptors() {
  const base::UniqueFd one(::dup(STDERR_FILENO));
  return !one && (errno == EMFILE || errno == ENFILE);
}

/// UCX ends the process where it gets no descriptor. A worker has about 10, and 2 for each rank
/// that it talks to: those of its own part, and the leaders of others.
void check_descriptors(const ErrorContext& context) {
  constexpr rlim_t kNeeded = 128;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  const std::filesystem::directory_iterator open_files("/proc/self/fd");
  const auto n_open = static_cast<rlim_t>(std::distance(begin(open_files), end(open_files)));
  if (n_open + kNeeded <= limit.rlim_cur) return;
  throw SystemError(context, EMFILE,
                    fmt::format("a group over UCX wants {} descriptors, and {} of {} are open; "
                                "raise the limit on open files (ulimit -n)",
                                kNeeded, n_open, limit.rlim_cur));
}

/// The ranks of one Group.
class Transport final : public message::ModuleTransport {
 public:
  Transport(const LockstepUcx& ucx, message::ModuleGroup group, base::WaitPolicy policy, int rank,
            int size, std::shared_ptr<const shared::Membership> launcher)
      : ModuleTransport(ucx.transport, std::move(group), policy, rank, size,
                        /*why_one_thread=*/{}),
        ucx_(ucx),
        launcher_(std::move(launcher)),
        opened_(nullptr, {&ucx}) {}

  std::optional<Failure> verdict() const override {
    if (!launcher_->is_over()) return std::nullopt;
    return launcher_->why_over();
  }
  std::chrono::milliseconds time_of_reason() const noexcept override {
    const std::chrono::milliseconds time(launcher_->segment().header().verdict_ms);
    return std::max<std::chrono::milliseconds>(time, base::patience::kVerdict);
  }

  std::vector<std::byte> open_part() override;
  std::size_t address_bytes() const noexcept override { return sizeof(LockstepUcxAddress); }
  std::unique_ptr<message::Transport> split(const std::vector<int>& members, std::int32_t channel,
                                            std::span<const std::byte> addresses) override;

 private:
  TransportError error_of(int code) const override {
    const int peer = ucx_.failed_peer(group());
    if (peer < 0) return ModuleTransport::error_of(code);
    return TransportError(
        fmt::format("{}; {}", message::text_of(ucx_.transport, code),
                    lacks_descriptors()
                        ? "no descriptor is left: raise the limit on open files (ulimit -n)"
                        : "`lockstep run` names no lost rank: it may have exited with code 0, its "
                          "host may be cut off, or a firewall may be between the hosts"),
        peer);
  }

  const LockstepUcx& ucx_;
  const std::shared_ptr<const shared::Membership> launcher_;
  Worker opened_;  // of the next split()
};

std::vector<std::byte> Transport::open_part() {
  try {
    check_descriptors({});
  } catch (const SystemError& error) {
    throw TransportError(error.text());
  }
  void* worker = nullptr;
  check(ucx_.open(&worker));
  opened_.reset(worker);
  std::vector<std::byte> address(sizeof(LockstepUcxAddress));
  LockstepUcxAddress own{};
  check(ucx_.address(worker, &own));
  std::memcpy(address.data(), &own, sizeof own);
  return address;
}

std::unique_ptr<message::Transport> Transport::split(const std::vector<int>& members,
                                                     std::int32_t channel,
                                                     std::span<const std::byte> addresses) {
  std::vector<LockstepUcxAddress> of_members(members.size());
  std::memcpy(of_members.data(), addresses.data(), addresses.size());
  const auto mine = static_cast<int>(std::ranges::find(members, rank()) - members.begin());
  void* part = nullptr;
  check(ucx_.part(group(), opened_.get(), of_members.data(), members.data(), members.size(), mine,
                  channel, &part));
  static_cast<void>(opened_.release());
  message::ModuleGroup owned(part, ucx_.transport.release);
  return std::make_unique<Transport>(ucx_, std::move(owned), policy(), mine,
                                     static_cast<int>(members.size()), launcher_);
}

/// As a guest in the program: UCX would handle its signals, replace its malloc and mmap, write to
/// its standard output, and wait minutes in connect() to a host that is cut off. It reads these
/// when it is loaded, and when a worker is made.
void set_defaults() {
  constexpr std::pair<const char*, const char*> kSettings[] = {
      {"UCX_HANDLE_ERRORS", "none"}, {"UCX_ERROR_SIGNALS", ""},  {"UCX_MEM_EVENTS", "n"},
      {"UCX_VFS_ENABLE", "n"},       {"UCX_LOG_LEVEL", "fatal"}, {"UCX_LOG_FILE", "stderr"},
      {"UCX_TCP_CONN_NB", "y"}};
  for (const auto& [name, value] : kSettings) ::setenv(name, value, /*overwrite=*/0);
}

const LockstepUcx& load(const std::string& path, const ErrorContext& context) {
  static const LockstepUcx& loaded = [&]() -> const LockstepUcx& {
    set_defaults();
    return engines::load_module<LockstepUcx>(
        path, {kLockstepUcxSymbol, kLockstepUcxVersion, "a UCX module"}, context);
  }();
  return loaded;
}

void check(const LockstepUcx& ucx, int code, const ErrorContext& context) {
  if (code != 0) throw EngineError(context, message::text_of(ucx.transport, code));
}

Worker open_worker(const LockstepUcx& ucx, LockstepUcxAddress& address,
                   const ErrorContext& context) {
  void* worker = nullptr;
  check(ucx, ucx.open(&worker), context);
  Worker opened(worker, {&ucx});
  check(ucx, ucx.address(worker, &address), context);
  return opened;
}

}  // namespace

engines::Module find_module(const std::optional<std::string>& named) {
  if (named == "off") return {{}, "is not used: LOCKSTEP_UCX is 'off'"};
  if (named) {
    std::error_code ignored;
    const bool is_file =
        named->find('/') != named->npos && std::filesystem::exists(*named, ignored);
    if (is_file) return {*named, {}};
    return {{},
            fmt::format("is not available: LOCKSTEP_UCX is '{}'; it takes the path of a "
                        "liblockstep-ucx.so, or off",
                        *named)};
  }
  std::string path = engines::module_file("ucx", "ucx");
  const bool is_found = !path.empty();
  return {
      std::move(path),
      is_found
          ? ""
          : "needs its module liblockstep-ucx.so: the package lockstep-ucx, or a build where UCX's "
            "headers are"};
}

std::unique_ptr<Engine> join(internal::World& world, const Call& barrier) {
  const ErrorContext context = context_of(barrier, world.rank);
  const std::string& segment = world.segment.value();
  const int socket = shared::launcher_socket(segment);
  if (socket < 0) {
    throw UsageError(context, "this process is a fork of a rank, which alone can join a world");
  }
  // The launcher ends the world in this host's memory, where no wait of the shared engine may look.
  world.host->segment().header().has_joined_other_engine.store(true, std::memory_order_relaxed);
  check_descriptors(context);
  const LockstepUcx& ucx = load(find_module(world.env.ucx).path, context);
  if (const int code = ucx.start(world.ucx_transports.c_str()); code != 0) {
    throw EngineError(
        context,
        fmt::format("{} for UCX_NET_DEVICES={} and UCX_TLS={}; UCX lists devices by /sys/class/net",
                    message::text_of(ucx.transport, code), world.ucx_devices,
                    world.ucx_transports));
  }
  Address own{};
  std::string_view(ucx.transport.library()).copy(own.library.data(), own.library.size() - 1);
  Worker data = open_worker(ucx, own.data, context);
  Worker control = open_worker(ucx, own.control, context);
  static std::atomic<std::uint64_t> n_worlds = 0;  // whose addresses this process got
  const shared::Addresses all = shared::exchange_addresses(
      socket, world.rank, world.size,
      world.is_elastic ? world.regrouped.generation : n_worlds.load(),
      std::string(reinterpret_cast<const char*>(&own), sizeof own), barrier);
  if (!world.is_elastic) ++n_worlds;
  world.hosts = all.hosts;
  std::vector<LockstepUcxAddress> data_addresses;
  std::vector<LockstepUcxAddress> control_addresses;
  for (std::size_t r = 0; r < all.by_rank.size(); ++r) {
    Address address{};
    all.by_rank[r].copy(reinterpret_cast<char*>(&address), sizeof address);
    address.library.back() = '\0';
    if (std::string_view(address.library.data()) != own.library.data()) {
      throw MismatchError(context,
                          fmt::format("rank {} has {}, rank {} has {}; install one version of UCX "
                                      "on all hosts",
                                      world.rank, own.library.data(), r, address.library.data()));
    }
    data_addresses.push_back(address.data);
    control_addresses.push_back(address.control);
  }
  void* group = nullptr;
  check(ucx,
        ucx.world(data.get(), control.get(), data_addresses.data(), control_addresses.data(),
                  data_addresses.size(), world.rank, all.key, message::Transport::kWorld, &group),
        context);
  static_cast<void>(data.release());
  static_cast<void>(control.release());
  message::ModuleGroup owned(group, ucx.transport.release);
  auto engine = message::make(
      "ucx",
      std::make_unique<Transport>(ucx, std::move(owned),
                                  base::WaitPolicy::of_messages(world.local_size, all.n_cores),
                                  world.rank, world.size, world.host));
  internal::leave_on_exception(*engine, [&] { engine->run(barrier); });
  return engine;
}

}  // namespace lockstep::ucx
