#include "host/numa.hpp"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "base/check.hpp"

namespace kvmem {

namespace {
constexpr int most_nodes = 4096;  // beyond what any kernel is built for

bool has_memory(int node) {
  const std::vector<int> nodes = numa_nodes();
  return std::ranges::find(nodes, node) != nodes.end();
}

// Returns 0 or the reason.
int set_policy(void* base, std::size_t bytes, int policy, int node) {
  constexpr std::size_t bits = std::numeric_limits<unsigned long>::digits;
  const auto bit = static_cast<std::size_t>(node);
  std::vector<unsigned long> mask(bit / bits + 1);
  mask[bit / bits] = 1UL << bit % bits;
  // The kernel reads one bit less than it is told.
  const long answer =
      syscall(SYS_mbind, base, bytes, policy, mask.data(), mask.size() * bits + 1, 0);
  return answer == 0 ? 0 : errno;
}

}  // namespace

std::vector<int> numa_nodes(const std::string& root) {
  const auto folder = std::filesystem::path(root) / "sys/devices/system/node";
  std::ifstream file(folder / "has_memory");
  std::vector<int> nodes;
  for (int first = 0; file >> first;) {  // ranges: "0-1,4"
    int last = first;
    if (file.peek() == '-') file.ignore() >> last;
    if (first < 0 || last >= most_nodes) break;
    for (int node = first; node <= last; ++node) nodes.push_back(node);
    if (file.peek() == ',') file.ignore();
  }
  if (nodes.empty()) nodes.push_back(0);
  return nodes;
}

void expect_numa_node(int node) {
  if (has_memory(node)) return;
  std::string there_are;
  for (const int known : numa_nodes()) there_are += text(there_are.empty() ? "" : ", ", known);
  throw InvalidArgument(
      text("there is no NUMA node ", node, " with memory; there are: ", there_are));
}

void bind_to_numa_node(void* base, std::size_t bytes, int node) {
  const int why = set_policy(base, bytes, MPOL_BIND, node);
  // Containers often forbid the call. Where there is no other node, its promise holds without it.
  if (why != 0 && numa_nodes().size() > 1) {
    throw Error(text("cannot bind memory to NUMA node ", node, ": ", std::strerror(why)));
  }
}

bool try_prefer_numa_node(void* base, std::size_t bytes, int node) {
  if (!has_memory(node)) return false;
  return set_policy(base, bytes, MPOL_PREFERRED, node) == 0 || numa_nodes().size() == 1;
}

}  // namespace kvmem
