#include "host/budget.hpp"

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "base/error.hpp"

namespace kvmem {
namespace {

constexpr std::uint64_t GiB = std::uint64_t{1} << 30;

// A root folder of fake files.
class Budget : public ::testing::Test {
 protected:
  Budget() {
    std::string pattern = ::testing::TempDir() + "kvmem-budget-XXXXXX";
    root_ = mkdtemp(pattern.data());
  }
  ~Budget() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& content) const {
    const std::filesystem::path file = std::filesystem::path(root_) / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << content;
  }
  void write_meminfo(std::uint64_t total_bytes, std::uint64_t available_bytes) const {
    write("proc/meminfo", text("MemTotal:       ", total_bytes / 1024,
                               " kB\nMemFree:  5 kB\nMemAvailable:   ", available_bytes / 1024,
                               " kB\nHugePages_Total:       0\n"));
  }
  void write_v2(const std::string& group, const std::string& max, std::uint64_t current,
                std::uint64_t inactive_file = 0) const {
    const std::string folder = "sys/fs/cgroup" + group + "/memory.";
    write(folder + "max", max + "\n");
    write(folder + "current", text(current, "\n"));
    write(folder + "stat",
          text("anon 12\nfile 99999999\ninactive_file ", inactive_file, "\nactive_file 7\n"));
  }
  void write_v1(const std::string& group, std::uint64_t limit, std::uint64_t usage,
                std::uint64_t inactive_file = 0) const {
    const std::string folder = "sys/fs/cgroup/memory" + group + "/memory.";
    write(folder + "limit_in_bytes", text(limit, "\n"));
    write(folder + "usage_in_bytes", text(usage, "\n"));
    write(folder + "stat", text("inactive_file 3\ntotal_inactive_file ", inactive_file, "\n"));
  }
  [[nodiscard]] Shortage refused(std::uint64_t bytes) const {
    try {
      expect_memory_for(bytes, root_);
    } catch (const CapacityError& error) {
      return error.shortage;
    }
    ADD_FAILURE() << bytes << " bytes were not refused";
    return {};
  }

