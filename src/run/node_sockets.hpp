#pragma once

#include <netdb.h>
#include <poll.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "run/options.hpp"
#include "run/signals.hpp"

/// Sockets between the launchers of several nodes, and waits for them.
namespace lockstep::run {

/// A signal ended the launcher while it waited for the other nodes.
struct Interrupted {
  int signal;
};

/// For poll(), at most a second.
int timeout_to(std::chrono::steady_clock::time_point when);
/// Polls until `until`, for a second at most. Throws Interrupted.
void poll_or_interrupt(std::vector<pollfd> entries, std::chrono::steady_clock::time_point until,
                       const Signals& signals);

struct FreeAddresses {
  void operator()(addrinfo* addresses) const { ::freeaddrinfo(addresses); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

/// Null for `host`: every address of this machine. Throws UsageError.
Addresses resolve(const char* host, const NodesOptions& options);
/// Throws SystemError.
base::UniqueFd open_socket(const addrinfo& address);
/// Returns the errno value of the failure; 0: the socket is connected. Throws Interrupted.
int connect(int fd, const addrinfo& address, std::chrono::steady_clock::time_point deadline,
            const Signals& signals);
/// Empty if the host of --rdzv is another machine, or the port is in use: see errno. A literal
/// address is the only one to listen at. A name listens at every address of this machine, which may
/// resolve it to another address than the other nodes do: Debian's /etc/hosts gives 127.0.1.1.
base::UniqueFd listen_at(const NodesOptions& options);
/// Detects a vanished machine: TCP keepalive gives up after some 20 s.
void enable_keepalive(int fd);
/// The interface with the connection's own address; empty if there is none.
std::string interface_of(int fd);

}  // namespace lockstep::run
