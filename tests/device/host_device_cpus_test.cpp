// Where the copy workers of a host device run.
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "device/host_device.hpp"

namespace kvmem {
namespace {

using Cpus = std::set<std::size_t>;

Cpus allowed(pid_t thread) {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(sched_getaffinity(thread, sizeof set, &set), 0);
  Cpus cpus;
  for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.insert(cpu);
  }
  return cpus;
}

std::vector<Cpus> of_the_workers() {
  std::vector<Cpus> found;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    if (name == "kvmem-copy") found.push_back(allowed(std::stoi(task.path().filename())));
  }
  return found;
}

TEST(HostDeviceCpus, WorkersShareThoseOfTheirMakerOut) {
  const Cpus all = allowed(0);
  if (all.size() < 2) GTEST_SKIP() << "one processor cannot be shared out";
  const auto device = make_host_device({.workers = 2});
  const std::vector<Cpus> parts = of_the_workers();
  ASSERT_EQ(parts.size(), 2U);
  Cpus together = parts[0];
  together.insert(parts[1].begin(), parts[1].end());
  EXPECT_EQ(together, all);
  EXPECT_EQ(parts[0].size() + parts[1].size(), all.size()) << "no processor is in both parts";
}

TEST(HostDeviceCpus, MoreWorkersThanProcessorsHaveOneEach) {
  const auto workers = static_cast<unsigned>(allowed(0).size() + 1);
  if (workers > 65) GTEST_SKIP() << "too many processors for a thread each";
  const auto device = make_host_device({.workers = workers});
  const std::vector<Cpus> parts = of_the_workers();
  ASSERT_EQ(parts.size(), workers);
  Cpus together;
  for (const Cpus& part : parts) {
    EXPECT_EQ(part.size(), 1U);
    together.insert(part.begin(), part.end());
  }
  EXPECT_EQ(together, allowed(0));
}

}  // namespace
}  // namespace kvmem
