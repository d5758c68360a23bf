// What goes wrong under a cache, and caches in which it can.
#pragma once

#include "cache/cache_world.hpp"

namespace kvmem::test {

inline constexpr const char* slot_file = "/cache/slots-0000.kv";

// The next so many calls of a kind fail.
inline MemoryFiles::Plan failing(std::string what, int error, int times) {
  return [what, error, left = std::make_shared<std::atomic<int>>(times)](
             const MemoryFiles::Call& call) -> std::optional<std::int64_t> {
    if (call.what != what || left->fetch_sub(1) <= 0) return std::nullopt;
    return -error;
  };
}

inline CacheWorldOptions checksummed(CacheWorldOptions options) {
  options.config.checksum = Checksum::always;
  return options;
}

// A bit of a block in host memory, wherever its slot is: slots that were let go of have it still.
inline void damage_in_host_memory(CacheWorld& world, std::uint64_t number) {
  BlockPool& pool = world.world().pool();
  const CacheMemory::Block bytes = CacheMemory::pattern(number);
  bool found = false;
  for (std::size_t at = 0; at < pool.capacity() * pool.slot_bytes(); at += pool.slot_bytes()) {
    if (std::memcmp(pool.data() + at, bytes.data(), bytes.size()) != 0) continue;
    pool.data()[at + 7] ^= std::byte{1};
    found = true;
  }
  ASSERT_TRUE(found) << "key " << number << " is in no slot";
}

template <class Condition>
bool comes_about(CacheWorld& world, const Condition& condition) {
  return comes_true([&] {
    static_cast<void>(world.cache().poll());
    return condition(world.cache().stats());
  });
}

inline CacheWorldOptions written_back(double free, SlotIndex slots = 8) {
  CacheWorldOptions options{.slots = slots, .disk_slots = 32};
  options.cache.disk.emplace();
  options.cache.disk->write = DiskWrite::back;
  options.cache.disk->write_back_free = free;
  return options;
}

}  // namespace kvmem::test
