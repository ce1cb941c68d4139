// Libraries of different versions, or with different layouts, never share memory.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <lockstep/error.hpp>
#include <string>

#include "base/text.hpp"
#include "base/version.hpp"
#include "engines/shared/segment/layout_version.hpp"
#include "engines/shared/segment/segment.hpp"
#include "support/expect.hpp"

namespace lockstep::shared {
namespace {

using test::expect_contains;
using test::thrown;

/// A segment that a library with one more or less in its layout made.
std::shared_ptr<Segment> segment_of_another_version(std::string_view release) {
  auto segment = Segment::for_processes(2);
  segment->header().version = kVersion + 1;
  base::copy_text(segment->header().release, release);
  return segment;
}

base::UniqueFd copy_of(const Segment& segment) { return base::UniqueFd(::dup(segment.fd())); }

TEST(SegmentVersionTest, both_versions_are_named) {
  const auto segment = segment_of_another_version("9.8.7");
  const std::string theirs = fmt::format("lockstep 9.8.7 (layout {:08x})", kVersion + 1);
  const std::string ours = fmt::format("lockstep {} (layout {:08x})", base::version(), kVersion);
  for (const std::string& text :
       {thrown<UsageError>([&] { Segment::attach(copy_of(*segment), segment->header().nonce); }),
        thrown<UsageError>([&] { Segment::attach_read_only(copy_of(*segment)); })}) {
    expect_contains(text, "it is of " + theirs + ", and this is " + ours);
    expect_contains(text, "use the `lockstep` command of the library that the program links");
  }
}

TEST(SegmentVersionTest, a_name_that_no_version_has_is_not_printed) {
  const auto segment = segment_of_another_version("\x1b[2J");
  expect_contains(thrown<UsageError>([&] { Segment::attach_read_only(copy_of(*segment)); }),
                  "it is of lockstep of unknown version (layout ");
}

TEST(SegmentVersionTest, the_same_version_attaches) {
  const auto segment = Segment::for_processes(2);
  EXPECT_EQ(segment->header().version, kVersion);
  EXPECT_EQ(base::text_in(segment->header().release), base::version());
  EXPECT_EQ(Segment::attach(copy_of(*segment), segment->header().nonce)->n_ranks(), 2);
}

struct Small {
  std::uint32_t first;
  std::uint32_t second;
};
struct SmallSwapped {
  std::uint32_t second;
  std::uint32_t first;
};
struct SmallRetyped {
  std::uint32_t first;
  std::uint16_t second;
};

TEST(LayoutHashTest, every_change_of_a_member_changes_the_number) {
  constexpr auto kSmall =
      base::LayoutHash()
          .add<Small>({LOCKSTEP_FIELD(Small, first), LOCKSTEP_FIELD(Small, second)})
          .value();
  constexpr auto kSwapped = base::LayoutHash()
                                .add<SmallSwapped>({LOCKSTEP_FIELD(SmallSwapped, second),
                                                    LOCKSTEP_FIELD(SmallSwapped, first)})
                                .value();
  constexpr auto kRetyped = base::LayoutHash()
                                .add<SmallRetyped>({LOCKSTEP_FIELD(SmallRetyped, first),
                                                    LOCKSTEP_FIELD(SmallRetyped, second)})
                                .value();
  EXPECT_NE(kSmall, kSwapped);
  EXPECT_NE(kSmall, kRetyped);
  EXPECT_NE(kSwapped, kRetyped);
}

}  // namespace
}  // namespace lockstep::shared
