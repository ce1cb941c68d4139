#include "nn/c10d/c10d_rendezvous.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netdb.h>
#include <sys/socket.h>
#include <torch/version.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
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
#include <lockstep/error.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/no_sigpipe.hpp"
#include "nn/c10d/c10d_store.hpp"
#include "world/variables.hpp"

namespace lockstep::nn::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// How long the rank that serves the store stays for others after a failed rendezvous.
constexpr milliseconds kToldTime{1000};

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

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

[[noreturn]] void throw_no_store(const std::exception& error, const StoreAddress& at,
                                 const internal::World& world, const Call& call) {
  std::string text = fmt::format(
      "MASTER_ADDR is {}, MASTER_PORT is {}: {}: {}", at.host, at.port,
      serves_store(world) ? "rank 0 cannot serve the store there; if the port is in use, "
                            "choose another"
                          : "cannot join the other ranks there",
      first_line(error));
  if (has_agent_store()) {
    text += fmt::format(
        ". torchrun serves it (TORCHELASTIC_USE_AGENT_STORE is True), and a PyTorch of another "
        "version than this libtorch, {}, may speak another protocol: with TORCH_DISABLE_SHARE_"
        "RDZV_TCP_STORE=1 torchrun --rdzv-backend c10d (or --standalone) rank 0 serves it",
        TORCH_VERSION);
  }
  throw EngineError(context_of(call, world.rank), text);
}

/// A prefix of the store for this rendezvous only: after a restart by the launcher, or a second
/// init_dist, the keys of the first are still there.
StorePtr own_part(const StorePtr& store, const internal::World& world) {
  const std::string job =
      fmt::format("lockstep/{}", internal::variable("TORCHELASTIC_RESTART_COUNT").value_or("0"));
  const auto attempt = store->add(fmt::format("{}/attempt/{}", job, world.rank), 1);
  return c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}/{}", job, attempt), store);
}

/// How the ranks of a world meet at the store, and agree on whether all have come. The store is one
/// thread of rank 0: a rank asks for one key, and the less often the more ranks there are.
class Meeting {
 public:
  Meeting(const StorePtr& store, const StoreAddress& at, const internal::World& world,
          const Call& call)
      : store_(store), at_(at), world_(world), call_(call) {}

  /// Returns when every rank has joined. Throws the same TimeoutError on all that have, when the
  /// time of one of them ends.
  void wait(Clock::time_point end) {
    store_->set(key_of(world_.rank), bytes_of("1"));
    if (store_->add("joined/count", 1) == world_.size) conclude("");
    // Not Store::wait: in some versions only the text tells a timeout from a lost connection.
    while (!store_->check({kResult})) {
      if (Clock::now() > end) give_up(end);
      std::this_thread::sleep_for(interval_);
    }
    const std::vector<std::uint8_t> result = store_->get(kResult);
    const std::string missing(result.begin(), result.end());
    if (missing.empty()) return;
    store_->add("joined/told", 1);
    if (serves_store(world_)) stay_for_others();
    fail(missing + " did not join");
  }

 private:
  static inline const std::string kResult = "joined/result";

  static std::string key_of(int rank) { return fmt::format("joined/{}", rank); }
  static std::vector<std::uint8_t> bytes_of(std::string_view text) {
    return {text.begin(), text.end()};
  }

  /// The first conclusion is everybody's: which ranks are missing.
  void conclude(std::string_view missing) {
    if (store_->add("joined/conclusions", 1) == 1) store_->set(kResult, bytes_of(missing));
  }

  void give_up(Clock::time_point end) {
    if (Clock::now() > end + kPatience) fail("one stopped while it joined");
    std::vector<int> missing;
    for (int r = 0; r < world_.size; ++r) {
      if (!store_->check({key_of(r)})) missing.push_back(r);
    }
    if (!missing.empty()) {
      conclude(fmt::format("rank{} {}", missing.size() == 1 ? "" : "s", fmt::join(missing, ", ")));
    }
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw TimeoutError(
        context_of(call_, world_.rank),
        fmt::format("of {} ranks, {} at {}:{} within {:g} s", world_.size, what, at_.host, at_.port,
                    static_cast<double>(call_.timeout.count()) / 1000));
  }

  /// Until the others that have joined know the result, too.
  void stay_for_others() {
    for (const auto end = Clock::now() + kToldTime;
         Clock::now() < end && store_->add("joined/told", 0) < store_->add("joined/count", 0);) {
      std::this_thread::sleep_for(interval_);
    }
  }

  StorePtr store_;
  const StoreAddress& at_;
  const internal::World& world_;
  const Call& call_;
  const milliseconds interval_{std::max(2, world_.size / 10)};
};

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
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, world.rank, world.size);
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::GLOO,
                    c10::intrusive_ptr<c10d::Backend>(std::move(gloo)));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  return group;
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
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, world.rank, world.size);
  group->setBackend(at::kCUDA, c10d::ProcessGroup::BackendType::NCCL,
                    c10::intrusive_ptr<c10d::Backend>(std::move(nccl)));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::NCCL);
  return group;
#endif
}
#endif

}  // namespace

bool has_backend([[maybe_unused]] std::string_view backend) {
#ifdef LOCKSTEP_GLOO
  if (backend == "gloo") return true;
#endif
#ifdef LOCKSTEP_NCCL
  if (backend == "nccl") return true;
#endif
  return false;
}

std::shared_ptr<Wire> rendezvous([[maybe_unused]] std::string_view backend,
                                 const internal::World& world, const Call& barrier) {
  const auto start = Clock::now(), end = start + barrier.timeout;
  const StoreAddress at = store_address(barrier, world.rank);
  StorePtr whole, store;
  struct Forget {
    const StoreAddress& at;
    bool has_joined = false;
    ~Forget() {
      if (!has_joined) forget_store(at);
    }
  } forget{at};
  while (!store) {
    try {
      whole = connect_to_store(at, world, barrier.timeout);
      StorePtr part = own_part(whole, world);
      Meeting(part, at, world, barrier).wait(end);
      store = std::move(part);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      // It may be the previous world's store, which rank 0 is about to close.
      const bool is_last = serves_store(world) || Clock::now() > std::min(end, start + kPatience);
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
    forget.has_joined = true;
    return Wire::make(std::move(group), whole);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw EngineError(
        context_of(barrier, world.rank),
        fmt::format("{} cannot connect the ranks that joined at {}:{} (GLOO_SOCKET_IFNAME "
                    "chooses the network interface): {}",
                    backend, at.host, at.port, first_line(error)));
  }
}

}  // namespace lockstep::nn::detail
