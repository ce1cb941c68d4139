#include "engines/modules.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <vector>

namespace lockstep::engines {
namespace {

namespace fs = std::filesystem;

/// The folders in which the loader looks for this program's libraries, including its run path.
std::vector<fs::path> library_folders() {
  void* const program = ::dlopen(nullptr, RTLD_LAZY);
  Dl_serinfo size{};
  if (program == nullptr || ::dlinfo(program, RTLD_DI_SERINFOSIZE, &size) != 0) return {};
  const std::unique_ptr<void, decltype(&std::free)> room(std::malloc(size.dls_size), std::free);
  auto* const info = static_cast<Dl_serinfo*>(room.get());
  if (info == nullptr) return {};
  *info = size;
  if (::dlinfo(program, RTLD_DI_SERINFO, info) != 0) return {};
  std::vector<fs::path> folders;
  for (unsigned i = 0; i < info->dls_cnt; ++i) folders.emplace_back(info->dls_serpath[i].dls_name);
  return folders;
}

/// Beside the command of a Python package: lib/python3.11/site-packages/lockstep.
std::string in_python_package(const fs::path& bin, const std::string& name) {
  std::error_code ignored;
  for (fs::directory_iterator at(bin / "../lib", ignored), end; at != end; at.increment(ignored)) {
    if (!at->path().filename().string().starts_with("python3")) continue;
    for (const char* const packages : {"site-packages", "dist-packages"}) {
      const fs::path module = at->path() / packages / "lockstep" / name;
      if (fs::exists(module, ignored)) return module.string();
    }
  }
  return {};
}

constexpr char kOwnAddress = 0;  // in the program or the shared library that contains this code

}  // namespace

std::string module_file(const std::string& engine, const std::string& library) {
  const std::string name = engine == library ? fmt::format("liblockstep-{}.so", engine)
                                             : fmt::format("liblockstep-{}-{}.so", engine, library);
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored);
  const fs::path beside = program.parent_path() / "../lib/lockstep" / name;
  if (!program.empty() && fs::exists(beside, ignored)) return beside.string();
  for (const fs::path& folder : library_folders()) {
    if (fs::exists(folder / name, ignored)) return (folder / name).string();
  }
  if (Dl_info own{}; ::dladdr(&kOwnAddress, &own) != 0) {
    const fs::path folder = fs::path(own.dli_fname).parent_path();
    for (const fs::path& module : {folder / name, folder / "lockstep" / name}) {
      if (fs::exists(module, ignored)) return module.string();
    }
  }
  const fs::path prefix = LOCKSTEP_MODULE_DIR;
  if (!prefix.empty() && fs::exists(prefix / name, ignored)) return (prefix / name).string();
  return program.empty() ? std::string() : in_python_package(program.parent_path(), name);
}

void* address_in_module(const std::string& file, const char* symbol, const ErrorContext& context) {
  // Open MPI's plugins resolve the library's symbols in the program's global scope.
  void* const library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw EngineError(context, fmt::format("cannot load {}", ::dlerror()));
  return ::dlsym(library, symbol);
}

}  // namespace lockstep::engines
