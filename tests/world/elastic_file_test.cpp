#include "world/elastic_file.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <lockstep/error.hpp>
#include <lockstep/world.hpp>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "engines/shared/bootstrap/job.hpp"
#include "support/expect.hpp"
#include "support/ranks.hpp"
#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

class ElasticFileTest : public testing::Test {
 protected:
  /// This process, a fork, becomes the only rank of the job's newest world.
  static void join(const shared::Job& job) {
    for (const char* name : {"RANK", "LOCAL_RANK"}) ::setenv(name, "0", 1);
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) ::setenv(name, "1", 1);
    ::setenv("LOCKSTEP_SEGMENT", job.environment().c_str(), 1);
    init_dist();
  }
  static void as_rank(const shared::Job& job, const std::function<void()>& body) {
    EXPECT_EQ(test::in_a_fork([&] {
                join(job);
                body();
              }),
              0);
  }
  static std::unique_ptr<shared::Job> over_nodes() {
    auto job = std::make_unique<shared::Job>(1, std::nullopt, /*is_elastic=*/true);
    job->set_time_of_verdict(std::chrono::seconds(8));
    return job;
  }
  void replace(const std::string& bytes) const {
    ElasticFile file(path_);
    file.write(bytes);
    file.commit_to_disk({.operation = "save"});
  }
  std::string text() const {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_.path())) {
      names.insert(entry.path().filename());
    }
    return names;
  }

  const test::TemporaryFolder folder_;
  const std::string path_ = folder_ / "state";
};

TEST_F(ElasticFileTest, of_one_host_is_what_was_written) {
  replace("alone");
  EXPECT_EQ(text(), "alone");
  as_rank(shared::Job(1, std::nullopt, /*is_elastic=*/true), [&] { replace("elastic"); });
  EXPECT_EQ(text(), "elastic");
  EXPECT_EQ(read_elastic_file(path_), "elastic");
}

TEST_F(ElasticFileTest, is_not_replaced_by_an_earlier_generation_of_the_same_job) {
  const auto first = over_nodes();
  const auto second = first->next_generation(1, /*generation=*/1, /*has_earlier_steps=*/true);
  as_rank(*second, [&] { replace("second"); });
  const std::string written = text();
  as_rank(*first, [&] {
    test::expect_contains(test::thrown<PeerLost>([&] { replace("late"); }),
                          path_ +
                              " is of generation 1 of the world already, and this rank is in "
                              "generation 0");
  });
  EXPECT_EQ(text(), written);
  EXPECT_EQ(files(), std::set<std::string>{"state"});
  EXPECT_EQ(read_elastic_file(path_), "second");
}

TEST_F(ElasticFileTest, of_another_job_is_replaced) {
  const auto former = over_nodes()->next_generation(1, /*generation=*/7, false);
  as_rank(*former, [&] { replace("former"); });
  as_rank(*over_nodes(), [&] { replace("resumed"); });
  EXPECT_EQ(read_elastic_file(path_), "resumed");
}

TEST_F(ElasticFileTest, two_generations_write_at_once) {
  const auto first = over_nodes();
  const auto second = first->next_generation(1, /*generation=*/1, /*has_earlier_steps=*/true);
  const test::SharedCount n_begun, n_late, n_replaced;
  const pid_t writer = test::start_fork([&] {
    join(*second);
    ElasticFile file(path_);
    file.write("second");
    n_begun.raise();
    EXPECT_TRUE(n_late.wait_for(1));
    file.commit_to_disk({.operation = "save"});
    n_replaced.raise();
  });
  EXPECT_TRUE(n_begun.wait_for(1));
  as_rank(*first, [&] {
    ElasticFile file(path_);
    file.write("first");
    n_late.raise();
    EXPECT_TRUE(n_replaced.wait_for(1));
    EXPECT_THROW(file.commit_to_disk({.operation = "save"}), PeerLost);
  });
  int status = -1;
  ASSERT_EQ(::waitpid(writer, &status, 0), writer);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read_elastic_file(path_), "second");
  EXPECT_EQ(files(), std::set<std::string>{"state"});
}

TEST_F(ElasticFileTest, what_a_killed_rank_has_left_does_not_stay) {
  const auto first = over_nodes();
  as_rank(*first, [&] { replace("first"); });
  std::ofstream(path_ + ".0.part") << "half of it";
  const auto second = first->next_generation(1, /*generation=*/1, /*has_earlier_steps=*/true);
  as_rank(*second, [&] { replace("second"); });
  EXPECT_EQ(read_elastic_file(path_), "second");
  EXPECT_EQ(files(), std::set<std::string>{"state"});
}

}  // namespace
}  // namespace lockstep::internal
