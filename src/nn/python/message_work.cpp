#include "nn/python/message_work.hpp"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "nn/c10d/c10d_error.hpp"

namespace lockstep::python {

std::exception_ptr error_of_message(const std::exception& error, const ErrorContext& context,
                                    int peer) {
  using Kind = nn::detail::C10dError::Kind;
  const nn::detail::C10dError told = nn::detail::c10d_error(error);
  const std::string who = peer < 0 ? "another rank" : fmt::format("rank {}", peer);
  const std::string line = told.text.substr(0, told.text.find('\n'));
  switch (told.kind) {
    case Kind::peer_lost:
      return std::make_exception_ptr(
          PeerLost(context, fmt::format("{} died or left: {}", who, line)));
    case Kind::timeout:
      return std::make_exception_ptr(
          TimeoutError(context, fmt::format("{} did not come within the timeout: {}", who, line)));
    case Kind::other: break;
  }
  return std::make_exception_ptr(EngineError(context, fmt::format("with {}: {}", who, line)));
}

MessageWork::MessageWork(Inner inner, ErrorContext context, int peer, c10d::OpType type,
                         const char* title, const std::vector<at::Tensor>& tensors)
    : Work(context.rank, type, title, tensors),
      inner_(std::move(inner)),
      context_(std::move(context)),
      peer_(peer) {}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  std::exception_ptr error;
  try {
    inner_->wait(timeout);
  } catch (const std::exception& thrown) {
    error = error_of_message(thrown, context_, peer_);
  }
  finish(error);
  if (error) std::rethrow_exception(error);
  return true;
}

}  // namespace lockstep::python
