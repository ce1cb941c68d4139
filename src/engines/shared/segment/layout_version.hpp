#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "engines/shared/segment/layout.hpp"
#include "record/flight_layout.hpp"

namespace lockstep::shared {

/// Incremented if the meaning of members changes but no struct does: other algorithms, other flags.
inline constexpr std::size_t kProtocol = 4;

/// The layout of the segment. Two libraries with the same number may share memory.
consteval std::uint32_t layout_version() {
  base::LayoutHash hash = internal::flight_layout();
  hash.add(kProtocol);
  hash.add<RankBlock>({
      LOCKSTEP_FIELD(RankBlock, state),
      LOCKSTEP_FIELD(RankBlock, pid),
      LOCKSTEP_FIELD(RankBlock, start_time),
      LOCKSTEP_FIELD(RankBlock, pidfd_inode),
      LOCKSTEP_FIELD(RankBlock, pid_namespace),
      LOCKSTEP_FIELD(RankBlock, time_namespace),
      LOCKSTEP_FIELD(RankBlock, wait_status_plus_one),
      LOCKSTEP_FIELD(RankBlock, ended_as),
      LOCKSTEP_FIELD(RankBlock, cpu_quota),
      LOCKSTEP_FIELD(RankBlock, receives_fences),
      LOCKSTEP_FIELD(RankBlock, cpus),
      LOCKSTEP_FIELD(RankBlock, sleeps_at),
      LOCKSTEP_FIELD(RankBlock, failure),
      LOCKSTEP_FIELD(RankBlock, flight),
  });
  hash.add<TuningOverrides>({
      LOCKSTEP_FIELD(TuningOverrides, flat_bytes),
      LOCKSTEP_FIELD(TuningOverrides, chunk_bytes),
      LOCKSTEP_FIELD(TuningOverrides, in_place_bytes),
  });
  hash.add<SegmentHeader>({
      LOCKSTEP_FIELD(SegmentHeader, magic),
      LOCKSTEP_FIELD(SegmentHeader, version),
      LOCKSTEP_FIELD(SegmentHeader, release),
      LOCKSTEP_FIELD(SegmentHeader, n_ranks),
      LOCKSTEP_FIELD(SegmentHeader, nonce),
      LOCKSTEP_FIELD(SegmentHeader, tuning),
      LOCKSTEP_FIELD(SegmentHeader, world_channel),
      LOCKSTEP_FIELD(SegmentHeader, n_bytes),
      LOCKSTEP_FIELD(SegmentHeader, has_one_pid_namespace),
      LOCKSTEP_FIELD(SegmentHeader, has_joined_other_engine),
      LOCKSTEP_FIELD(SegmentHeader, has_launcher),
      LOCKSTEP_FIELD(SegmentHeader, generation),
      LOCKSTEP_FIELD(SegmentHeader, is_elastic),
      LOCKSTEP_FIELD(SegmentHeader, is_over),
      LOCKSTEP_FIELD(SegmentHeader, n_waiting),
      LOCKSTEP_FIELD(SegmentHeader, n_steps),
      LOCKSTEP_FIELD(SegmentHeader, n_ended),
      LOCKSTEP_FIELD(SegmentHeader, ending),
      LOCKSTEP_FIELD(SegmentHeader, free_ranges),
  });
  hash.add<RangeHeader>({LOCKSTEP_FIELD(RangeHeader, n_users)});
  hash.add<CallRecord>({
      LOCKSTEP_FIELD(CallRecord, sequence),
      LOCKSTEP_FIELD(CallRecord, signature),
      LOCKSTEP_FIELD(CallRecord, count),
      LOCKSTEP_FIELD(CallRecord, site),
      LOCKSTEP_FIELD(CallRecord, check),
      LOCKSTEP_FIELD(CallRecord, n_refused),
      LOCKSTEP_FIELD(CallRecord, deadline_extended_until),
      LOCKSTEP_FIELD(CallRecord, is_in_peers_memory),
      LOCKSTEP_FIELD(CallRecord, has_refusals),
  });
  hash.add<Flag>({LOCKSTEP_FIELD(Flag, word), LOCKSTEP_FIELD(Flag, payload)});
  hash.add<MessageHead>({
      LOCKSTEP_FIELD(MessageHead, destination),
      LOCKSTEP_FIELD(MessageHead, dtype),
      LOCKSTEP_FIELD(MessageHead, count),
      LOCKSTEP_FIELD(MessageHead, n_refused),
  });
  hash.add<RefusalText>({LOCKSTEP_FIELD(RefusalText, peer), LOCKSTEP_FIELD(RefusalText, words)});
  hash.add<Refusals>({LOCKSTEP_FIELD(Refusals, n_texts), LOCKSTEP_FIELD(Refusals, texts)});
  hash.add<RefusedPairs>(
      {LOCKSTEP_FIELD(RefusedPairs, n_sends), LOCKSTEP_FIELD(RefusedPairs, n_receives)});
  hash.add<Lane>({
      LOCKSTEP_FIELD(Lane, flags),
      LOCKSTEP_FIELD(Lane, record),
      LOCKSTEP_FIELD(Lane, n_sent),
      LOCKSTEP_FIELD(Lane, heads),
      LOCKSTEP_FIELD(Lane, n_taken),
  });
  hash.add<internal::PeerList>({
      LOCKSTEP_FIELD(internal::PeerList, n),
      LOCKSTEP_FIELD(internal::PeerList, ranks),
  });
  hash.add<FailureRecord>({
      LOCKSTEP_FIELD(FailureRecord, state),
      LOCKSTEP_FIELD(FailureRecord, kind),
      LOCKSTEP_FIELD(FailureRecord, error_number),
      LOCKSTEP_FIELD(FailureRecord, peers),
      LOCKSTEP_FIELD(FailureRecord, text),
  });
  hash.add<Tuning>({
      LOCKSTEP_FIELD(Tuning, flat_bytes),
      LOCKSTEP_FIELD(Tuning, flat_bytes_oversubscribed),
      LOCKSTEP_FIELD(Tuning, chunk_bytes),
      LOCKSTEP_FIELD(Tuning, in_place_bytes),
  });
  hash.add<ChannelHeader>({
      LOCKSTEP_FIELD(ChannelHeader, n_ranks),
      LOCKSTEP_FIELD(ChannelHeader, slot_bytes),
      LOCKSTEP_FIELD(ChannelHeader, outbox_bytes),
      LOCKSTEP_FIELD(ChannelHeader, tuning),
      LOCKSTEP_FIELD(ChannelHeader, members),
      LOCKSTEP_FIELD(ChannelHeader, failure),
      LOCKSTEP_FIELD(ChannelHeader, wake_counter),
      LOCKSTEP_FIELD(ChannelHeader, n_sleepers),
  });
  hash.add<RequestEntry>({
      LOCKSTEP_FIELD(RequestEntry, state),
      LOCKSTEP_FIELD(RequestEntry, next),
      LOCKSTEP_FIELD(RequestEntry, peer),
      LOCKSTEP_FIELD(RequestEntry, tag),
      LOCKSTEP_FIELD(RequestEntry, is_send),
      LOCKSTEP_FIELD(RequestEntry, dtype),
      LOCKSTEP_FIELD(RequestEntry, address),
      LOCKSTEP_FIELD(RequestEntry, count),
      LOCKSTEP_FIELD(RequestEntry, copier),
      LOCKSTEP_FIELD(RequestEntry, why),
      LOCKSTEP_FIELD(RequestEntry, copier_count),
      LOCKSTEP_FIELD(RequestEntry, n_refused),
  });
  hash.add<EntryList>({LOCKSTEP_FIELD(EntryList, first), LOCKSTEP_FIELD(EntryList, last)});
  hash.add<Mailbox>({
      LOCKSTEP_FIELD(Mailbox, mutex),
      LOCKSTEP_FIELD(Mailbox, holder),
      LOCKSTEP_FIELD(Mailbox, n_entries),
      LOCKSTEP_FIELD(Mailbox, sends),
      LOCKSTEP_FIELD(Mailbox, receives),
  });
  return hash.value();
}

inline constexpr std::uint32_t kVersion = layout_version();

/// "lockstep 0.1.0 (layout 1a2b3c4d)". `release` may come from a process with another layout.
std::string release_text(std::string_view release, std::uint32_t layout);

}  // namespace lockstep::shared
