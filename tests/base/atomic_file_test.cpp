#include "base/atomic_file.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>

#include "support/expect.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::base {
namespace {

namespace fs = std::filesystem;

/// The errno value of the std::system_error that `f` throws; 0: none.
template <class F>
int error_of(F f) {
  try {
    f();
  } catch (const std::system_error& error) {
    return error.code().value();
  }
  return 0;
}

class AtomicFileTest : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_ / name; }
  std::string contents(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void save(const std::string& text) const {
    AtomicFile file(path("result"), /*mode=*/0600);
    file.write(text);
    file.commit_to_disk();
  }
  void save_as(const std::string& name) const {
    AtomicFile file(path(name), /*mode=*/0600);
    file.write("new");
    file.commit();
  }
  auto n_files() const { return std::distance(fs::directory_iterator(folder_.path()), {}); }

 private:
  test::TemporaryFolder folder_;
};

TEST_F(AtomicFileTest, visible_after_commit) {
  save("old");
  {
    AtomicFile file(path("result"), /*mode=*/0600);
    file.write("ne");
    EXPECT_EQ(contents("result"), "old");
    file.write("w");
    file.commit();
  }
  EXPECT_EQ(contents("result"), "new");
  { AtomicFile(path("result"), /*mode=*/0600).write("never done"); }
  EXPECT_EQ(contents("result"), "new");
  EXPECT_EQ(n_files(), 1);
  EXPECT_EQ(fs::status(path("result")).permissions(),
            fs::perms::owner_read | fs::perms::owner_write);
}

TEST_F(AtomicFileTest, stale_part_file_is_replaced) {
  std::ofstream(path("result.part")) << "half of something long";
  save("new");
  EXPECT_EQ(contents("result"), "new");
  EXPECT_EQ(n_files(), 1);
}

TEST_F(AtomicFileTest, planted_link_is_not_followed) {
  std::ofstream(path("diary")) << "mine";
  fs::create_symlink(path("diary"), path("result.part"));
  save("new");
  EXPECT_EQ(contents("diary"), "mine");
  EXPECT_EQ(contents("result"), "new");
  EXPECT_FALSE(fs::is_symlink(path("result")));
}

TEST_F(AtomicFileTest, concurrent_writers_do_not_mix) {
  AtomicFile first(path("result"), /*mode=*/0600);
  first.write("first");
  AtomicFile second(path("result"), /*mode=*/0600);
  second.write("sec");
  EXPECT_THROW(first.commit(), std::system_error);
  EXPECT_EQ(contents("result"), "");
  second.write("ond");
  second.commit();
  EXPECT_EQ(contents("result"), "second");
}

TEST_F(AtomicFileTest, unwritable_path) {
  EXPECT_THROW(AtomicFile(path("no/such/folder"), /*mode=*/0600), std::system_error);
  fs::create_directory(path("folder"));
  EXPECT_THROW(AtomicFile(path("folder"), /*mode=*/0600), std::system_error);
  AtomicFile file(path("late"), /*mode=*/0600);
  fs::create_directory(path("late"));
  EXPECT_THROW(file.commit(), std::system_error);
}

TEST_F(AtomicFileTest, non_regular_file_is_not_replaced) {
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  fs::create_symlink(path("fifo"), path("link"));
  for (const char* name : {"fifo", "link"}) {
    EXPECT_EQ(error_of([&] { save_as(name); }), ENOTSUP) << name;
  }
  EXPECT_TRUE(fs::is_fifo(path("fifo")));
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(n_files(), 2);
  // Nor what came meanwhile.
  AtomicFile file(path("late"), /*mode=*/0600);
  ASSERT_EQ(::mkfifo(path("late").c_str(), 0600), 0);
  EXPECT_THROW(file.commit(), std::system_error);
  EXPECT_TRUE(fs::is_fifo(path("late")));
}

TEST_F(AtomicFileTest, a_limit_on_the_size_of_files_is_an_error) {
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    const rlimit limit{.rlim_cur = 1000, .rlim_max = 1000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      AtomicFile file(path("result"), /*mode=*/0600);
      file.write(std::string(600, 'x'));
      file.write(std::string(600, 'x'));
    } catch (const std::system_error& error) {
      ::_exit(error.code().value() == EFBIG ? 0 : 1);
    }
    ::_exit(2);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);  // SIGXFSZ is 25
}

TEST_F(AtomicFileTest, a_symbolic_link_is_kept_and_its_target_replaced) {
  fs::create_directory(path("runs"));
  fs::create_symlink("runs/3", path("latest"));          // to nothing yet
  fs::create_symlink(path("latest"), path("absolute"));  // to another link
  for (const char* name : {"latest", "latest", "absolute"}) {
    save_as(name);
    EXPECT_TRUE(fs::is_symlink(path(name))) << name;
    EXPECT_TRUE(fs::is_regular_file(path("runs/3"))) << name;
    EXPECT_EQ(contents("runs/3"), "new");
    fs::remove(path("runs/3"));
  }
  EXPECT_EQ(n_files(), 3) << "nothing is left beside the links";
  EXPECT_TRUE(fs::is_empty(path("runs")));
  fs::create_symlink("loop", path("loop"));
  EXPECT_EQ(error_of([&] { save_as("loop"); }), ELOOP);
}

TEST_F(AtomicFileTest, a_path_with_a_nul_is_refused) {
  std::string cut = path("result");
  cut += '\0';
  EXPECT_EQ(error_of([&] { AtomicFile file(cut + "more", /*mode=*/0600); }), EINVAL);
  EXPECT_THROW(read_regular_file(cut), std::system_error);
  EXPECT_EQ(n_files(), 0);
}

TEST_F(AtomicFileTest, only_a_regular_file_is_read) {
  save("text");
  EXPECT_EQ(read_regular_file(path("result")), "text");
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  fs::create_directory(path("folder"));
  for (const char* name : {"fifo", "folder"}) {
    test::expect_contains(test::thrown<std::system_error>([&] { read_regular_file(path(name)); }),
                          "not a regular file");
  }
  EXPECT_THROW(read_regular_file(path("none")), std::system_error);
}

}  // namespace
}  // namespace lockstep::base
