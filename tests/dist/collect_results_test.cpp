#include <gtest/gtest.h>
#include <sys/syscall.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <lockstep/lockstep.hpp>
#include <stdexcept>
#include <vector>

#include "dist/fragile.hpp"
#include "dist/settings.hpp"
#include "support/seccomp.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;

/// A directory of this test, with somebody's file in it.
class Directory {
 public:
  Directory() { std::ofstream(path / "somebody's") << "kept"; }

  /// As it was made?
  bool is_untouched() const {
    return fs::exists(path / "somebody's") &&
           std::distance(fs::directory_iterator(path), fs::directory_iterator()) == 1;
  }

 private:
  TemporaryFolder folder_;

 public:
  const fs::path path = folder_.path();
};

struct Case {
  Setting setting;
  bool has_tmpdir;
};

std::string name_of(const Case& value) {
  return name_of(value.setting) + (value.has_tmpdir ? "_tmpdir" : "");
}
// Without it GoogleTest prints the bytes, those between the members too.
std::ostream& operator<<(std::ostream& out, const Case& value) { return out << name_of(value); }

std::vector<Case> cases(int fewest = 1) {
  std::vector<Case> all;
  for (const Setting& setting : few_ranks(fewest)) {
    all.push_back({setting, false});
    all.push_back({setting, true});
  }
  return all;
}

class CollectResultsTest : public ::testing::TestWithParam<Case> {
 protected:
  void run(const std::function<void()>& body) {
    run_as(GetParam().setting, body);
    EXPECT_TRUE(directory_.is_untouched());
  }
  template <class T>
  std::optional<std::vector<T>> collect(const std::vector<T>& part, std::size_t size) {
    return GetParam().has_tmpdir ? collect_results(part, size, directory_.path)
                                 : collect_results(part, size);
  }

  Directory directory_;
};

class CollectResultsBetweenRanksTest : public CollectResultsTest {};

INSTANTIATE_TEST_SUITE_P(Ranks, CollectResultsTest, ::testing::ValuesIn(cases()),
                         [](const auto& test) { return name_of(test.param); });
INSTANTIATE_TEST_SUITE_P(Ranks, CollectResultsBetweenRanksTest, ::testing::ValuesIn(cases(2)),
                         [](const auto& test) { return name_of(test.param); });

/// Item i of rank r.
std::string item(int rank, int i) { return std::to_string(rank) + "." + std::to_string(i); }

std::vector<std::string> part_of(int rank, int n_items) {
  std::vector<std::string> part;
  for (int i = 0; i < n_items; ++i) part.push_back(item(rank, i));
  return part;
}

/// Written out in the plainest way.
std::vector<std::string> interleaved(const std::vector<int>& n_items, std::size_t size) {
  std::vector<std::string> all;
  for (int i = 0; i < 1000; ++i) {
    for (std::size_t r = 0; r < n_items.size(); ++r) {
      if (i < n_items[r] && all.size() < size) all.push_back(item(static_cast<int>(r), i));
    }
  }
  return all;
}

TEST_P(CollectResultsTest, interleaves_and_cuts_uneven_parts) {
  run([this] {
    const auto n = static_cast<std::size_t>(get_world_size());
    for (const std::vector<int>& lengths :
         {std::vector{5, 5, 5, 5}, std::vector{3, 7, 0, 1}, std::vector{0, 0, 2, 9},
          std::vector{0, 0, 0, 0}, std::vector{9, 1, 1, 1}}) {
      const std::vector<int> used(lengths.begin(),
                                  lengths.begin() + static_cast<std::ptrdiff_t>(n));
      for (const std::size_t size : {0U, 1U, 4U, 7U, 20U, 1000U}) {
        const int mine = lengths[static_cast<std::size_t>(get_rank())];
        const auto all = collect(part_of(get_rank(), mine), size);
        ASSERT_EQ(all.has_value(), get_rank() == 0);
        if (all) {
          ASSERT_EQ(*all, interleaved(used, size));
        }
      }
    }
  });
}

TEST_P(CollectResultsTest, drops_nothing_that_is_empty) {
  run([this] {
    const std::vector<std::optional<std::string>> part = {std::nullopt, "", "x"};
    const auto n = static_cast<std::size_t>(get_world_size());
    const auto all = collect(part, 3 * n);
    if (!all) return;
    ASSERT_EQ(all->size(), 3 * n);
    for (std::size_t i = 0; i < all->size(); ++i) EXPECT_EQ((*all)[i], part[i / n]);
  });
}

