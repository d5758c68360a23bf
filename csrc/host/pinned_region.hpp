// One range of host memory that copies go to and from; it owns its mapping and whatever pinned it.
//
// An in-process region is private anonymous memory with transparent huge pages and MADV_WIPEONFORK:
// no copy-on-write under a running copy, and a forked child reads zeros instead of crashing. A
// shared region is a memfd, its space reserved before use so that no touch can end in SIGBUS. The
// whole range is mapped, checked against the budget, bound to its NUMA node and touched (in
// parallel, with progress) before map() returns. Reserved huge pages are in no budget: they are
// taken from the machine already. Neither they nor shared memory can be wiped on fork; a child has
// no mapping there.
//
// An attached region is a further mapping of a shared one, often of another process's. Its memory
// was taken and touched by whoever made it, and stays until the last mapping and descriptor go.
//
// Threads: map() and leaked_region_bytes() from any; a region is for one thread at a time, its
// bytes, facts() and pinned_bytes() are for all. Throws CapacityError that names the limit and the
// numbers, and InvalidArgument that says why memory cannot be attached; a failure leaves nothing
// behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/process.hpp"
#include "device/device.hpp"

namespace kvmem {

enum class HugePages : std::uint8_t {
  never,    // of the reserved kind; transparent huge pages are asked for all the same
  attempt,  // reserved huge pages, else ordinary ones, visible in facts().page_bytes
  required,
};

enum class Pin : std::uint8_t {
  automatic,   // pin where the device needs it
  required,    // pin in any case: mlock on a host device
  background,  // in any case too, while the pool is in use: what is not pinned yet is staged
  never,       // copies are staged where the device needs pinned memory
};

struct RegionOptions {
  HugePages hugepages = HugePages::never;
  std::optional<int> numa_node = std::nullopt;  // bound to it
  // Without a numa_node: taken from there while there is any; ignored where there is no such node.
  std::optional<int> preferred_node = std::nullopt;
  bool shared = false;  // memfd instead of private memory
  // The memfd of a shared region, which stays the caller's: that memory instead of new one, as it
  // is. Only `has_bytes` means anything beside it.
  std::optional<int> attach = std::nullopt;
  // False: addresses only, of no budget; whoever touches one crashes. Nothing above applies but
  // that required huge pages and shared or attached memory are refused.
  bool has_bytes = true;
  unsigned touch_threads = 0;  // 0: one per core, at most 8
  // Called from the mapping thread, at least every 64 MiB; returning false cancels (throws
  // Cancelled).
  std::function<bool(std::size_t done_bytes, std::size_t total_bytes)> progress = nullptr;
};

struct RegionFacts {
  std::size_t bytes = 0;                // mapped: whole pages of page_bytes
  std::size_t page_bytes = 4096;        // of the mapping; transparent huge pages do not show here
  bool transparent_huge_pages = false;  // asked for and accepted
  std::optional<int> numa_node;         // bound to it, or preferred
  std::size_t pinned_bytes = 0;         // just now
  bool pinned = false;                  // all of it
  int memfd = -1;
  double touch_seconds = 0;
};

class PinnedRegion {
 public:
  [[nodiscard]] static PinnedRegion map(std::size_t bytes, const RegionOptions& options);
  PinnedRegion(PinnedRegion&& other) noexcept;
  PinnedRegion& operator=(PinnedRegion&&) = delete;
  // Unpins and unmaps, where the device's calls block on a thread of its own: gigabytes take
  // seconds. Leaks in a forked child and at process exit.
  ~PinnedRegion();

  // In chunks of about 1 GiB that no slot straddles; a chunk that fails undoes those before it.
  // Throws CapacityError; at most once.
  void pin(std::shared_ptr<Device> device, std::size_t slot_bytes = slot_alignment_bytes);
  // The same by hand: chunk after chunk from the start, until pin_next() says that there is no
  // further one. One that throws has changed nothing.
  void start_pinning(std::shared_ptr<Device> device, std::size_t chunk_bytes);
  bool pin_next();
  void unpin() noexcept;  // all chunks; then it may start again. What cannot be is leaked
  void leak() noexcept;   // never unpin or unmap: a copy may still touch it

  // The largest multiple of slot_bytes (and of a page) up to `most_bytes`, else one slot. Throws
  // InvalidArgument over 64 GiB.
  static constexpr std::size_t most_bytes_a_pin = std::size_t{1} << 30;
  [[nodiscard]] static std::size_t bytes_a_pin(std::size_t slot_bytes,
                                               std::size_t most_bytes = most_bytes_a_pin);

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] RegionFacts facts() const noexcept;
  [[nodiscard]] std::size_t bytes() const noexcept { return facts_.bytes; }
  // All before it is pinned, and stays so while the region lives.
  [[nodiscard]] std::size_t pinned_bytes() const noexcept { return pinned_bytes_.load(); }
  // No copy may cross from one chunk into the next. 0: pinning never started.
  [[nodiscard]] std::size_t pin_chunk_bytes() const noexcept { return pin_chunk_bytes_; }

 private:
  PinnedRegion() = default;
  [[nodiscard]] static PinnedRegion map_pages(std::size_t bytes, const RegionOptions& options,
                                              std::size_t page_bytes, bool reserved_pages);
  [[nodiscard]] static PinnedRegion map_attached(std::size_t bytes, int descriptor);
  void reserve_addresses(std::size_t length, bool reserved_pages);
  void advise(bool shared, bool reserved_pages);
  void place(const RegionOptions& options);

  std::byte* data_ = nullptr;
  RegionFacts facts_;  // less what is pinned
  std::shared_ptr<Device> pinned_by_;
  std::size_t pin_chunk_bytes_ = 0;
  std::atomic<std::size_t> pinned_bytes_{0};
  bool leaked_ = false;
  ProcessMark mark_;
};

// Of this process, all regions together.
[[nodiscard]] std::uint64_t leaked_region_bytes() noexcept;

}  // namespace kvmem
