#include "host/budget.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>

#include "base/error.hpp"
#include "base/proc_file.hpp"

namespace kvmem {

namespace {

// Strings, not std::filesystem::path: that of GCC 12 frees twice when memory runs out under `/`.

// The names of one cgroup version's files. The use of a group includes that of its descendants in
// both.
struct GroupFiles {
  const char* version;
  const char* limit;
  const char* used;
  const char* inactive_file;  // the line of memory.stat that counts reclaimable page cache
};
constexpr GroupFiles v1{"v1", "memory.limit_in_bytes", "memory.usage_in_bytes",
                        "total_inactive_file"};
constexpr GroupFiles v2{"v2", "memory.max", "memory.current", "inactive_file"};

// v1 says "unlimited" as the largest signed number, rounded down to a page.
constexpr std::uint64_t unlimited_bytes = std::uint64_t{1} << 62;

void add_available(std::vector<MemoryLimit>& limits, const std::string& root) {
  const std::string meminfo = root + "/proc/meminfo";
  const auto available = number_of_key(meminfo, "MemAvailable:");
  if (!available || *available >= unlimited_bytes / 1024) return;
  const auto total = number_of_key(meminfo, "MemTotal:");
  const auto limit =
      total && *total < unlimited_bytes / 1024 ? std::max(*total, *available) : *available;
  limits.push_back({"MemAvailable", limit * 1024, (limit - *available) * 1024});
}

// Page cache that nobody used lately is charged to the group, but the kernel drops it before it
// refuses memory: it counts as free, as it does in MemAvailable.
std::uint64_t unreclaimable_use(const std::string& folder, const GroupFiles& files) {
  const std::uint64_t used = number_in_file(folder + files.used).value_or(0);
  const std::uint64_t cache =
      number_of_key(folder + "memory.stat", files.inactive_file).value_or(0);
  return used - std::min(used, cache);
}

// From our group up to the mount root. A container often sees its own group as that root, under a
// path that does not exist there: the walk then finds nothing but the root, which is what binds.
void add_groups(std::vector<MemoryLimit>& limits, const std::string& mount, std::string group,
                const GroupFiles& files) {
  for (;;) {
    const std::string folder = mount + group + "/";
    const auto limit = number_in_file(folder + files.limit);
    if (limit && *limit < unlimited_bytes) {
      limits.push_back(
          {text("cgroup ", files.version, " ", group.empty() ? "/" : group, " ", files.limit),
           *limit, unreclaimable_use(folder, files)});
    }
    if (group.empty()) return;
    group.resize(group.rfind('/'));
  }
}

// "/a/b"; empty for the root. "/../x" stays below the mount.
std::string normal_group(const std::string& path) {
  std::string group;
  std::istringstream names(path);
  for (std::string name; std::getline(names, name, '/');) {
    if (name == "..")
      group.resize(std::min(group.rfind('/'), group.size()));
    else if (!name.empty() && name != ".")
      group += "/" + name;
  }
  return group;
}

bool names_memory(const std::string& controllers) {
  std::istringstream list(controllers);
  for (std::string name; std::getline(list, name, ',');) {
    if (name == "memory") return true;
  }
  return false;
}

}  // namespace

std::vector<MemoryLimit> memory_limits(const std::string& root) {
  std::vector<MemoryLimit> limits;
  add_available(limits, root);
  // Where every init system and container runtime has them.
  const std::string mounts = root + "/sys/fs/cgroup";
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // hierarchy:controllers:path
    std::istringstream parts(line);
    std::string hierarchy, controllers, path;
    std::getline(parts, hierarchy, ':');
    std::getline(parts, controllers, ':');
    std::getline(parts, path);
    const std::string group = normal_group(path);
    if (hierarchy == "0" && controllers.empty()) {
      add_groups(limits, mounts, group, v2);
      add_groups(limits, mounts + "/unified", group, v2);  // beside v1
    } else if (names_memory(controllers)) {
      add_groups(limits, mounts + "/memory", group, v1);
    }
  }
  return limits;
}

void expect_memory_for(std::uint64_t bytes, const std::string& root) {
  const std::vector<MemoryLimit> limits = memory_limits(root);
  if (limits.empty()) return;
  const auto tightest = std::ranges::min_element(limits, {}, &MemoryLimit::free_bytes);
  if (bytes <= tightest->free_bytes()) return;
  const auto smallest = std::ranges::min_element(limits, {}, &MemoryLimit::limit_bytes);
  Shortage shortage;
  shortage.bound = tightest->name;
  shortage.wanted = bytes;
  shortage.free = tightest->free_bytes();
  shortage.largest = smallest->limit_bytes;
  shortage.held = tightest->used_bytes;
  throw CapacityError("not enough memory", shortage);
}

}  // namespace kvmem