TEST_P(CollectResultsTest, parts_of_many_batches_and_items_longer_than_one) {
  run([this] {
    const auto length = [](int rank, int i) {
      return i == 1 ? detail::kBatchBytes + 11 : static_cast<std::size_t>(1'000'000 + rank);
    };
    std::vector<std::string> part;
    for (int i = 0; i < 7; ++i) {
      part.emplace_back(length(get_rank(), i), static_cast<char>('a' + get_rank()));
    }
    const int n = get_world_size();
    const auto all = collect(part, 1000);
    if (!all) return;
    ASSERT_EQ(all->size(), static_cast<std::size_t>(7 * n));
    for (int i = 0; i < 7; ++i) {
      for (int r = 0; r < n; ++r) {
        const std::string& got = (*all)[static_cast<std::size_t>(i * n + r)];
        EXPECT_EQ(got.size(), length(r, i));
        EXPECT_EQ(got.front(), static_cast<char>('a' + r));
      }
    }
  });
}

TEST_P(CollectResultsTest, vectors_of_bool) {
  run([this] {
    const auto all = collect(std::vector<bool>{true, get_rank() == 0}, 100);
    if (!all) return;
    for (std::size_t i = 0; i < all->size(); ++i) {
      EXPECT_EQ((*all)[i], i <= static_cast<std::size_t>(get_world_size()));
    }
  });
}

TEST_P(CollectResultsBetweenRanksTest, an_item_that_cannot_be_sent) {
  run([this] {
    const std::vector<Fragile> part = {{"good"}, {get_rank() == 1 ? "unsendable" : "good"}};
    if (get_rank() == 1) {
      EXPECT_EQ(thrown<std::runtime_error>([&] { collect(part, 100); }),
                "this one does not travel");
    } else if (get_rank() == 0) {
      EXPECT_CONTAINS(thrown<PeerFailed>([&] { collect(part, 100); }),
                      "rank 1 failed: this one does not travel");
    } else if (GetParam().has_tmpdir) {
      EXPECT_THROW(collect(part, 100), PeerFailed);
    } else {
      collect(part, 100);
    }
    EXPECT_EQ(all_reduce_value(1), get_world_size());  // the group stays usable
  });
}

TEST_P(CollectResultsBetweenRanksTest, an_item_that_cannot_be_read) {
  run([this] {
    const std::vector<Fragile> part = {{get_rank() == 1 ? "unreadable" : "good"}, {"good"}};
    if (get_rank() == 0) {
      EXPECT_CONTAINS(thrown<MismatchError>([&] { collect(part, 100); }),
                      "message of rank 1 cannot be decoded");
    } else {
      collect(part, 100);
    }
    EXPECT_EQ(all_reduce_value(1), get_world_size());
  });
}

/// Reads nothing of the disk: the system call fails on rank 0 once it has opened the files.
struct EndsReading {
  bool is_last = false;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(is_last);
    if (is_last && get_rank() == 0) forbid(SYS_read);
  }
};

TEST(CollectResultsFilesTest, a_disk_that_cannot_be_read_is_an_error_on_all_ranks) {
  const Directory directory;
  const auto statuses = run_processes(3, [&directory] {
    const auto collect = [&] {  // rank 0 reads the message of rank 1, and then no more
      collect_results(std::vector<EndsReading>{{get_rank() == 1}}, 100, directory.path);
    };
    if (get_rank() == 0) {
      EXPECT_CONTAINS(thrown<SystemError>(collect), "cannot read ");
    } else {
      EXPECT_CONTAINS(thrown<PeerFailed>(collect), "rank 0 failed: ");
    }
    EXPECT_EQ(all_reduce_value(1), 3);
  });
  EXPECT_EQ(statuses, std::vector<int>(3, 0));
  EXPECT_TRUE(directory.is_untouched());
}

/// Cannot be copied into the results.
struct Uncopied {
  Uncopied() = default;
  Uncopied(const Uncopied&) = default;
  Uncopied& operator=(const Uncopied&) { throw std::runtime_error("no copy"); }
  Uncopied(Uncopied&&) = default;
  Uncopied& operator=(Uncopied&&) = default;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(value);
  }
  int value = 0;
};

TEST(CollectResultsFilesTest, an_item_that_rank_0_cannot_copy_is_an_error_on_all_ranks) {
  const Directory directory;
  const auto statuses = run_processes(3, [&directory] {
    const auto collect = [&] { collect_results(std::vector<Uncopied>(2), 100, directory.path); };
    if (get_rank() == 0) {
      EXPECT_CONTAINS(thrown<std::runtime_error>(collect), "no copy");
    } else {
      EXPECT_CONTAINS(thrown<PeerFailed>(collect), "rank 0 failed: no copy");
    }
    EXPECT_EQ(all_reduce_value(1), 3);
  });
  EXPECT_EQ(statuses, std::vector<int>(3, 0));
  EXPECT_TRUE(directory.is_untouched());
}

