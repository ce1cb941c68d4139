#include "nn/gloo_engine/c10d_store.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "base/fd.hpp"
#include "world/variables.hpp"

namespace lockstep::nn::detail {
namespace {

using std::chrono::milliseconds;

/// A server that sends unsolicited data does so within this time.
constexpr milliseconds kSilence{50};

/// The stores served by this process, by address, until it exits. Closing a store at the end of its
/// world would reset the connections of ranks that join the next world early, and libtorch 1.13
/// terminates a process whose own store thread sees such a reset (std::terminate).
struct ServedStores {
  std::mutex mutex;  // guards the map
  std::map<std::string, StorePtr> by_address;
};
ServedStores& served_stores() {
  static auto* const stores = new ServedStores;  // no destructor at exit
  return *stores;
}
std::string key_of(const StoreAddress& at) { return fmt::format("{}:{}", at.host, at.port); }

/// Throws if the listener sends unsolicited data, which no store does: a thread of libtorch 1.13
/// would take it for a length and terminate the process.
void expect_silence(const StoreAddress& at, milliseconds timeout) {
  const Addresses found = resolve(at, SOCK_STREAM);
  for (const addrinfo* to = found.get(); to != nullptr; to = to->ai_next) {
    const base::UniqueFd fd(::socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto limit = std::min(timeout, milliseconds(kPatience));
    const timeval patience{limit.count() / 1000, limit.count() % 1000 * 1000};
    // On Linux connect obeys SO_SNDTIMEO too.
    if (fd) ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (!fd || ::connect(fd.get(), to->ai_addr, to->ai_addrlen) != 0) continue;
    pollfd readable{fd.get(), POLLIN, 0};
    char first = 0;
    if (::poll(&readable, 1, static_cast<int>(kSilence.count())) == 1 &&
        ::recv(fd.get(), &first, 1, MSG_DONTWAIT) == 1) {
      throw std::runtime_error("the server there is not a TCPStore: it sends unsolicited data");
    }
    return;
  }
}

}  // namespace

bool has_agent_store() { return internal::variable("TORCHELASTIC_USE_AGENT_STORE") == "True"; }

bool serves_store(const internal::World& world) { return world.rank == 0 && !has_agent_store(); }

void forget_store(const StoreAddress& at) {
  ServedStores& served = served_stores();
  const std::lock_guard lock(served.mutex);
  served.by_address.erase(key_of(at));
}

Addresses resolve(const StoreAddress& at, int socket_type) {
  addrinfo hints{};
  hints.ai_socktype = socket_type;
  addrinfo* found = nullptr;
  const auto port = std::to_string(at.port);
  if (::getaddrinfo(at.host.c_str(), port.c_str(), &hints, &found) != 0) found = nullptr;
  return {found, ::freeaddrinfo};
}

StorePtr connect_to_store(const StoreAddress& at, const internal::World& world,
                          milliseconds timeout) {
  ServedStores& served = served_stores();
  if (serves_store(world)) {
    const std::lock_guard lock(served.mutex);
    const auto found = served.by_address.find(key_of(at));
    if (found != served.by_address.end()) return found->second;
  } else {
    expect_silence(at, timeout);
  }
  c10d::TCPStoreOptions options;
  options.port = at.port;
  options.isServer = serves_store(world);
  options.waitWorkers = false;
  // TCPStore counts whole seconds and needs one for a retry.
  options.timeout = std::max(timeout, milliseconds(2000));
  StorePtr store = c10::make_intrusive<c10d::TCPStore>(at.host, options);
  // An answer proves that this is a store with our protocol. If it is not, c10d waits forever, and
  // so does this thread.
  std::packaged_task<void()> hello([store = store]() mutable {
    store->add("lockstep/hello", 1);
    store.reset();  // the port is free as soon as its user leaves
  });
  auto answer = hello.get_future();
  std::thread(std::move(hello)).detach();
  if (answer.wait_for(std::min(timeout, kPatience)) != std::future_status::ready) {
    throw std::runtime_error("the server there does not answer as a TCPStore does");
  }
  answer.get();
  if (serves_store(world)) {
    const std::lock_guard lock(served.mutex);
    served.by_address.emplace(key_of(at), store);
  }
  return store;
}

}  // namespace lockstep::nn::detail
