#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string_view>

#include "cli/doctor/checks.hpp"

namespace lockstep::cli {
namespace {

/// Longer than MPI_MAX_LIBRARY_VERSION_STRING of any of these libraries.
constexpr std::size_t kVersionSize = 16384;

struct MpiLibrary {
  const char* name;
  const char* file;
};

Finding mpi(const MpiLibrary& library) {
  const std::string name = fmt::format("mpi {}", library.name);
  const std::unique_ptr<void, int (*)(void*)> handle(dlopen(library.file, RTLD_LAZY | RTLD_LOCAL),
                                                     dlclose);
  if (!handle) return {name, State::note, fmt::format("no {}", library.file)};
  // MPI allows this call before MPI_Init.
  using GetLibraryVersion = int(char*, int*);
  auto* const version =
      reinterpret_cast<GetLibraryVersion*>(dlsym(handle.get(), "MPI_Get_library_version"));
  if (version == nullptr) return {name, State::note, "reports no version"};
  std::string text(kVersionSize, '\0');
  int length = 0;
  if (version(text.data(), &length) != 0) return {name, State::note, "no version"};
  text.resize(std::min(text.find_first_of(std::string_view("\n\0", 2)), text.size()));
  std::replace(text.begin(), text.end(), '\t', ' ');
  return {name, State::good, text};
}

Finding ucx() {
  constexpr const char* kFile = "libucp.so.0";
  const std::unique_ptr<void, int (*)(void*)> handle(dlopen(kFile, RTLD_LAZY | RTLD_LOCAL),
                                                     dlclose);
  if (!handle) {
    return {"ucx", State::note, fmt::format("no {}", kFile),
            "for several hosts without MPI install libucx0 and lockstep-ucx"};
  }
  auto* const version =
      reinterpret_cast<const char* (*)()>(dlsym(handle.get(), "ucp_get_version_string"));
  return {"ucx", State::good, fmt::format("UCX {}", version == nullptr ? "?" : version())};
}

constexpr const char* kTorchVersion = LOCKSTEP_TORCH_VERSION;

Finding libtorch() {
  const std::string_view version(kTorchVersion);
  if (!version.empty()) {
    return {"libtorch", State::good,
            fmt::format("this lockstep is built with lockstep::nn for {}", version)};
  }
  return {
      "libtorch", State::note, "this build has no lockstep::nn",
      "C++: for SyncBatchNorm and DistributedDataParallel build with libtorch (LOCKSTEP_NN=ON); "
      "Python: install lockstep-torch"};
}

}  // namespace

Findings check_libraries() {
  return {libtorch(), mpi({"Open MPI", "libmpi.so.40"}), mpi({"MPICH", "libmpich.so.12"}),
          mpi({"Intel MPI", "libmpi.so.12"}), ucx()};
}

}  // namespace lockstep::cli
