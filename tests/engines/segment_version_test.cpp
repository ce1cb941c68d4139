// Libraries of different versions, or with different layouts, never share memory.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <lockstep/error.hpp>
#include <sstream>
#include <string>

#include "base/text.hpp"
#include "base/version.hpp"
#include "engines/shared/segment/segment.hpp"
#include "support/expect.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::shared {
namespace {

using test::expect_contains;
using test::thrown;

/// A segment that a library with one more or less in its layout made.
std::shared_ptr<Segment> segment_of_another_version(std::string_view release) {
  auto segment = Segment::for_processes(2);
  segment->header().version = base::layout_version() + 1;
  base::copy_text(segment->header().release, release);
  return segment;
}

base::UniqueFd copy_of(const Segment& segment) { return base::UniqueFd(::dup(segment.fd())); }

TEST(SegmentVersionTest, both_versions_are_named) {
  const auto segment = segment_of_another_version("9.8.7");
  const std::string theirs =
      fmt::format("lockstep 9.8.7 (layout {:08x})", base::layout_version() + 1);
  const std::string ours =
      fmt::format("lockstep {} (layout {:08x})", base::version(), base::layout_version());
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
  EXPECT_EQ(segment->header().version, base::layout_version());
  EXPECT_EQ(base::text_in(segment->header().release), base::version());
  EXPECT_EQ(Segment::attach(copy_of(*segment), segment->header().nonce)->n_ranks(), 2);
}

/// The number that CMake computes if layout.hpp has `after` in place of `before`.
std::string layout_version_with(const std::string& before, const std::string& after) {
  namespace fs = std::filesystem;
  const test::TemporaryFolder folder;
  const std::string& root = folder.path();
  fs::copy(LOCKSTEP_SOURCE "/src", root + "/src", fs::copy_options::recursive);
  const std::string layout = root + "/src/engines/shared/segment/layout.hpp";
  std::ostringstream text;
  text << std::ifstream(layout).rdbuf();
  std::string changed = text.str();
  changed.replace(changed.find(before), before.size(), after);
  std::ofstream(layout) << changed;
  std::ofstream(root + "/print.cmake")
      << "include(" LOCKSTEP_SOURCE "/cmake/LockstepBinaryInterface.cmake)\n"
      << "lockstep_layout_version(" << root << " number)\n"
      << "file(WRITE " << root << "/number ${number})\n";
  EXPECT_EQ(std::system(("'" LOCKSTEP_CMAKE "' -P " + root + "/print.cmake").c_str()), 0);
  std::string number;
  std::ifstream(root + "/number") >> number;
  return number;
}

TEST(LayoutVersionTest, a_changed_member_changes_the_number_and_a_comment_does_not) {
  const std::string ours = fmt::format("0x{:08x}", base::layout_version());
  EXPECT_EQ(layout_version_with("///< base::layout_version()", "///< another comment"), ours);
  EXPECT_NE(layout_version_with("std::int32_t n_ranks;", "std::int64_t n_ranks;"), ours);
  EXPECT_NE(layout_version_with("kProtocol = ", "kProtocol = 1"), ours);
}

}  // namespace
}  // namespace lockstep::shared