  std::string root_;
};

TEST_F(Budget, NoReadableFileMeansNoLimit) {
  EXPECT_TRUE(memory_limits(root_).empty());
  EXPECT_NO_THROW(expect_memory_for(~std::uint64_t{0}, root_));
}

TEST_F(Budget, MemAvailableBindsWithoutCgroups) {
  write_meminfo(64 * GiB, 10 * GiB);
  EXPECT_NO_THROW(expect_memory_for(10 * GiB, root_));
  const Shortage shortage = refused(10 * GiB + 1);
  EXPECT_EQ(shortage.bound, "MemAvailable");
  EXPECT_EQ(shortage.wanted, 10 * GiB + 1);
  EXPECT_EQ(shortage.free, 10 * GiB);
  EXPECT_EQ(shortage.held, 54 * GiB);
  EXPECT_EQ(shortage.largest, 64 * GiB);
}

// Public failure 62: the limit of the container was not looked at.
TEST_F(Budget, TheGroupOfAContainerBindsBelowTheMemoryOfTheMachine) {
  write_meminfo(1024 * GiB, 1000 * GiB);
  write("proc/self/cgroup", "0::/pod/box\n");
  write_v2("/pod/box", text(32 * GiB), 8 * GiB);
  write_v2("/pod", "max", 8 * GiB);
  const Shortage shortage = refused(25 * GiB);
  EXPECT_EQ(shortage.bound, "cgroup v2 /pod/box memory.max");
  EXPECT_EQ(shortage.free, 24 * GiB);
  EXPECT_EQ(shortage.held, 8 * GiB);
  EXPECT_EQ(shortage.largest, 32 * GiB);
  EXPECT_NO_THROW(expect_memory_for(24 * GiB, root_));
}

// Public failure 62: the limit of the container was not looked at.
TEST_F(Budget, ATighterAncestorBinds) {
  write("proc/self/cgroup", "0::/a/b/c\n");
  write_v2("/a/b/c", text(32 * GiB), 1 * GiB);
  write_v2("/a/b", "max", 1 * GiB);
  write_v2("/a", text(16 * GiB), 15 * GiB);
  EXPECT_EQ(memory_limits(root_).size(), 2U);
  const Shortage shortage = refused(2 * GiB);
  EXPECT_EQ(shortage.bound, "cgroup v2 /a memory.max");
  EXPECT_EQ(shortage.free, 1 * GiB);
  EXPECT_EQ(shortage.largest, 16 * GiB);
}

TEST_F(Budget, TheLeastFreeBindsNotTheSmallestLimit) {
  write("proc/self/cgroup", "0::/a/b\n");
  write_v2("/a/b", text(8 * GiB), 1 * GiB);
  write_v2("/a", text(32 * GiB), 30 * GiB);
  const Shortage shortage = refused(3 * GiB);
  EXPECT_EQ(shortage.bound, "cgroup v2 /a memory.max");
  EXPECT_EQ(shortage.free, 2 * GiB);
  EXPECT_EQ(shortage.largest, 8 * GiB);
}

TEST_F(Budget, TheMountRootBindsWhereTheContainerSeesItsGroupAsTheRoot) {
  write("proc/self/cgroup", "0::/\n");
  write_v2("", text(4 * GiB), 1 * GiB);
  EXPECT_EQ(refused(4 * GiB).bound, "cgroup v2 / memory.max");
}

TEST_F(Budget, TheMountRootBindsWhereTheGroupsPathIsThatOfTheHost) {
  write("proc/self/cgroup", "9:memory:/docker/0123\n");
  write_v1("", 4 * GiB, 1 * GiB);
  EXPECT_EQ(refused(4 * GiB).bound, "cgroup v1 / memory.limit_in_bytes");
}

TEST_F(Budget, AGroupOutsideTheMountDoesNotLeadOutOfIt) {
  write("proc/self/cgroup", "0::/../../proc\n");
  write("sys/fs/cgroup/cgroup.procs", "");
  write("sys/proc/memory.max", "1\n");
  write("memory.max", "1\n");
  write("sys/memory.max", "1\n");
  write("sys/fs/memory.max", "1\n");
  EXPECT_TRUE(memory_limits(root_).empty());
}

TEST_F(Budget, V1CountsItsAncestorsAndSkipsTheUnlimitedOnes) {
  write("proc/self/cgroup",
        "12:cpu,cpuacct:/x\n11:hugetlb,memory:/slurm/job\n1:name=systemd:/y\n0::/\n");
  write_v1("/slurm/job", 9223372036854771712U, 2 * GiB);
  write_v1("/slurm", 8 * GiB, 5 * GiB);
  write_v1("", 9223372036854771712U, 100 * GiB);
  ASSERT_EQ(memory_limits(root_).size(), 1U);
  const Shortage shortage = refused(4 * GiB);
  EXPECT_EQ(shortage.bound, "cgroup v1 /slurm memory.limit_in_bytes");
  EXPECT_EQ(shortage.free, 3 * GiB);
}

TEST_F(Budget, TheUnifiedMountBesideV1IsReadToo) {
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/unified/job/memory.max", text(GiB));
  EXPECT_EQ(refused(2 * GiB).bound, "cgroup v2 /job memory.max");
}

TEST_F(Budget, ReclaimablePageCacheCountsAsFree) {
  write("proc/self/cgroup", "0::/a\n3:memory:/b\n");
  write_v2("/a", text(10 * GiB), 9 * GiB, 6 * GiB);
  write_v1("/b", 20 * GiB, 19 * GiB, 5 * GiB);
  const auto limits = memory_limits(root_);
  ASSERT_EQ(limits.size(), 2U);
  EXPECT_EQ(limits[0].free_bytes(), 7 * GiB);
  EXPECT_EQ(limits[1].free_bytes(), 6 * GiB);
}

TEST_F(Budget, MoreCacheThanUseIsNotMoreThanTheLimit) {
  write("proc/self/cgroup", "0::/a\n");
  write_v2("/a", text(10 * GiB), 1 * GiB, 6 * GiB);
  EXPECT_EQ(memory_limits(root_).at(0).free_bytes(), 10 * GiB);
}

TEST_F(Budget, UseBeyondTheLimitLeavesNothing) {
  write("proc/self/cgroup", "0::/a\n");
  write_v2("/a", text(10 * GiB), 11 * GiB);
  EXPECT_EQ(refused(1).free, 0U);
}

TEST_F(Budget, GarbageIsNoLimit) {
  write("proc/meminfo", "MemAvailable: lots\nMemTotal:\n");
  write("proc/self/cgroup", "\n:\n::\nmemory\n0::/a\n4:memory:/b\n4:memories:/c\n");
  for (const char* garbage :
       {"", "maximum", "-1", "12x", "0x10", "1 2", "99999999999999999999999"}) {
    write("sys/fs/cgroup/a/memory.max", garbage);
    write("sys/fs/cgroup/memory/b/memory.limit_in_bytes", garbage);
    write("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "1");
    EXPECT_TRUE(memory_limits(root_).empty()) << garbage;
  }
}

TEST_F(Budget, ALimitWhoseUseIsUnknownStillBinds) {
  write("proc/self/cgroup", "0::/a\n");
  write("sys/fs/cgroup/a/memory.max", text(GiB));
  EXPECT_EQ(refused(GiB + 1).free, GiB);
}

TEST(BudgetOfThisMachine, SaysWhatIsAvailable) {
  const auto limits = memory_limits();
  ASSERT_FALSE(limits.empty());
  EXPECT_EQ(limits[0].name, "MemAvailable");
  EXPECT_GT(limits[0].free_bytes(), 0U);
  EXPECT_THROW(expect_memory_for(std::uint64_t{1} << 50), CapacityError);
}

}  // namespace
}  // namespace kvmem
