#include "engines/hierarchical/hosts.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <lockstep/error.hpp>
#include <string>

#include "base/abstract_socket.hpp"
#include "base/fd.hpp"

namespace lockstep::hierarchical {
namespace {

/// A rank's host id.
struct HostId {
  std::array<char, 40> boot_id{};  // empty: unknown, treated as a separate host
  std::uint64_t nonce = 0;
  std::int32_t pid = 0;
};

std::array<char, 40> boot_id() {
  std::array<char, 40> id{};
  const base::UniqueFd file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  if (!file || ::read(file.get(), id.data(), 36) != 36) id.fill('\0');
  return id;
}

base::AbstractAddress address_of(std::uint64_t nonce) {
  return base::AbstractAddress(fmt::format("lockstep-host-{:016x}", nonce));
}

base::UniqueFd open_socket() {
  base::UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw SystemError({.operation = "init_dist"}, errno, "cannot open a Unix socket");
  return fd;
}

/// A listening socket, to which ranks of this host can connect by the nonce while it is open.
base::UniqueFd listen_for_probe(std::uint64_t nonce) {
  base::UniqueFd fd = open_socket();
  const base::AbstractAddress address = address_of(nonce);
  if (::bind(fd.get(), address.get(), address.n_bytes()) != 0 ||
      ::listen(fd.get(), /*backlog=*/1) != 0) {
    throw SystemError({.operation = "init_dist"}, errno, "cannot listen at a Unix socket");
  }
  return fd;
}

bool is_same_host(const HostId& id) {
  const base::UniqueFd fd = open_socket();
  const base::AbstractAddress address = address_of(id.nonce);
  if (::connect(fd.get(), address.get(), address.n_bytes()) != 0) {
    // Nobody listens under this name here, or a sandbox forbids it.
    if (errno == ECONNREFUSED || errno == EACCES || errno == EPERM) return false;
    throw SystemError({.operation = "init_dist"}, errno,
                      fmt::format("cannot find out whether process {} is on this host", id.pid));
  }
  const ucred peer = base::peer_of(fd.get());
  return peer.uid == ::geteuid() && peer.pid == id.pid;
}

}  // namespace

std::uint64_t draw_nonce() {
  std::uint64_t nonce = 0;
  if (::getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) {
    throw SystemError({.operation = "init_dist"}, errno, "cannot draw a random number");
  }
  return nonce;
}

std::vector<int> find_hosts(Engine& global, const Call& call) {
  HostId mine;
  mine.boot_id = boot_id();
  mine.nonce = draw_nonce();
  mine.pid = ::getpid();
  // Open before any rank can know the nonce, and until all ranks have probed for it.
  const base::UniqueFd probe_listener = listen_for_probe(mine.nonce);
  const std::vector<HostId> ids = gather_values(global, call, mine);
  // The connections are never accepted, and the system limits the backlog (net.core.somaxconn). So
  // each rank connects only to the next lower rank of its host, and gets at most one connection
  // itself.
  int next_lower = global.rank() - 1;
  for (; next_lower >= 0; --next_lower) {
    const HostId& id = ids[static_cast<std::size_t>(next_lower)];
    if (mine.boot_id[0] != '\0' && id.boot_id == mine.boot_id && is_same_host(id)) break;
  }
  std::vector<int> hosts = gather_values(global, call, next_lower);
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const int lower = hosts[rank];
    hosts[rank] = lower < 0 ? static_cast<int>(rank) : hosts[static_cast<std::size_t>(lower)];
  }
  return hosts;
}

}  // namespace lockstep::hierarchical
