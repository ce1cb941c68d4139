#include <lockstep/nn/checkpoint.hpp>

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <lockstep/error.hpp>
#include <lockstep/objects.hpp>
#include <sstream>
#include <system_error>

#include "base/fd.hpp"
#include "nn/error.hpp"

namespace lockstep::nn {
namespace {

[[noreturn]] void fail(const std::string& what, const std::string& path) {
  throw std::system_error(errno, std::generic_category(), what + " " + path);
}

base::UniqueFd open_file(const std::string& path, int flags) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  if (fd < 0) fail("open", path);
  return base::UniqueFd(fd);
}

void bring_to_disk(const base::UniqueFd& fd, const std::string& path) {
  if (::fsync(fd.get()) != 0) fail("fsync", path);
}

/// A kill leaves at most `path`.part, which the next save overwrites.
void replace_file(const std::string& path, const std::string& bytes) {
  const std::string part = path + ".part";
  try {
    const base::UniqueFd fd = open_file(part, O_WRONLY | O_CREAT | O_TRUNC);
    for (std::size_t n_written = 0; n_written < bytes.size();) {
      const ssize_t n = ::write(fd.get(), bytes.data() + n_written, bytes.size() - n_written);
      if (n < 0 && errno != EINTR) fail("write", part);
      if (n > 0) n_written += static_cast<std::size_t>(n);
    }
    bring_to_disk(fd, part);
    std::filesystem::rename(part, path);
  } catch (...) {
    ::unlink(part.c_str());
    throw;
  }
  // The rename is in the folder.
  const std::string folder = std::filesystem::absolute(path).parent_path().string();
  bring_to_disk(open_file(folder, O_RDONLY | O_DIRECTORY), folder);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("open", path);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  if (file.bad()) fail("read", path);
  return bytes;
}

/// Does it on rank 0; throws its failure on every rank.
template <class F>
void on_rank_0(const char* operation, const Group& group, std::source_location where, F f) {
  std::string failure;
  if (group.rank() == 0) {
    try {
      f();
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }
  broadcast_object(failure, /*src=*/0, group, {}, where);
  if (failure.empty()) return;
  throw UsageError(context_of(operation, group, where), "rank 0 failed: " + failure);
}

}  // namespace

void save_checkpoint(const std::string& path,
                     const std::function<void(torch::serialize::OutputArchive&)>& write,
                     const Group& group, std::source_location where) {
  on_rank_0("save_checkpoint", group, where, [&] {
    torch::serialize::OutputArchive archive;
    write(archive);
    std::ostringstream stream;
    archive.save_to(stream);
    replace_file(path, std::move(stream).str());
  });
}

void load_checkpoint(const std::string& path,
                     const std::function<void(torch::serialize::InputArchive&)>& read,
                     const Group& group, std::source_location where) {
  std::string bytes;
  on_rank_0("load_checkpoint", group, where, [&] { bytes = read_file(path); });
  broadcast_object(bytes, /*src=*/0, group, {}, where);
  std::istringstream stream(std::move(bytes));
  torch::serialize::InputArchive archive;
  try {
    archive.load_from(stream);
  } catch (const c10::Error& error) {
    throw UsageError(
        context_of("load_checkpoint", group, where),
        fmt::format("{} is no archive of torch::save: {}", path, error.what_without_backtrace()));
  }
  read(archive);
}

}  // namespace lockstep::nn
