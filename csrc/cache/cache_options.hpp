// What a cache is made with: fixed at construction, checked once, units in every name.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cache/index.hpp"
#include "cache/owner_books.hpp"
#include "offload/manager.hpp"
#include "tier/disk_slots.hpp"

namespace kvmem {

struct CacheGroup {
  std::string name;
  Need need;
  std::shared_ptr<Manager> manager;  // all of one runtime
  // Of its pool: the cache's own from its start to its end. 0: all that are free then, less the
  // landing blocks.
  SlotIndex slots = 0;
};

enum class DiskWrite : std::uint8_t {
  through,  // as soon as a key can be read
  back,  // the oldest, while more than 1 - `write_back_free` of a group's slots hold unwritten ones
};

struct CacheDisk {
  DiskOptions options;  // block_bytes 0: the largest of any group; key_bytes: those of the cache
  DiskWrite write = DiskWrite::through;
  double write_back_free = 0.25;    // 0 to 1
  std::size_t landing_blocks = 16;  // of each group: set aside for what comes from disk
  std::size_t max_writes = 32;      // host blocks held for the disk at once
};

struct CacheOptions {
  std::vector<CacheGroup> groups;  // 1 to most_cache_groups
  std::size_t key_bytes = 0;       // 0: that of the first key; a disk must know
  PolicyKind policy = PolicyKind::lru;
  unsigned admit_after = 1;  // a key is stored the nth time it is offered, 1 to 255
  ThrashBudget thrash;
  std::optional<CacheDisk> disk;
  double low_free = 0, high_free = 0;  // see IndexOptions: evicted by whoever moves the cache on
  std::size_t max_transfers = 4096;    // unfinished
  std::size_t max_plans = 1 << 16, max_events = 0;
  std::size_t max_owners = 1 << 16;  // of whom books are kept
  // What is taken for granted of a path until it has been measured.
  double host_bytes_per_second = 10e9, disk_bytes_per_second = 1e9;
};
inline constexpr std::size_t most_cache_groups = most_groups / 2;

}  // namespace kvmem
