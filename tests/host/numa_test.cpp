#include "host/numa.hpp"

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "base/error.hpp"

namespace kvmem {
namespace {

std::vector<int> nodes_when_the_kernel_says(const std::string& list) {
  std::string pattern = ::testing::TempDir() + "kvmem-numa-XXXXXX";
  const std::filesystem::path root = mkdtemp(pattern.data());
  const auto folder = root / "sys/devices/system/node";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "has_memory") << list << "\n";
  const std::vector<int> nodes = numa_nodes(root);
  std::filesystem::remove_all(root);
  return nodes;
}

TEST(NumaNodes, AreReadFromRangesAndSingleNumbers) {
  EXPECT_EQ(nodes_when_the_kernel_says("0"), (std::vector<int>{0}));
  EXPECT_EQ(nodes_when_the_kernel_says("0-3"), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(nodes_when_the_kernel_says("0-1,8,16-17"), (std::vector<int>{0, 1, 8, 16, 17}));
}

TEST(NumaNodes, AreNodeZeroWhereTheKernelDoesNotSay) {
  EXPECT_EQ(nodes_when_the_kernel_says(""), (std::vector<int>{0}));
  EXPECT_EQ(nodes_when_the_kernel_says("garbage"), (std::vector<int>{0}));
  EXPECT_EQ(nodes_when_the_kernel_says("0-99999999"), (std::vector<int>{0}));
}

TEST(NumaNodes, AnUnknownNodeIsRefusedWithTheNodesThereAre) {
  try {
    expect_numa_node(1000);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("NUMA node 1000"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("there are: 0"), std::string::npos);
  }
  EXPECT_THROW(expect_numa_node(-1), InvalidArgument);
  EXPECT_NO_THROW(expect_numa_node(numa_nodes().front()));
}

}  // namespace
}  // namespace kvmem
