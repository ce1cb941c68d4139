#include <lockstep/nn/checkpoint.hpp>

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/objects.hpp>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>

#include "base/atomic_file.hpp"
#include "base/hash.hpp"
#include "nn/error.hpp"
#include "nn/training/checkpoint_file.hpp"
#include "world/elastic_file.hpp"

namespace lockstep::nn {
namespace {

/// Written by save_checkpoint after the archive: archive readers search backwards for its end and
/// skip this.
struct Footer {
  std::array<char, 8> magic{'l', 'o', 'c', 'k', 's', 't', 'e', 'p'};
  std::uint64_t hash = 0;  // of the archive
};

void add_footer(std::string& bytes) {
  Footer footer;
  footer.hash = base::hash_of_bytes(bytes.data(), bytes.size());
  bytes.append(reinterpret_cast<const char*>(&footer), sizeof footer);
}

/// libtorch does not check the checksums in its archives. Other writers add no footer.
void check_footer(const std::string& path, const std::string& bytes) {
  Footer footer;
  if (bytes.size() < sizeof footer) return;
  const std::size_t n_bytes = bytes.size() - sizeof footer;
  std::memcpy(&footer, bytes.data() + n_bytes, sizeof footer);
  if (footer.magic != Footer().magic || footer.hash == base::hash_of_bytes(bytes.data(), n_bytes))
    return;
  throw std::runtime_error(path + " is damaged: its bytes differ from those that were saved");
}

/// Runs f on rank 0; throws its failure on every rank. The others wait as long as f goes on: it is
/// given a function to call after each step, and the group's timeout is the limit of a step.
template <class F>
void on_rank_0(const char* operation, const Group& group, std::source_location where, F f) {
  enum State : std::int32_t { kWorking, kDone, kFailed };
  const auto agree_on = [&](std::int32_t state) {
    broadcast(std::span(&state, 1), /*src=*/0, group, {}, where);
    return state;
  };
  std::optional<std::string> failure;
  std::int32_t state = kDone;
  if (group.rank() == 0) {
    failure = failure_text([&] { f([&] { agree_on(kWorking); }); });
    state = agree_on(failure ? kFailed : kDone);
  } else {
    while ((state = agree_on(kWorking)) == kWorking) continue;
  }
  if (state == kDone) return;
  broadcast_object(failure, /*src=*/0, group, {}, where);
  throw UsageError(context_of(operation, group, where),
                   (group.size() == 1 ? "" : "rank 0 failed: ") + failure.value_or(""));
}

}  // namespace

void save_archive(const char* operation, const std::string& path,
                  const std::function<void(torch::serialize::OutputArchive&)>& write,
                  const Group& group, std::source_location where) {
  on_rank_0(operation, group, where, [&](const auto& report_progress) {
    internal::ElasticFile file(path);
    std::string bytes = archive_bytes([&](torch::serialize::OutputArchive& archive) {
      write(archive);
      report_progress();
    });
    report_progress();
    add_footer(bytes);
    const std::string_view all = bytes;
    for (std::size_t at = 0; at < all.size(); at += base::kIoChunkBytes) {
      file.write(all.substr(at, base::kIoChunkBytes));
      // Otherwise the kernel may delay all writeback until the final fsync.
      if (all.size() > base::kIoChunkBytes) file.flush_to_disk();
      report_progress();
    }
    file.commit_to_disk(context_of(operation, group, where));
  });
}

std::string read_archive(const char* operation, const std::string& path, const Group& group,
                         std::source_location where) {
  std::string bytes;
  on_rank_0(operation, group, where, [&](const auto& report_progress) {
    bytes = internal::read_elastic_file(path, report_progress);
    check_footer(path, bytes);
  });
  broadcast_object(bytes, /*src=*/0, group, {}, where);
  return bytes;
}

torch::serialize::InputArchive parse_archive(const std::string& bytes,
                                             c10::optional<c10::Device> device) {
  torch::serialize::InputArchive archive;
  const auto failure = failure_text([&] { archive.load_from(bytes.data(), bytes.size(), device); });
  if (failure) throw std::runtime_error("not an archive of torch::save: " + *failure);
  return archive;
}

void save_checkpoint(const std::string& path,
                     const std::function<void(torch::serialize::OutputArchive&)>& write,
                     const Group& group, std::source_location where) {
  save_archive("save_checkpoint", path, write, group, where);
}

void load_checkpoint(const std::string& path,
                     const std::function<void(torch::serialize::InputArchive&)>& read,
                     const Group& group, std::source_location where) {
  const std::string bytes = read_archive("load_checkpoint", path, group, where);
  const auto fail = [&](const std::string& text) {
    throw UsageError(context_of("load_checkpoint", group, where),
                     fmt::format("cannot load {}: {}", path, text));
  };
  torch::serialize::InputArchive archive;
  if (const auto failure = failure_text([&] { archive = parse_archive(bytes); })) fail(*failure);
  try {
    read(archive);
  } catch (const c10::Error&) {
    fail(failure_text([] { throw; }).value_or(""));
  }
}

}  // namespace lockstep::nn
