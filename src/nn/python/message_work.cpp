#include "nn/python/message_work.hpp"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "nn/c10d/c10d_error.hpp"

namespace lockstep::python {

MessageWork::MessageWork(Inner inner, ErrorContext context, int peer, c10d::OpType type,
                         const char* title, const std::vector<at::Tensor>& tensors)
    : Work(context.rank, type, title, tensors),
      inner_(std::move(inner)),
      context_(std::move(context)),
      peer_(peer) {}

std::exception_ptr MessageWork::failure(const std::exception& error) const {
  using Kind = nn::detail::C10dError::Kind;
  const nn::detail::C10dError told = nn::detail::c10d_error(error);
  const std::string peer = peer_ < 0 ? "another rank" : fmt::format("rank {}", peer_);
  const std::string line = told.text.substr(0, told.text.find('\n'));
  switch (told.kind) {
    case Kind::peer_lost:
      return std::make_exception_ptr(
          PeerLost(context_, fmt::format("{} died or left: {}", peer, line)));
    case Kind::timeout:
      return std::make_exception_ptr(TimeoutError(
          context_, fmt::format("{} did not come within the timeout: {}", peer, line)));
    case Kind::other: break;
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
