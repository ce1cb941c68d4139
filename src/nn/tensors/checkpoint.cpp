#include <lockstep/nn/checkpoint.hpp>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <lockstep/error.hpp>
#include <lockstep/objects.hpp>
#include <sstream>
#include <system_error>

#include "base/whole_file.hpp"
#include "nn/error.hpp"
#include "nn/tensors/hash.hpp"

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

/// Written by save_checkpoint after the archive: archive readers search backwards for its end and
/// skip this.
struct Footer {
  std::array<char, 8> magic{'l', 'o', 'c', 'k', 's', 't', 'e', 'p'};
  std::uint64_t hash = 0;  // of the archive
};

void add_footer(std::string& bytes) {
  Footer footer;
  footer.hash = hash_of_bytes(bytes.data(), bytes.size());
  bytes.append(reinterpret_cast<const char*>(&footer), sizeof footer);
}

/// libtorch does not check the checksums in its archives. Other writers add no footer.
void check_footer(const std::string& path, const std::string& bytes) {
  Footer footer;
  if (bytes.size() < sizeof footer) return;
  const std::size_t n_bytes = bytes.size() - sizeof footer;
  std::memcpy(&footer, bytes.data() + n_bytes, sizeof footer);
  if (footer.magic != Footer().magic || footer.hash == hash_of_bytes(bytes.data(), n_bytes)) return;
  throw std::runtime_error(path + " is damaged: its bytes differ from those that were saved");
}

/// Runs f on rank 0; throws its failure on every rank.
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

/// "a module, an optimizer": each kind is a letter.
std::string describe_parts(std::string_view kinds) {
  std::string text;
  for (const char kind : kinds) {
    if (!text.empty()) text += ", ";
    switch (kind) {
      case 'm': text += "a module"; break;
      case 'o': text += "an optimizer"; break;
      case 'n': text += "a number"; break;
      default: text += "an object";
    }
  }
  return text.empty() ? "nothing" : text;
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
    std::string bytes = std::move(stream).str();
    add_footer(bytes);
    base::WholeFile file(path, /*mode=*/0666);
    file.write(bytes);
    file.commit_to_disk();
  });
}

void load_checkpoint(const std::string& path,
                     const std::function<void(torch::serialize::InputArchive&)>& read,
                     const Group& group, std::source_location where) {
  std::string bytes;
  on_rank_0("load_checkpoint", group, where, [&] {
    bytes = read_file(path);
    check_footer(path, bytes);
  });
  broadcast_object(bytes, /*src=*/0, group, {}, where);
  std::istringstream stream(std::move(bytes));
  torch::serialize::InputArchive archive;
  try {
    archive.load_from(stream);
  } catch (const c10::Error& error) {
    throw UsageError(context_of("load_checkpoint", group, where),
                     fmt::format("{} is not an archive of torch::save: {}", path,
                                 error.what_without_backtrace()));
  }
  read(archive);
}

void save_training(const std::string& path, std::initializer_list<TrainingPart> parts,
                   const Group& group, std::source_location where) {
  save_checkpoint(
      path,
      [&](torch::serialize::OutputArchive& archive) {
        std::string kinds;
        for (const TrainingPart& part : parts) {
          torch::serialize::OutputArchive one;
          part.save(one);
          archive.write(fmt::format("part_{}", kinds.size()), one);
          kinds += part.kind();
        }
        archive.write("kinds", c10::IValue(kinds));
      },
      group, where);
}

void load_training(const std::string& path, std::initializer_list<TrainingPart> parts,
                   const Group& group, std::source_location where) {
  load_checkpoint(
      path,
      [&](torch::serialize::InputArchive& archive) {
        std::string expected;
        for (const TrainingPart& part : parts) expected += part.kind();
        c10::IValue kinds;
        if (!archive.try_read("kinds", kinds) || !kinds.isString() ||
            kinds.toStringRef() != expected) {
          throw UsageError(
              context_of("load_training", group, where),
              fmt::format(
                  "{} has {}, expected {}: give load_training what save_training was given, "
                  "in the same order",
                  path, kinds.isString() ? describe_parts(kinds.toStringRef()) : "no such parts",
                  describe_parts(expected)));
        }
        std::size_t i = 0;
        for (const TrainingPart& part : parts) {
          torch::serialize::InputArchive one;
          archive.read(fmt::format("part_{}", i++), one);
          part.load(one);
        }
      },
      group, where);
}

void detail::save_optimizer(const torch::optim::Optimizer& optimizer,
                            torch::serialize::OutputArchive& archive) {
  torch::serialize::OutputArchive state;
  optimizer.save(state);
  archive.write("state", state);
  std::size_t i = 0;
  for (const auto& group : optimizer.param_groups()) {
    torch::serialize::OutputArchive options;
    if (group.has_options()) group.options().serialize(options);
    archive.write(fmt::format("options_{}", i++), options);
  }
}

void detail::load_optimizer(torch::optim::Optimizer& optimizer,
                            torch::serialize::InputArchive& archive) {
  torch::serialize::InputArchive state;
  archive.read("state", state);
  optimizer.state().clear();  // load does not touch what the archive lacks
  optimizer.load(state);
  std::size_t i = 0;
  for (auto& group : optimizer.param_groups()) {
    torch::serialize::InputArchive options;
    archive.read(fmt::format("options_{}", i++), options);
    if (group.has_options()) group.options().serialize(options);
  }
}

}  // namespace lockstep::nn
