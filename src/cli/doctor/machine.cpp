#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "base/cpus.hpp"
#include "base/fd.hpp"
#include "base/memory.hpp"
#include "cli/doctor/checks.hpp"
#include "kernels/isa.hpp"

namespace lockstep::cli {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::string size_text(std::size_t n_bytes) {
  return n_bytes >= 10 * 1024 * kMiB ? fmt::format("{} GiB", n_bytes / (1024 * kMiB))
                                     : fmt::format("{} MiB", n_bytes / kMiB);
}

Finding kernel() {
  utsname name{};
  if (uname(&name) != 0) return {"kernel", State::note, "unknown"};
  return {"kernel", State::good, fmt::format("{} {} {}", name.sysname, name.release, name.machine)};
}

Finding simd() {
  const kernels::Isa chosen = kernels::chosen_isa();
  kernels::Isa widest = kernels::Isa::scalar;
  for (const kernels::Isa isa : {kernels::Isa::avx2, kernels::Isa::avx512}) {
    if (kernels::is_supported(isa)) widest = isa;
  }
  if (chosen == widest) return {"simd", State::good, std::string(kernels::name_of(chosen))};
  return {
      "simd", State::note,
      fmt::format("{}, though the CPU has {}", kernels::name_of(chosen), kernels::name_of(widest)),
      "LOCKSTEP_SIMD limits it; unset it"};
}

Finding cores(int n_ranks) {
  const int allowed = base::n_usable_cores(base::allowed_cpus(), INT_MAX);
  const int online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const int quota = base::cpu_quota();
  const int usable = base::n_usable_cores();
  std::string text = fmt::format("{} of the machine's {} by affinity", allowed, online);
  if (quota < online) text += fmt::format(", {} by the cgroup's quota", quota);
  text += fmt::format(", for {} rank(s)", n_ranks);
  if (n_ranks <= usable) return {"cores", State::good, text};
  return {"cores", State::note, text,
          fmt::format("{} ranks share {} core(s); start {} or fewer, or allow more cores (taskset, "
                      "--cpus-per-task, the container's cpu limit)",
                      n_ranks, usable, usable)};
}

Finding memory() {
  const std::size_t available = base::available_memory();
  const auto limit = base::memory_limit();
  std::string text = fmt::format("{} available", size_text(available));
  text += limit ? fmt::format(", the cgroup may use {}", size_text(*limit))
                : ", no limit of the cgroup";
  if (std::min(available, limit.value_or(available)) >= 512 * kMiB) {
    return {"memory", State::good, text};
  }
  return {"memory", State::note, text,
          "less than 512 MiB: the kernel kills a rank that exceeds it (SIGKILL); raise the "
          "container's memory limit"};
}

std::string limit_text(rlim_t value, bool in_bytes) {
  if (value == RLIM_INFINITY) return "unlimited";
  return in_bytes ? size_text(value) : std::to_string(value);
}

Finding limit(const char* name, int resource, rlim_t enough, bool in_bytes,
              const std::string& advice) {
  rlimit value{};
  getrlimit(static_cast<__rlimit_resource>(resource), &value);
  const bool is_enough = value.rlim_cur >= enough;
  return {name, is_enough ? State::good : State::note, limit_text(value.rlim_cur, in_bytes),
          is_enough ? "" : advice};
}

Finding shared_memory() {
  const auto unavailable = [](const char* call) {
    return Finding{"shared memory", State::missing,
                   fmt::format("{}: {}", call, std::strerror(errno)),
                   "ranks that are processes share an anonymous file (memfd); allow memfd_create "
                   "in the sandbox, and raise ulimit -v"};
  };
  const base::UniqueFd fd(memfd_create("lockstep-doctor", MFD_CLOEXEC));
  if (!fd) return unavailable("memfd_create");
  if (ftruncate(fd.get(), 64 * kMiB) != 0) return unavailable("ftruncate");
  void* const at = mmap(nullptr, 64 * kMiB, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (at == MAP_FAILED) return unavailable("mmap");
  munmap(at, 64 * kMiB);
  return {"shared memory", State::good, "memfd works"};
}

/// lockstep does not need it; MPI libraries and PyTorch's loaders do.
Finding dev_shm() {
  struct statvfs info {};
  if (statvfs("/dev/shm", &info) != 0) {
    return {"/dev/shm", State::note, std::strerror(errno),
            "lockstep does not need it, MPI libraries may: mount a tmpfs there"};
  }
  const std::size_t free = info.f_bavail * info.f_frsize;
  if (free >= 128 * kMiB) return {"/dev/shm", State::good, size_text(free) + " free"};
  return {"/dev/shm", State::note, size_text(free) + " free",
          "lockstep does not need it, MPI libraries may: docker run --shm-size 1g"};
}

Finding sockets() {
  const base::UniqueFd local(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const base::UniqueFd ip(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in loopback{};
  loopback.sin_family = AF_INET;
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (!local) {
    return {
        "sockets", State::missing, fmt::format("no Unix socket: {}", std::strerror(errno)),
        "ranks started by srun, mpirun or torchrun connect through one; allow it in the sandbox"};
  }
  if (!ip || bind(ip.get(), reinterpret_cast<sockaddr*>(&loopback), sizeof loopback) != 0) {
    return {"sockets", State::note, fmt::format("no loopback address: {}", std::strerror(errno)),
            "`lockstep run` looks there for a free MASTER_PORT: ip link set lo up"};
  }
  return {"sockets", State::good, "Unix and loopback work"};
}

}  // namespace

Findings check_machine(int n_ranks) {
  constexpr bool kBytes = true;
  // The launcher holds about five descriptors per rank.
  const rlim_t files = static_cast<rlim_t>(64 + 8 * n_ranks);
  return {kernel(),
          simd(),
          cores(n_ranks),
          memory(),
          limit("locked memory", RLIMIT_MEMLOCK, 8 * kMiB, kBytes,
                "enough for lockstep; MPI over InfiniBand needs ulimit -l unlimited"),
          limit("open files", RLIMIT_NOFILE, files, !kBytes,
                fmt::format("`lockstep run -n {}` may need {}: ulimit -n {}", n_ranks, files,
                            std::max<rlim_t>(files, 1024))),
          limit("address space", RLIMIT_AS, RLIM_INFINITY, kBytes,
                "shared memory and libtorch map more than they use: ulimit -v unlimited"),
          shared_memory(),
          dev_shm(),
          sockets()};
}

}  // namespace lockstep::cli
