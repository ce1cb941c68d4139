#include "base/memory.hpp"

#include <gtest/gtest.h>

#include <climits>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/cpus.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::base {
namespace {

namespace fs = std::filesystem;

/// A /proc and a /sys of files.
class AvailableMemoryTest : public testing::Test {
 protected:
  void SetUp() override {
    put("/proc/meminfo", "MemTotal: 8000 kB\nMemFree: 100 kB\nMemAvailable:    4000 kB\n");
  }

  void put(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path.substr(1)).parent_path());
    std::ofstream(root_ / path.substr(1)) << text;
  }
  std::size_t available() const { return available_memory(root_.string()); }
  int quota() const { return cpu_quota(root_.string()); }

 private:
  const test::TemporaryFolder folder_;
  const fs::path root_ = folder_.path();
};

constexpr std::size_t kMachine = std::size_t{4000} * 1024;

TEST_F(AvailableMemoryTest, of_the_machine) {
  EXPECT_EQ(available(), kMachine);
  put("/proc/meminfo", "nothing is said here\n");
  EXPECT_EQ(available(), SIZE_MAX);
}

TEST_F(AvailableMemoryTest, of_a_v2_group) {
  put("/proc/self/cgroup", "0::/job/rank\n");
  put("/proc/self/mountinfo",
      "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  put("/sys/fs/cgroup/job/rank/memory.max", "max\n");
  put("/sys/fs/cgroup/job/rank/memory.current", "500000\n");
  EXPECT_EQ(available(), kMachine);

  put("/sys/fs/cgroup/job/rank/memory.max", "2000000\n");
  EXPECT_EQ(available(), 1'500'000U);
  // What is kept of files is given back.
  put("/sys/fs/cgroup/job/rank/memory.stat",
      "anon 100000\nfile 400000\ninactive_file 300000\nactive_file 50000\n");
  EXPECT_EQ(available(), 1'850'000U);
  // The group above has less.
  put("/sys/fs/cgroup/job/memory.max", "1000000\n");
  put("/sys/fs/cgroup/job/memory.current", "900000\n");
  EXPECT_EQ(available(), 100'000U);
  // It may hold more than a limit that was lowered.
  put("/sys/fs/cgroup/job/memory.max", "800000\n");
  EXPECT_EQ(available(), 0U);
}

TEST_F(AvailableMemoryTest, of_a_v1_group) {
  put("/proc/self/cgroup", "12:cpu,cpuacct:/x\n4:memory:/job\n0::/\n");
  put("/proc/self/mountinfo",
      "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
      "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n");
  put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "123456789\n");
  put("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1000000\n");
  put("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "700000\n");
  put("/sys/fs/cgroup/memory/job/memory.stat",
      "inactive_file 1\ntotal_inactive_file 100000\ntotal_active_file 200000\n");
  EXPECT_EQ(available(), 600'000U);
}

TEST_F(AvailableMemoryTest, of_a_container_that_sees_its_own_group_as_the_root) {
  put("/proc/self/cgroup", "4:memory:/docker/abc\n");
  put("/proc/self/mountinfo",
      "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\n");
  put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "700000\n");
  EXPECT_EQ(available(), 300'000U);
}

TEST_F(AvailableMemoryTest, damaged_files_set_no_limit) {
  put("/proc/self/cgroup", "what\n0:x\n0::/../..\n");
  put("/proc/self/mountinfo",
      "\n - \n1 2 - cgroup2\n30 23 0:26 / /sys/fs/cgroup rw - cgroup2 c rw\n");
  put("/sys/fs/cgroup/memory.max", "12x\n");
  put("/sys/fs/cgroup/memory.current", "-1\n");
  EXPECT_EQ(available(), kMachine);
}

class CpuQuotaTest : public AvailableMemoryTest {};

TEST_F(CpuQuotaTest, of_a_v2_group_and_its_parents) {
  put("/proc/self/cgroup", "0::/job/rank\n");
  put("/proc/self/mountinfo",
      "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  EXPECT_EQ(quota(), INT_MAX);
  put("/sys/fs/cgroup/job/rank/cpu.max", "max 100000\n");
  EXPECT_EQ(quota(), INT_MAX);
  put("/sys/fs/cgroup/job/rank/cpu.max", "350000 100000\n");
  EXPECT_EQ(quota(), 4);
  put("/sys/fs/cgroup/job/cpu.max", "200000 100000\n");
  EXPECT_EQ(quota(), 2);
}

TEST_F(CpuQuotaTest, of_a_v1_group) {
  put("/proc/self/cgroup", "12:cpu,cpuacct:/job\n4:memory:/other\n0::/\n");
  put("/proc/self/mountinfo",
      "34 31 0:31 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
      "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n");
  put("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  put("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota(), INT_MAX);
  put("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "250000\n");
  put("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota(), 3);
}

TEST(AllowedCpusTest, there_is_room_for_every_cpu_of_the_kernel) {
  constexpr std::size_t kMostOfLinux = 8192;
  EXPECT_GE(64 * CpuMask().size(), kMostOfLinux);
  std::size_t last = 0;
  if (std::ifstream("/sys/devices/system/cpu/kernel_max") >> last) {
    EXPECT_LT(last, 64 * CpuMask().size());
  }
  EXPECT_NE(allowed_cpus(), CpuMask());
}

}  // namespace
}  // namespace lockstep::base
