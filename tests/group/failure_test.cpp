#include "group/failure.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace lockstep::internal {
namespace {

const ErrorContext kFailedCall{
    .operation = "barrier", .group = "world", .rank = 1, .sequence = 3, .where = {}};

template <class E>
E thrown_for(const Failure& failure) {
  try {
    throw_failure(failure, kFailedCall);
  } catch (const E& error) {
    EXPECT_EQ(error.context().sequence, 3U);
    return error;
  }
}

/// `error` to a failure and back: the same type, text and what().
template <class E>
void expect_same_again(const E& error, Failure::Kind kind) {
  const Failure failure = failure_of(error);
  EXPECT_EQ(failure.kind, kind);
  EXPECT_EQ(failure.culprit, Failure::kNoCulprit);
  const E again = thrown_for<E>(failure);
  EXPECT_EQ(again.text(), error.text());
  EXPECT_STREQ(again.what(), error.what());
}

TEST(FailureTest, every_error_is_the_same_after_a_round_trip) {
  expect_same_again(UsageError(kFailedCall, "a"), Failure::Kind::usage);
  expect_same_again(MismatchError(kFailedCall, "b"), Failure::Kind::mismatch);
  expect_same_again(TimeoutError(kFailedCall, "c"), Failure::Kind::timeout);
  expect_same_again(PeerLost(kFailedCall, "d"), Failure::Kind::peer_lost);
  expect_same_again(PeerFailed(kFailedCall, "e"), Failure::Kind::peer_failed);
  expect_same_again(EngineError(kFailedCall, "f"), Failure::Kind::engine);
}

TEST(FailureTest, peers_are_the_same_after_a_round_trip) {
  ErrorContext context = kFailedCall;
  context.peers = {2, 5};
  const TimeoutError error(context, "late");
  EXPECT_EQ(thrown_for<TimeoutError>(failure_of(error)).context().peers, context.peers);
  EXPECT_EQ(thrown_for<TimeoutError>(failure_for_peers(error, 0)).context().peers, context.peers);
  EXPECT_EQ(thrown_for<PeerFailed>(failure_for_peers(SystemError(context, 12, "full"), 3))
                .context()
                .peers,
            std::vector<int>{3});
  EXPECT_EQ(PeerList::of(std::vector<int>(20, 7)).get().size(), 16U);
  EXPECT_EQ((PeerList{.n = 99, .ranks = {}}.get().size()), 16U);
  EXPECT_TRUE((PeerList{.n = -1, .ranks = {}}.get().empty()));
}

TEST(FailureTest, a_system_error_keeps_its_number_and_names_its_text_once) {
  const SystemError error(kFailedCall, ENOMEM, "cannot map: the segment");
  expect_same_again(error, Failure::Kind::system);
  EXPECT_EQ(failure_of(error).text, "cannot map: the segment");
  EXPECT_EQ(thrown_for<SystemError>(failure_of(error)).error_number(), ENOMEM);
}

TEST(FailureTest, peers_throw_the_same_error_if_it_is_about_peers) {
  EXPECT_EQ(failure_for_peers(MismatchError({}, "a"), 2).kind, Failure::Kind::mismatch);
  EXPECT_EQ(failure_for_peers(TimeoutError({}, "a"), 2).kind, Failure::Kind::timeout);
  EXPECT_EQ(failure_for_peers(PeerLost({}, "a"), 2).kind, Failure::Kind::peer_lost);
  const Failure failure = failure_for_peers(PeerFailed({}, "rank 0 failed: a"), 2);
  EXPECT_EQ(thrown_for<PeerFailed>(failure).text(), "rank 0 failed: a");
}

TEST(FailureTest, other_errors_are_failures_of_their_rank_for_its_peers) {
  for (const Failure& failure :
       {failure_for_peers(EngineError({}, "a"), 2), failure_for_peers(UsageError({}, "a"), 2)}) {
    EXPECT_EQ(thrown_for<PeerFailed>(failure).text(), "rank 2 failed: a");
  }
  EXPECT_EQ(thrown_for<PeerFailed>(failure_for_peers(SystemError({}, EIO, "a"), 2)).text(),
            "rank 2 failed: a: " + std::string(std::strerror(EIO)) + " (errno " +
                std::to_string(EIO) + ")");
}

TEST(FailureTest, a_culprit_is_named) {
  EXPECT_EQ(thrown_for<PeerLost>({.kind = Failure::Kind::peer_left, .culprit = 4}).text(),
            "rank 4 left the world (destroy_dist or program exit)");
  EXPECT_EQ(
      thrown_for<PeerLost>(
          {.kind = Failure::Kind::peer_lost, .culprit = 4, .text = "reset by peer"})
          .text(),
      "rank 4 is gone: it was killed, crashed, or cannot be reached any more (reset by peer)");
}

TEST(FailureTest, a_kind_out_of_range_is_an_engine_error) {
  EXPECT_EQ(thrown_for<EngineError>({.kind = static_cast<Failure::Kind>(99), .text = "a"}).text(),
            "the record of a failure is damaged: a");
}

}  // namespace
}  // namespace lockstep::internal
