#include "nn/python/message_work.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace lockstep::python {
namespace {

template <std::size_t n>
bool has_any(std::string_view text, const std::array<std::string_view, n>& parts) {
  return std::ranges::any_of(
      parts, [text](std::string_view part) { return text.find(part) != std::string_view::npos; });
}

}  // namespace

MessageWork::MessageWork(Inner inner, ErrorContext context, int peer, c10d::OpType type,
                         const char* title, const std::vector<at::Tensor>& tensors)
    : Work(context.rank, type, title, tensors),
      inner_(std::move(inner)),
      context_(std::move(context)),
      peer_(peer) {}

std::exception_ptr MessageWork::failure(const std::exception& error) const {
  constexpr std::array<std::string_view, 5> kClosed = {
      "closed by peer", "reset by peer", "Broken pipe", "Socket closed", "Connection refused"};
  constexpr std::array<std::string_view, 4> kLate = {"Timed out", "timed out", "timeout",
                                                     "Timeout"};
  const std::string_view text = error.what();
  const std::string peer = peer_ < 0 ? "another rank" : fmt::format("rank {}", peer_);
  const std::string_view line = text.substr(0, text.find('\n'));
  if (has_any(text, kClosed)) {
    return std::make_exception_ptr(
        PeerLost(context_, fmt::format("{} died or left: {}", peer, line)));
  }
  if (has_any(text, kLate)) {
    return std::make_exception_ptr(
        TimeoutError(context_, fmt::format("{} did not come within the timeout: {}", peer, line)));
  }
  return std::make_exception_ptr(EngineError(context_, fmt::format("with {}: {}", peer, line)));
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  std::exception_ptr error;
  try {
    inner_->wait(timeout);
  } catch (const std::exception& thrown) {
    error = failure(thrown);
  }
  finish(error);
  if (error) std::rethrow_exception(error);
  return true;
}

}  // namespace lockstep::python
