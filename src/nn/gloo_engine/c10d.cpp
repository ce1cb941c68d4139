#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <torch/version.h>
#include <unistd.h>
// Gloo's headers are a separate package (Debian: libgloo-dev). Any version will do: c10d's header
// only includes them, and no Gloo function is called here.
#if defined(USE_C10D_GLOO) && __has_include(<gloo/algorithm.h>)
#define LOCKSTEP_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif
// As are NCCL's (Python's package index: nvidia-nccl), of a libtorch from there.
#if defined(USE_C10D_NCCL) && __has_include(<nccl.h>)
#define LOCKSTEP_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <exception>
#include <iterator>
#include <lockstep/error.hpp>
#include <lockstep/nn/c10d.hpp>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/no_sigpipe.hpp"
#include "engines/catalog.hpp"
#include "engines/message/message_engine.hpp"
#include "group/leave_on_exception.hpp"
#include "nn/gloo_engine/c10d_error.hpp"
#include "nn/gloo_engine/c10d_rendezvous.hpp"
#include "nn/gloo_engine/c10d_store.hpp"
#include "nn/gloo_engine/c10d_transport.hpp"
#include "world/session.hpp"
#include "world/variables.hpp"

namespace lockstep::nn::detail {
namespace {

using Clock = lockstep::detail::JobClock;
using std::chrono::milliseconds;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

std::string variable(const char* name, const Call& call, int rank) {
  const auto value = internal::variable(name);
  if (!value || value->empty()) {
    throw UsageError(context_of(call, rank),
                     fmt::format("{} is not set; the ranks join at MASTER_ADDR:MASTER_PORT, the "
                                 "address of rank 0's host and a free port there",
                                 name));
  }
  return *value;
}

StoreAddress store_address(const Call& call, int rank) {
  StoreAddress at{variable("MASTER_ADDR", call, rank), 0};
  const std::string port = variable("MASTER_PORT", call, rank);
  const auto parsed = std::from_chars(port.data(), port.data() + port.size(), at.port);
  if (parsed.ec != std::errc() || parsed.ptr != port.data() + port.size() || at.port == 0) {
    throw UsageError(context_of(call, rank),
                     fmt::format("MASTER_PORT is '{}'; it must be a port from 1 to 65535", port));
  }
  return at;
}

[[noreturn]] void throw_no_store(const std::exception& error, const StoreAddress& at,
                                 const internal::World& world, const Call& call) {
  std::string text = fmt::format(
      "MASTER_ADDR is {}, MASTER_PORT is {}: {}: {}", at.host, at.port,
      serves_store(world) ? "rank 0 cannot serve the store there; if the port is in use, "
                            "choose another"
                          : "cannot join the other ranks there",
      c10d_error(error).first_line());
  if (has_agent_store()) {
    text += fmt::format(
        ". torchrun serves it (TORCHELASTIC_USE_AGENT_STORE is True), and a PyTorch of another "
        "version than this libtorch, {}, may speak another protocol: with TORCH_DISABLE_SHARE_"
        "RDZV_TCP_STORE=1 torchrun --rdzv-backend c10d (or --standalone) rank 0 serves it",
        TORCH_VERSION);
  }
  throw EngineError(context_of(call, world.rank), text);
}

#ifdef LOCKSTEP_GLOO
/// This host's address on the route to the rendezvous; empty if unknown.
std::string address_towards(const StoreAddress& at) {
  const Addresses addresses = resolve(at, SOCK_DGRAM);
  for (const addrinfo* found = addresses.get(); found != nullptr; found = found->ai_next) {
    const int fd = ::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t n_bytes = sizeof(own);
    std::array<char, NI_MAXHOST> text{};
    // Connecting a datagram socket sends nothing: it only selects a route.
    const bool is_known = ::connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
                          ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &n_bytes) == 0 &&
                          ::getnameinfo(reinterpret_cast<sockaddr*>(&own), n_bytes, text.data(),
                                        text.size(), nullptr, 0, NI_NUMERICHOST) == 0;
    ::close(fd);
    if (is_known) return text.data();
  }
  return {};
}

GroupPtr make_gloo(const StorePtr& store, const StoreAddress& at, const internal::World& world,
                   milliseconds timeout) {
  using Gloo = c10d::ProcessGroupGloo;
  const base::NoSigpipe no_sigpipe;  // inherited by the threads that it starts
  const auto options = Gloo::Options::create(timeout);
  options->threads = 1;  // for collectives, which are not used
  const auto interface = internal::variable("GLOO_SOCKET_IFNAME");
  const std::string address = address_towards(at);
  options->devices.push_back(interface         ? Gloo::createDeviceForInterface(*interface)
                             : address.empty() ? Gloo::createDefaultDevice()
                                               : Gloo::createDeviceForHostname(address));
  auto gloo = c10::make_intrusive<Gloo>(store, world.rank, world.size, options);
#if TORCH_VERSION_MAJOR < 2
  return gloo;
#else
  return group_over(std::move(gloo), at::kCPU, c10d::ProcessGroup::BackendType::GLOO, store);
#endif
}
#endif

#ifdef LOCKSTEP_NCCL
GroupPtr make_nccl(const StorePtr& store, const internal::World& world, milliseconds timeout) {
  using Nccl = c10d::ProcessGroupNCCL;
  const auto options = Nccl::Options::create();
  options->timeout = timeout;
  auto nccl = c10::make_intrusive<Nccl>(store, world.rank, world.size, options);
#if TORCH_VERSION_MAJOR < 2
  return nccl;
#else
  return group_over(std::move(nccl), at::kCUDA, c10d::ProcessGroup::BackendType::NCCL, store);
#endif
}
#endif

/// Whether this libtorch has the backend.
bool has_backend([[maybe_unused]] std::string_view backend) {
#ifdef LOCKSTEP_GLOO
  if (backend == "gloo") return true;
#endif
#ifdef LOCKSTEP_NCCL
  if (backend == "nccl") return true;
#endif
  return false;
}

/// Joins the world as its rank, over a new process group of `backend` ("gloo", "nccl"). The ranks
/// join at a c10d::TCPStore at MASTER_ADDR:MASTER_PORT. Throws UsageError if these are unset or the
/// port is invalid, EngineError with c10d's text, TimeoutError naming the ranks that did not join.
std::shared_ptr<Wire> connect([[maybe_unused]] std::string_view backend,
                              const internal::World& world, const Call& barrier) {
  const auto start = Clock::now(), end = start + barrier.timeout;
  const StoreAddress at = store_address(barrier, world.rank);
  StorePtr whole, store;
  bool has_joined = false;
  const auto forget = c10::make_scope_exit([&] {
    if (!has_joined) forget_store(at);
  });
  for (int attempt = 1; !store; ++attempt) {
    try {
      const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
      whole = connect_to_store(at, world, std::max(left, milliseconds(1)));
      Rendezvous rendezvous(
          whole,
          {.context = context_of(barrier, world.rank),
           .size = world.size,
           .timeout = barrier.timeout,
           .keys = "lockstep/" + internal::variable("TORCHELASTIC_RESTART_COUNT").value_or("0"),
           .action = fmt::format("join at {}:{}", at.host, at.port)});
      rendezvous.join(end);
      store = rendezvous.store();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      // It may be the previous world's store, which rank 0 is about to close: the next one gets an
      // attempt even if this one stayed silent for kPatience.
      const auto now = Clock::now();
      const bool is_last =
          serves_store(world) || now > end || (attempt > 1 && now > start + kPatience);
      if (is_last) throw_no_store(error, at, world, barrier);
      std::this_thread::sleep_for(milliseconds(50));
    }
  }
  try {
    [[maybe_unused]] const auto left =
        std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(end - Clock::now()));
    GroupPtr group;
#ifdef LOCKSTEP_GLOO
    if (backend == "gloo") group = make_gloo(store, at, world, left);
#endif
#ifdef LOCKSTEP_NCCL
    if (backend == "nccl") group = make_nccl(store, world, left);
#endif
    has_joined = true;
    return Wire::make(std::move(group), whole);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw EngineError(
        context_of(barrier, world.rank),
        fmt::format("{} cannot connect the ranks that joined at {}:{} (GLOO_SOCKET_IFNAME "
                    "chooses the network interface): {}",
                    backend, at.host, at.port, c10d_error(error).first_line()));
  }
}

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
engines::JoinedEngine join(internal::World& world, const Call& barrier) {
  constexpr std::string_view kName = kIsGloo ? "gloo" : "nccl";
  auto engine = message::make(std::string(kName),
                              std::make_unique<Transport>(connect(kName, world, barrier)));
  // No rank may proceed, and possibly exit, while peers are still connecting.
  internal::leave_on_exception(*engine, [&] { engine->run(barrier); });
  return {.engine = std::move(engine)};
}

// Gloo sends ordinary memory, NCCL that of devices.
constexpr engines::Entry kEntries[] = {
    {"gloo", available<true>, join<true>, /*is_between_hosts=*/true},
    {"nccl", available<false>, join<false>}};

}  // namespace
}  // namespace lockstep::nn::detail

namespace lockstep {

Group nn::make_group(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::string name,
                     std::chrono::milliseconds timeout) {
  std::string backend = process_group->getBackendName();
  auto wire = detail::Wire::make(std::move(process_group), c10::intrusive_ptr<c10d::Store>());
  return Group(
      message::make(std::move(backend), std::make_unique<detail::Transport>(std::move(wire))),
      std::move(name), timeout,
      internal::session() != nullptr ? internal::session()->world().env.check : Env::read().check);
}

}  // namespace lockstep

extern "C" void lockstep_nn_engines(std::vector<lockstep::engines::Entry>& entries) {
  using lockstep::nn::detail::kEntries;
  entries.insert(entries.end(), std::begin(kEntries), std::end(kEntries));
}
