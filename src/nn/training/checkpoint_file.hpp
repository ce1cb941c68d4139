#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <c10/util/Optional.h>
#include <torch/serialize/archive.h>

#include <exception>
#include <functional>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <optional>
#include <source_location>
#include <sstream>
#include <string>
#include <utility>

#include "base/exception.hpp"

namespace lockstep::nn {

/// What f throws, in one sentence; nullopt if it does not.
template <class F>
std::optional<std::string> failure_text(F f) {
  try {
    f();
    return std::nullopt;
  } catch (const c10::Error& error) {
    // "exists INTERNAL ASSERT FAILED at ..., please report a bug to PyTorch"
    const std::string text = error.what_without_backtrace();
    const std::size_t assertion = text.find(" INTERNAL ASSERT FAILED");
    if (assertion == std::string::npos) return text;
    return "its contents are not what libtorch expects: " + text.substr(0, assertion);
  } catch (const Error& error) {
    return error.text();
  } catch (...) {
    return base::text_of(std::current_exception());
  }
}

/// The bytes of an archive with what `write` puts into it.
template <class F>
std::string archive_bytes(F write) {
  torch::serialize::OutputArchive archive;
  write(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return std::move(stream).str();
}

/// Makes tensors on `device`; nullopt: where they were saved. Throws std::runtime_error.
torch::serialize::InputArchive parse_archive(const std::string& bytes,
                                             c10::optional<c10::Device> device = c10::nullopt);

/// Implements save_checkpoint and save_training; `operation`: the name in errors.
void save_archive(const char* operation, const std::string& path,
                  const std::function<void(torch::serialize::OutputArchive&)>& write,
                  const Group& group, std::source_location where);

/// Returns the contents of rank 0's file on every rank. Verifies the checksum if there is one.
std::string read_archive(const char* operation, const std::string& path, const Group& group,
                         std::source_location where);

}  // namespace lockstep::nn
