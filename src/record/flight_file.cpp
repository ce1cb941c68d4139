#include "record/flight_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>

#include "base/fd.hpp"
#include "base/file_limit.hpp"
#include "base/text.hpp"
#include "base/version.hpp"

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

FlightFile* map(int fd, int protection) noexcept {
  void* const memory = ::mmap(nullptr, sizeof(FlightFile), protection, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<FlightFile*>(memory);
}

}  // namespace

std::shared_ptr<FlightRecord> make_flight_file(const std::string& dir, int rank) noexcept try {
  std::string path = fmt::format("{}/rank-{}.flight", dir, rank);
  ::unlink(path.c_str());  // not truncated: another job may have it mapped
  const base::UniqueFd fd(
      ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return nullptr;
  // Reserved before use, so that a full disk does not cause SIGBUS.
  const bool has_room = !base::exceeds_file_limit(sizeof(FlightFile)) &&
                        ::posix_fallocate(fd.get(), 0, sizeof(FlightFile)) == 0;
  FlightFile* const file = has_room ? map(fd.get(), PROT_READ | PROT_WRITE) : nullptr;
  if (file == nullptr) {
    ::unlink(path.c_str());
    return nullptr;
  }
  file->record.rank = rank;
  ::gethostname(file->host.data(), file->host.size() - 1);
  file->layout = base::layout_version();
  std::copy(FlightFile::kMagic.begin(), FlightFile::kMagic.end(), file->magic.begin());
  return {&file->record, [file, path = std::move(path), pid = ::getpid()](FlightRecord*) {
            ::munmap(file, sizeof(FlightFile));
            if (::getpid() == pid) ::unlink(path.c_str());  // a fork of a rank is not a rank
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
  const std::shared_ptr<FlightFile> file(map(fd.get(), PROT_READ), [](FlightFile* mapped) {
    if (mapped != nullptr) ::munmap(mapped, sizeof(FlightFile));
  });
  if (!file || file->magic != FlightFile::kMagic || file->layout != base::layout_version() ||
      file->record.is_written.load(std::memory_order_relaxed) != 0) {
    return std::nullopt;
  }
  return json_of(file->record, "wrote no record itself: it was killed, or is still running",
                 base::text_in(file->host));
}

}  // namespace lockstep::internal
