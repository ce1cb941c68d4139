#include "group/failure.hpp"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "base/text.hpp"
#include "base/truncated_text.hpp"
#include "group/mismatch.hpp"

namespace lockstep::internal {

Failure failure_of(const Error& error) {
  using enum Failure::Kind;
  if (const auto* const system_error = dynamic_cast<const SystemError*>(&error)) {
    const int error_number = system_error->error_number();
    const std::string added = SystemError({}, error_number, "").text();
    return {.kind = system,
            .error_number = error_number,
            .text = error.text().substr(0, error.text().size() - added.size()),
            .peers = PeerList::of(error.context().peers)};
  }
  Failure::Kind kind = engine;
  if (dynamic_cast<const UsageError*>(&error) != nullptr) kind = usage;
  if (dynamic_cast<const MismatchError*>(&error) != nullptr) kind = mismatch;
  if (dynamic_cast<const TimeoutError*>(&error) != nullptr) kind = timeout;
  if (dynamic_cast<const PeerLost*>(&error) != nullptr) kind = peer_lost;
  if (dynamic_cast<const PeerFailed*>(&error) != nullptr) kind = peer_failed;
  return {.kind = kind, .text = error.text(), .peers = PeerList::of(error.context().peers)};
}

Failure failure_for_peers(const Error& error, int rank) {
  Failure failure = failure_of(error);
  if (is_about_peers(failure.kind)) return failure;
  return {.kind = Failure::Kind::peer_failed, .culprit = rank, .text = error.text()};
}

std::vector<int> numbers_of(const Call& call, std::span<const int> ranks) {
  std::vector<int> numbers;
  numbers.reserve(ranks.size());
  for (const int rank : ranks) numbers.push_back(call.number_of(rank));
  return numbers;
}

std::string text_of_wait(const Call& call, int rank, std::span<const int> awaited, int n_ranks) {
  return fmt::format(
      "rank {} waited {:g} s for rank{} {} of {}", call.number_of(rank), call.limit_s(),
      awaited.size() == 1 ? "" : "s", list_of(numbers_of(call, awaited)),
      call.ranks.empty() ? std::to_string(n_ranks) : fmt::format("ranks {}", list_of(call.ranks)));
}

std::string text_of_refusal(std::string_view call, std::string_view reason,
                            const std::source_location& where) {
  std::array<char, 160> line{};  // so that the place fits behind it, where engines send it
  base::copy_truncated(line, reason.substr(0, reason.find('\n')));
  std::string text = fmt::format("refused {}: {}", call, base::text_in(line));
  if (where.line() == 0) return text;
  return fmt::format("{}, at {}:{}", text, base::base_name(where.file_name()), where.line());
}

bool is_about_peers(Failure::Kind kind) {
  using enum Failure::Kind;
  switch (kind) {
    case mismatch:
    case timeout:
    case peer_lost:
    case peer_left:
    case peer_failed: return true;
    case usage:
    case system:
    case engine: return false;
  }
  return false;
}

std::string text_of(const Failure& failure) {
  if (failure.culprit == Failure::kNoCulprit) return failure.text;
  if (failure.kind == Failure::Kind::peer_lost) {
    return fmt::format(
        "rank {} is gone: it was killed, crashed, or cannot be reached any more ({})",
        failure.culprit, failure.text);
  }
  if (failure.kind == Failure::Kind::peer_left) {
    return fmt::format("rank {} left the world (destroy_dist or program exit)", failure.culprit);
  }
  if (failure.kind == Failure::Kind::peer_failed) {
    return fmt::format("rank {} failed: {}", failure.culprit, failure.text);
  }
  return failure.text;
}

void throw_failure(const Failure& failure, ErrorContext context) {
  using enum Failure::Kind;
  const std::string text = text_of(failure);
  if (failure.culprit != Failure::kNoCulprit) {
    context.peers = {failure.culprit};
  } else {
    const auto peers = failure.peers.get();
    context.peers.assign(peers.begin(), peers.end());
  }
  switch (failure.kind) {
    case usage: throw UsageError(std::move(context), text);
    case mismatch: throw MismatchError(std::move(context), text);
    case timeout: throw TimeoutError(std::move(context), text);
    case peer_lost:
    case peer_left: throw PeerLost(std::move(context), text);
    case peer_failed: throw PeerFailed(std::move(context), text);
    case system: throw SystemError(std::move(context), failure.error_number, text);
    case engine: throw EngineError(std::move(context), text);
  }
  // From another process that died while it wrote it, or that links another version.
  throw EngineError(std::move(context),
                    fmt::format("the record of a failure is damaged: {}", text));
}

}  // namespace lockstep::internal
