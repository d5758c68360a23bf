// NUMA nodes by the raw system call: one call is no reason to depend on libnuma. Any thread.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace kvmem {

// The nodes that have memory. A kernel that does not say has one node, 0.
[[nodiscard]] std::vector<int> numa_nodes(const std::string& root = "/");

// Throws InvalidArgument that names the nodes there are.
void expect_numa_node(int node);

// Pages of the range that are first touched from now on come from the node, whoever touches them.
// Throws Error.
void bind_to_numa_node(void* base, std::size_t bytes, int node);
// The same while the node has any; another node's then. False where there is no such node with
// memory, or the kernel refuses: they come from anywhere.
[[nodiscard]] bool try_prefer_numa_node(void* base, std::size_t bytes, int node);

}  // namespace kvmem
