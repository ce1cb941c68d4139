#include "engines/hierarchical/hosts.hpp"

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
#include "base/process.hpp"
#include "base/text.hpp"
#include "group/step.hpp"

namespace lockstep::hierarchical {
namespace {

/// A rank's host id.
struct HostId {
  std::array<char, 40> boot_id{};   // empty: unknown, treated as a separate host
  std::uint64_t pid_namespace = 0;  // 0: unknown
  std::uint64_t nonce = 0;
  std::int32_t pid = 0;
};

base::AbstractAddress address_of(std::uint64_t nonce) {
  return base::AbstractAddress(fmt::format("lockstep-host-{:016x}", nonce));
}

base::UniqueFd open_socket() {
  base::UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw SystemError({.operation = "init_dist"}, errno, "cannot open a Unix socket");
  return fd;
}

/// A listening socket, to which ranks of this host can connect by the nonce while it is open.
base::UniqueFd listen_for_probe(std::uint64_t nonce, int n_ranks) {
  base::UniqueFd fd = open_socket();
  const base::AbstractAddress address = address_of(nonce);
  if (::bind(fd.get(), address.get(), address.n_bytes()) != 0 ||
      ::listen(fd.get(), /*backlog=*/n_ranks) != 0) {
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
  base::copy_text(mine.boot_id, base::boot_id());
  mine.pid_namespace = base::namespace_of("pid");
  mine.nonce = draw_nonce();
  mine.pid = ::getpid();
  // Open before any rank can know the nonce, and until all ranks have probed for it.
  const base::UniqueFd probe_listener = listen_for_probe(mine.nonce, global.size());
  const std::vector<HostId> ids = internal::gather_values(global, call, mine);
  // The connections are never accepted, and the system limits the backlog (net.core.somaxconn). So
  // each rank connects only to lower ranks in its own PID namespace, of which the next is on its
  // host: a listener gets at most one connection. Only where /proc does not tell the namespaces, a
  // listener may get one of every higher rank.
  int next_lower = global.rank() - 1;
  for (; next_lower >= 0; --next_lower) {
    const HostId& id = ids[static_cast<std::size_t>(next_lower)];
    if (mine.boot_id[0] != '\0' && id.boot_id == mine.boot_id &&
        id.pid_namespace == mine.pid_namespace && is_same_host(id)) {
      break;
    }
  }
  std::vector<int> hosts = internal::gather_values(global, call, next_lower);
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const int lower = hosts[rank];
    hosts[rank] = lower < 0 ? static_cast<int>(rank) : hosts[static_cast<std::size_t>(lower)];
  }
  return hosts;
}

}  // namespace lockstep::hierarchical