TEST_P(CollectResultsBetweenRanksTest, sizes_that_differ) {
  run([this] {
    EXPECT_CONTAINS(thrown<MismatchError>(
                        [this] { collect(std::vector{1}, static_cast<std::size_t>(get_rank())); }),
                    "differ in size: rank 0 has 0, rank 1 has 1");
    barrier();
  });
}

TEST_P(CollectResultsTest, no_such_directory) {
  run([this] {
    if (get_world_size() == 1 || !GetParam().has_tmpdir) return;
    const auto call = [this] {
      collect_results(std::vector{1}, 4, directory_.path / (get_rank() == 1 ? "none" : ""));
    };
    if (get_rank() == 1) {
      EXPECT_CONTAINS(thrown<SystemError>(call), "tmpdir must be a directory that exists");
    } else {
      EXPECT_CONTAINS(thrown<PeerFailed>(call), "rank 1 failed: ");
    }
    EXPECT_EQ(all_reduce_value(1), get_world_size());
  });
}

TEST_P(CollectResultsTest, directories_that_are_not_the_same) {
  const Directory other;
  run([this, &other] {
    if (get_world_size() == 1 || !GetParam().has_tmpdir) return;
    const auto call = [&] {
      collect_results(std::vector{1}, 4, get_rank() == 0 ? other.path : directory_.path);
    };
    if (get_rank() == 0) {
      EXPECT_CONTAINS(thrown<SystemError>(call), "that all ranks see");
    } else {
      EXPECT_CONTAINS(thrown<PeerFailed>(call), "rank 0 failed: ");
    }
    EXPECT_EQ(all_reduce_value(1), get_world_size());
  });
  EXPECT_TRUE(other.is_untouched());
}

TEST_P(CollectResultsTest, rank_0_returns_when_the_files_are_gone) {
  run([this] {
    for (int i = 0; i < 10; ++i) {
      collect(std::vector{1}, static_cast<std::size_t>(get_world_size()));
      if (get_rank() == 0) {
        EXPECT_TRUE(directory_.is_untouched());
      }
      barrier();
    }
  });
}

/// Kills its process where that is about to send it.
struct Deadly {
  bool is_deadly = false;
  template <class Archive>
  void save(Archive& archive) const {
    if (is_deadly) std::raise(SIGKILL);
    archive(is_deadly);
  }
  template <class Archive>
  void load(Archive& archive) {
    archive(is_deadly);
  }
};

TEST(CollectResultsFilesTest, a_killed_ranks_file_is_removed) {
  const Directory directory;
  const std::vector<int> statuses = run_processes(3, [&] {
    const std::vector<Deadly> part = {{.is_deadly = false}, {.is_deadly = get_rank() == 2}};
    EXPECT_CONTAINS(thrown<PeerLost>([&] { collect_results(part, 6, directory.path); }), "rank 2");
  });
  EXPECT_EQ(statuses[0], 0);
  EXPECT_EQ(statuses[1], 0);
  EXPECT_EQ(statuses[2], SIGKILL);
  EXPECT_TRUE(directory.is_untouched());
}

/// The most memory this process has had, in bytes, since the last reset.
std::size_t peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoul(line.substr(6)) * 1024;
  }
  throw std::runtime_error("no VmHWM in /proc/self/status");
}

bool reset_peak_memory() {
  return bool(std::ofstream("/proc/self/clear_refs") << "5" << std::flush);
}

TEST(CollectResultsMemoryTest, is_about_the_size_of_the_result) {
  if (!reset_peak_memory()) GTEST_SKIP() << "the system does not let us reset the peak memory";
  run_as({Form::processes, 4}, [] {
    constexpr std::size_t kItem = std::size_t{1} << 20U;
    const std::vector<std::string> part(32, std::string(kItem, 'x'));
    barrier();
    ASSERT_TRUE(reset_peak_memory());
    const std::size_t before = peak_memory();
    const auto all = collect_results(part, 128);
    if (!all) return;
    const std::size_t taken = peak_memory() - before;
    EXPECT_EQ(all->size(), 128U);
    EXPECT_GE(taken, 100 * kItem);  // else this measures nothing
    EXPECT_LE(taken, 160 * kItem);
  });
}

}  // namespace
}  // namespace lockstep::test
