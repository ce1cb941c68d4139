#pragma once

#include <chrono>

/// How long each party waits before it blames another. One order holds for all of them: whoever
/// knows more reports first, and whoever only waits for it reports later, so that the error names
/// the cause. A call's limit is that of the caller; what follows is added to it, or taken within
/// the second in which every failure must be known.
namespace lockstep::base::patience {

using std::chrono::milliseconds;

// Within a host: who is gone is known at once, so that these are the shortest.

/// How often a waiter looks whether the awaited peers are alive.
inline constexpr milliseconds kLivenessInterval{20};
/// How long the ranks that are present wait for the others' information before they report a
/// mismatch, and for a rank that has begun to write the failure.
inline constexpr milliseconds kReport{300};
/// How long the owner of a tagged message waits beyond its limit for a peer that is copying and is
/// not known to be stopped: its memory is in use.
inline constexpr milliseconds kCopy{10'000};

// Over messages: what a rank says may be on the way.

/// If a connection broke, the control message with the reason may still be arriving.
inline constexpr milliseconds kControlMessage{200};
/// How long a rank waits for its peer in a send or recv before it queries whether the call can
/// complete.
inline constexpr milliseconds kQuery{200};
/// How long a rank that runs takes at most to answer a status query. A rank that is late is named
/// that much after the call's time.
inline constexpr milliseconds kStatusReply{250};
/// How long messages that a rank sent before it left may still be in transit. Longer than
/// kControlMessage: a rank that knows why another left says so first.
inline constexpr milliseconds kTransit{500};

// Of the launchers, which know who is lost.

/// How long a rank whose connection to another host broke waits for the launchers to say which rank
/// was lost.
inline constexpr milliseconds kVerdict{5000};

// Between levels: longer than kReport.

/// Added to the limit of a rank that waits for other hosts, so that the ranks of a late host first
/// report which of them is late. Ranks that wait for such a rank give it the same time.
inline constexpr milliseconds kOtherHosts{700};
/// On an oversubscribed machine, or in a library that does not return, a rank that waits for other
/// hosts may time out late; the ranks of its host extend its deadline by this much more.
inline constexpr milliseconds kOtherHostsLate = 8 * kOtherHosts;

// Of those who are led: longer than the reports above.

/// How long a follower of rank 0, or of node 0, waits beyond the common limit for its report, which
/// has more detail than the followers know; and a call for asynchronous ones posted before it,
/// which report themselves.
inline constexpr milliseconds kLeadersReport{2000};

}  // namespace lockstep::base::patience
