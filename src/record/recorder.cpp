#include "record/recorder.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>

#include "base/text.hpp"
#include "record/flight_file.hpp"
#include "record/signature.hpp"

namespace lockstep::internal {
namespace {

constexpr std::size_t kBlocks = FlightRecord::kEntries / FlightRecord::kBlock;
static_assert(kBlocks * FlightRecord::kBlock == FlightRecord::kEntries);

}  // namespace

Recorder::Recorder(std::shared_ptr<FlightRecord> memory) : record_(std::move(memory)) {
  const base::TickAnchor anchor = base::now();
  record_->anchor_ticks = anchor.ticks;
  record_->anchor_ns = anchor.ns;
  record_->pid = ::getpid();
  base::copy_text(record_->sites[0], "(one of too many call sites)");
  base::copy_text(record_->groups[0].name, "(one of too many groups)");
}

std::shared_ptr<Recorder> Recorder::in_process(int rank, int world_size,
                                               const std::optional<std::string>& dir) {
  auto memory = dir ? make_flight_file(*dir, rank) : nullptr;
  if (!memory) memory = std::make_shared<FlightRecord>();
  memory->rank = rank;
  memory->world_size = world_size;
  return std::make_shared<Recorder>(std::move(memory));
}

std::uint32_t Recorder::find_or_add(const Site& wanted) {
  std::size_t i = first_slot(wanted);
  const auto find = [&] {  // 0: not in the table; it belongs into slot i
    for (;; ++i) {
      const std::uint32_t number = slot(i).load(std::memory_order_acquire);
      if (number == 0 || sites_[number] == wanted) return number;
    }
  };
  constexpr auto is_full = [](std::uint32_t n) { return n + 1 >= FlightRecord::kMaxSites; };
  if (const std::uint32_t known = find(); known != 0) return known;
  if (is_full(n_sites_.load(std::memory_order_relaxed))) return 0;
  const std::lock_guard lock(mutex_);
  if (const std::uint32_t known = find(); known != 0) return known;
  const std::uint32_t n_sites = n_sites_.load(std::memory_order_relaxed);
  if (is_full(n_sites)) return 0;
  const std::uint32_t number = n_sites + 1;
  sites_[number] = wanted;
  base::copy_text(record_->sites[number],
                  wanted.line == 0
                      ? "an unknown line"
                      : fmt::format("{}:{}", base::base_name(wanted.file), wanted.line));
  if (trace_) trace_->name_site(number, site_of(*record_, number));
  n_sites_.store(number, std::memory_order_relaxed);
  slot(i).store(static_cast<std::uint8_t>(number), std::memory_order_release);
  return number;
}

std::uint32_t Recorder::add_group(std::string_view name, int rank, int size) {
  const std::lock_guard lock(mutex_);
  const std::uint32_t number = record_->n_groups.load(std::memory_order_relaxed) + 1;
  if (number >= FlightRecord::kMaxGroups) return 0;
  FlightGroup& group = record_->groups[number];
  base::copy_text(group.name, name);
  group.rank = rank;
  group.size = size;
  if (trace_) trace_->name_group(number, name_of(group));
  record_->n_groups.store(number, std::memory_order_release);
  return number;
}

void Recorder::write_on_failure(std::string_view reason) noexcept {
  has_failed_.store(true, std::memory_order_relaxed);
  if (!dir_ || process_.is_forked_child()) return;
  if (record_->is_written.exchange(1, std::memory_order_relaxed) != 0) return;
  try {
    write_record(*record_, reason, *dir_);
  } catch (const std::exception&) {
    // The launcher writes the records of ranks that could not.
    record_->is_written.store(0, std::memory_order_relaxed);
  }
}

GroupRecorder::GroupRecorder(std::shared_ptr<Recorder> recorder, std::string_view group, int rank,
                             int size, bool engine_reports)
    : recorder_(std::move(recorder)), engine_reports_(engine_reports) {
  if (!recorder_) return;
  record_ = &recorder_->record();
  trace_ = recorder_->trace().get();
  group_number_ = recorder_->add_group(group, rank, size);
  group_ = &record_->groups[group_number_];
}

[[gnu::noinline]] void GroupRecorder::take_block() {
  const auto is_being_written = [&] {
    const auto first = record_->entries.begin() +
                       static_cast<std::ptrdiff_t>((block_ - 1) % kBlocks * FlightRecord::kBlock);
    return std::any_of(first, first + FlightRecord::kBlock, [](const FlightEntry& entry) {
      const std::uint64_t begun = entry.begun.load(std::memory_order_relaxed);
      return begun != 0 &&
             static_cast<std::uint32_t>(begun) != entry.complete.load(std::memory_order_relaxed);
    });
  };
  for (std::size_t n = 0; n < kBlocks; ++n) {  // at most: the record may be damaged
    block_ = record_->n_blocks.fetch_add(1, std::memory_order_relaxed) + 1;
    if (!is_being_written()) break;
  }
  n_left_ = FlightRecord::kBlock;
}

/// Sets number_ and stores it as the entry's `begun`. See FlightEntry.
FlightEntry& GroupRecorder::claim_entry() {
  constexpr auto relaxed = std::memory_order_relaxed;
  // A block belongs to this group until other groups have taken all blocks after it.
  const auto has_block = [&] { return record_->n_blocks.load(relaxed) - block_ < kBlocks; };
  while (true) {
    if (n_left_ == 0 || !has_block()) take_block();
    const std::size_t i = FlightRecord::kBlock - n_left_--;
    number_ = (block_ - 1) * FlightRecord::kBlock + i + 1;
    FlightEntry& entry = record_->entries[(block_ - 1) % kBlocks * FlightRecord::kBlock + i];
    // The ring is larger than the L1 cache: prefetch the entry after the next one.
    __builtin_prefetch(&entry + 2, /*rw=*/1);
    entry.begun.store(number_, relaxed);  // before the fields, which are stored with release
    if (has_block()) return entry;
    entry.begun.store(0, relaxed);
  }
}

void GroupRecorder::open(const Call& call) {
  const std::uint32_t site = recorder_->site(call.where);
  FlightEntry& entry = claim_entry();
  entry_ = &entry;

  const bool is_collective = !is_pair(call.op);
  constexpr auto release = std::memory_order_release;
  constexpr auto relaxed = std::memory_order_relaxed;
  const std::uint64_t collective = is_collective ? ++n_collectives_ : 0;
  const std::uint64_t signature = encode_call(call);
  const std::uint64_t start = base::ticks();
  entry.sequence.store(call.sequence, release);
  entry.collective.store(collective, release);
  entry.signature.store(signature, release);
  entry.count.store(call.count, release);
  entry.start.store(start, release);
  entry.end.store(FlightEntry::kUnderWay, release);
  entry.site.store(static_cast<std::uint16_t>(site), release);
  entry.group.store(static_cast<std::uint16_t>(group_number_), release);
  entry.complete.store(static_cast<std::uint32_t>(number_), release);
  if (trace_ != nullptr) {
    event_ = trace_->begin({.signature = signature,
                            .count = call.count,
                            .sequence = call.sequence,
                            .collective = collective,
                            .site = site,
                            .group = group_number_},
                           start);
  }

  // Only this thread writes them, except in entry 0, where lost counts do not matter.
  group_->n_calls.store(group_->n_calls.load(relaxed) + 1, relaxed);
  group_->n_bytes.store(group_->n_bytes.load(relaxed) + n_bytes_of(call), relaxed);
}

}  // namespace lockstep::internal
