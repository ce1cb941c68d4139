#include "record/flight_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>

#include "base/fd.hpp"
#include "base/fork_guard.hpp"
#include "base/text.hpp"
#include "base/version.hpp"
#include "record/mapped_file.hpp"

namespace lockstep::internal {
namespace {

struct FlightFile {
  /// Written last.
  static constexpr std::array<char, 4> kMagic = {'l', 's', 'f', 'l'};

  std::array<char, 4> magic;
  std::uint32_t layout;  ///< base::layout_version()
  std::array<char, 256> host;
  FlightRecord record;
};

}  // namespace

std::shared_ptr<FlightRecord> make_flight_file(const std::string& dir, int rank) noexcept try {
  std::string path = fmt::format("{}/rank-{}.flight", dir, rank);
  ::unlink(path.c_str());  // not truncated: another job may have it mapped
  const base::UniqueFd fd(
      ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return nullptr;
  const bool has_room = reserve_file(fd.get(), 0, sizeof(FlightFile)) == 0;
  auto file = has_room ? map_file<FlightFile>(fd.get(), PROT_READ | PROT_WRITE) : nullptr;
  if (!file) {
    ::unlink(path.c_str());
    return nullptr;
  }
  file->record.rank = rank;
  ::gethostname(file->host.data(), file->host.size() - 1);
  file->layout = base::layout_version();
  std::copy(FlightFile::kMagic.begin(), FlightFile::kMagic.end(), file->magic.begin());
  FlightRecord* const record = &file->record;
  return {record, [file = std::move(file), path = std::move(path),
                   process = base::ForkGuard()](FlightRecord*) {
            if (!process.is_forked_child()) ::unlink(path.c_str());
          }};
} catch (const std::bad_alloc&) {
  return nullptr;
}

std::optional<std::string> read_flight_file(const std::string& path) {
  const base::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // no FIFO
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode) ||
      status.st_size != sizeof(FlightFile)) {
    return std::nullopt;
  }
  const auto file = map_file<FlightFile>(fd.get(), PROT_READ);
  if (!file || file->magic != FlightFile::kMagic || file->layout != base::layout_version() ||
      file->record.is_written.load(std::memory_order_relaxed) != 0) {
    return std::nullopt;
  }
  return json_of(file->record, "wrote no record itself: it was killed, or is still running",
                 base::text_in(file->host));
}

}  // namespace lockstep::internal
