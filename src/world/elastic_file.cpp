#include "world/elastic_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "base/fd.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "world/session.hpp"

namespace lockstep::internal {
namespace {

constexpr const char* kPart = ".part";

/// The end of a file.
struct Stamp {
  std::array<char, 8> magic{'l', 'o', 'c', 'k', 'g', 'e', 'n', '1'};
  std::uint64_t job = 0;
  std::uint64_t generation = 0;
};

/// nullopt: of no elastic job over several nodes.
std::optional<Stamp> own_stamp(const shared::Elastic* elastic) {
  if (elastic == nullptr || !elastic->has_nodes()) return std::nullopt;
  return Stamp{.job = elastic->job(), .generation = elastic->generation()};
}

std::optional<Stamp> stamp_in(std::string_view end) {
  Stamp stamp;
  if (end.size() < sizeof stamp) return std::nullopt;
  std::memcpy(&stamp, end.data() + end.size() - sizeof stamp, sizeof stamp);
  if (stamp.magic != Stamp().magic) return std::nullopt;
  return stamp;
}

std::optional<Stamp> stamp_of(const std::string& path) {
  const base::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  std::array<char, sizeof(Stamp)> end{};
  const off_t size = fd ? ::lseek(fd.get(), 0, SEEK_END) : -1;
  const auto n_bytes = static_cast<ssize_t>(end.size());
  if (size < n_bytes || ::pread(fd.get(), end.data(), end.size(), size - n_bytes) != n_bytes) {
    return std::nullopt;
  }
  return stamp_in({end.data(), end.size()});
}

/// Ranks of two generations may write at once.
std::string part_of(std::uint64_t generation) { return fmt::format(".{}{}", generation, kPart); }

}  // namespace

ElasticFile::ElasticFile(const std::string& path) : ElasticFile(path, elastic()) {}

ElasticFile::ElasticFile(const std::string& path, std::shared_ptr<const shared::Elastic> elastic)
    : AtomicFile(path, /*mode=*/0666,
                 own_stamp(elastic.get()) ? part_of(elastic->generation()) : kPart),
      path_(path),
      elastic_(std::move(elastic)) {}

void ElasticFile::commit_to_disk(const ErrorContext& context) {
  const auto mine = own_stamp(elastic_.get());
  if (mine) write({reinterpret_cast<const char*>(&*mine), sizeof *mine});
  flush_to_disk();
  if (mine) {
    const auto there = stamp_of(path_);
    if (there && there->job == mine->job && there->generation > mine->generation) {
      throw PeerLost(context, fmt::format("{} is of generation {} of the world already, and this "
                                          "rank is in generation {}",
                                          path_, there->generation, mine->generation));
    }
  }
  if (elastic_) elastic_->check_lease(context);
  AtomicFile::commit_to_disk();
  if (!mine) return;
  constexpr std::uint64_t kMostLeft = 16;  // by ranks that were killed while they wrote
  for (auto earlier = mine->generation - std::min(mine->generation, kMostLeft);
       earlier < mine->generation; ++earlier) {
    ::unlink((path_ + part_of(earlier)).c_str());
  }
}

std::string read_elastic_file(const std::string& path, const std::function<void()>& after_piece) {
  std::string bytes = base::read_regular_file(path, after_piece);
  if (stamp_in(bytes)) bytes.resize(bytes.size() - sizeof(Stamp));
  return bytes;
}

}  // namespace lockstep::internal
