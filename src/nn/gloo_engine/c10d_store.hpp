#pragma once

#include <netdb.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "group/world.hpp"
#include "nn/gloo_engine/c10d_rendezvous.hpp"

namespace lockstep::nn::detail {

struct StoreAddress {
  std::string host;
  std::uint16_t port;
};

/// True if torchrun's agent serves the store, across restarts of the ranks.
bool has_agent_store();
/// Whether this rank serves the store of the rendezvous.
bool serves_store(const internal::World& world);

/// The store at that address, which this process serves if it must. Throws std::exception if there
/// is none, or if the server there does not answer as a TCPStore.
StorePtr connect_to_store(const StoreAddress& at, const internal::World& world,
                          std::chrono::milliseconds timeout);
/// After a failed rendezvous: its ranks may count their attempts differently.
void forget_store(const StoreAddress& at);

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;
/// Null if the host is unknown.
Addresses resolve(const StoreAddress& at, int socket_type);

}  // namespace lockstep::nn::detail
