#include <lockstep/nn/checkpoint.hpp>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <lockstep/error.hpp>
#include <lockstep/objects.hpp>
#include <sstream>
#include <system_error>

#include "base/whole_file.hpp"
#include "nn/error.hpp"

namespace lockstep::nn {
namespace {

[[noreturn]] void fail(const std::string& what, const std::string& path) {
  throw std::system_error(errno, std::generic_category(), what + " " + path);
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
    base::WholeFile file(path, /*mode=*/0666);
    file.write(std::move(stream).str());
    file.commit_to_disk();
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
