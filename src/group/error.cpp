#include <fmt/format.h>

#include <cstring>
#include <lockstep/engine.hpp>
#include <lockstep/error.hpp>
#include <utility>

#include "base/text.hpp"
#include "group/step.hpp"

namespace lockstep {
namespace {

std::string compose(const ErrorContext& context, const std::string& text) {
  std::string message = context.operation;
  if (!context.group.empty()) {
    fmt::format_to(std::back_inserter(message), " on group '{}' (rank {}", context.group,
                   context.rank);
    if (context.sequence != 0) {
      fmt::format_to(std::back_inserter(message), ", call #{}", context.sequence);
    }
    message += ')';
  }
  if (context.where.line() != 0) {
    fmt::format_to(std::back_inserter(message), " at {}:{}",
                   base::base_name(context.where.file_name()), context.where.line());
  }
  return message + ": " + text;
}

}  // namespace

Error::Error(ErrorContext context, const std::string& text)
    : std::runtime_error(compose(context, text)), context_(std::move(context)), text_(text) {}

SystemError::SystemError(ErrorContext context, int error_number, const std::string& text)
    : Error(std::move(context),
            fmt::format("{}: {} (errno {})", text, std::strerror(error_number), error_number)),
      error_number_(error_number) {}

ErrorContext context_of(const Call& call, int rank) {
  const Call& whole = internal::outermost(call);
  return {.operation = std::string(whole.operation.empty() ? name_of(whole.op) : whole.operation),
          .group = std::string(call.group),
          .rank = call.number_of(rank),
          .sequence = call.sequence,
          .where = call.where};
}

}  // namespace lockstep
