#include "run/rank_environment.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "base/fd.hpp"
#include "base/number.hpp"
#include "run/errors.hpp"
#include "world/variables.hpp"

namespace lockstep::run {
namespace {

void take_free_port(RankLayout& placement) {
  base::UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t n_bytes = sizeof address;
  const int reuse = 1;
  if (!fd || bind(fd.get(), generic, n_bytes) != 0 ||
      // After bind, which would otherwise share a port that another launcher holds.
      setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse) != 0 ||
      getsockname(fd.get(), generic, &n_bytes) != 0) {
    throw system_error("cannot find a free port for MASTER_PORT");
  }
  placement.master_port = ntohs(address.sin_port);
  placement.port_holder = std::make_shared<const base::UniqueFd>(std::move(fd));
}

bool has_infiniband() {
  const std::filesystem::path devices = "/sys/class/infiniband";
  std::error_code ignored;
  return std::filesystem::exists(devices, ignored) && !std::filesystem::is_empty(devices, ignored);
}

}  // namespace

void choose_master_port(RankLayout& placement) {
  const auto value = internal::variable("MASTER_PORT");
  if (!value) return take_free_port(placement);
  placement.master_port = base::parse_number<std::uint16_t>(*value).value_or(0);
  if (placement.master_port == 0) {
    throw usage_error(fmt::format(
        "MASTER_PORT is '{}'; expected a port from 1 to 65535 (unset it to get a free one)",
        *value));
  }
}

std::vector<std::string> rank_environment(const WorldEnvironment& world, int local_rank,
                                          int socket) {
  const RankLayout& placement = world.placement;
  std::vector<std::string> result = {
      fmt::format("RANK={}", placement.first_rank + local_rank),
      fmt::format("WORLD_SIZE={}", placement.world_size),
      fmt::format("LOCAL_RANK={}", local_rank),
      fmt::format("LOCAL_WORLD_SIZE={}", world.n_ranks),
      fmt::format("GROUP_RANK={}", placement.node_rank),
      fmt::format("GROUP_WORLD_SIZE={}", placement.n_nodes),
      // All ranks have one role, as without torchrun's --role.
      "ROLE_NAME=default",
      fmt::format("ROLE_RANK={}", placement.first_rank + local_rank),
      fmt::format("ROLE_WORLD_SIZE={}", placement.world_size),
      fmt::format("TORCHELASTIC_RUN_ID={}", placement.run_id),
      fmt::format("TORCHELASTIC_RESTART_COUNT={}", world.n_restarts),
      fmt::format("TORCHELASTIC_MAX_RESTARTS={}", world.max_restarts),
      fmt::format("MASTER_ADDR={}", placement.master_addr),
      fmt::format("MASTER_PORT={}", placement.master_port),
      fmt::format("LOCKSTEP_SEGMENT={}:{}{}", world.segment, socket,
                  world.is_replacement ? ":next" : ""),
      fmt::format("LOCKSTEP_RESTART={}", world.n_restarts),
  };
  if (!internal::variable("OMP_NUM_THREADS")) {
    result.push_back(fmt::format("OMP_NUM_THREADS={}", world.n_threads));
  }
  // UCX would take any interface, also one without a route to the other nodes. Where there is
  // InfiniBand it chooses.
  if (!placement.interface.empty() && !internal::variable("UCX_NET_DEVICES") && !has_infiniband()) {
    result.push_back(fmt::format("UCX_NET_DEVICES={}", placement.interface));
  }
  const std::size_t n_own = result.size();
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view variable(*entry);
    const std::string_view name = variable.substr(0, variable.find('=') + 1);
    const bool replaced = std::any_of(
        result.begin(), result.begin() + static_cast<std::ptrdiff_t>(n_own),
        [name](const std::string& own) { return !name.empty() && own.starts_with(name); });
    if (!replaced) result.emplace_back(variable);
  }
  return result;
}

}  // namespace lockstep::run
