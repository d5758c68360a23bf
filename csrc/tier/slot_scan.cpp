#include "tier/slot_scan.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <tuple>

#include "base/crc32c.hpp"
#include "base/error.hpp"

namespace kvmem::detail {

namespace {

constexpr std::size_t whole_slot_bytes_max = std::size_t{32} << 10;  // smaller: read, not skipped
constexpr std::size_t piece_bytes = std::size_t{2} << 20;
constexpr std::size_t threads_max = 16;  // headers far apart are read by latency, not by bandwidth
constexpr std::size_t whole_threads_max = 4;

// The kernel pins each page that a direct call reads into; for small ones that takes longer than
// the device.
template <class T>
struct OnHugePages {
  using value_type = T;
  static constexpr std::align_val_t alignment{piece_bytes};

  [[nodiscard]] T* allocate(std::size_t count) {
    void* const made = ::operator new(count * sizeof(T), alignment);
    if (count * sizeof(T) == piece_bytes) ::madvise(made, piece_bytes, MADV_HUGEPAGE);
    return static_cast<T*>(made);
  }
  void deallocate(T* given, std::size_t) noexcept { ::operator delete(given, alignment); }
  friend bool operator==(const OnHugePages&, const OnHugePages&) = default;
};

// Sorted in place of the slots themselves, which are large.
struct Ranked {
  std::uint64_t rank = 0;
  const FoundSlot* slot = nullptr;
};

// Keys that differ may have the same: it only spares comparisons.
std::uint64_t sum_of(const FoundSlot& slot) {
  return crc32c(slot.group, slot.key.bytes.data(), slot.key.bytes.size());
}

auto what(const FoundSlot& slot) {
  return std::tie(slot.key.bytes, slot.key.size, slot.group, slot.manifest);
}

bool is_before(const Ranked& a, const Ranked& b) {
  if (a.rank != b.rank) return a.rank < b.rank;
  if (what(*a.slot) != what(*b.slot)) return what(*a.slot) < what(*b.slot);
  return a.slot->generation > b.slot->generation;
}

class Scanner {
 public:
  Scanner(Volume& volume, const DiskOptions& options)
      : volume_(volume),
        geometry_(volume.geometry()),
        options_(options),
        reads_whole_(geometry_.slot_bytes <= whole_slot_bytes_max),
        step_(
            std::min<std::uint64_t>(std::max<std::uint64_t>(piece_bytes / geometry_.slot_bytes, 64),
                                    geometry_.slots_per_file)) {}

  SlotScan run() {
    const std::size_t pieces = (geometry_.slots + step_ - 1) / step_;
    std::vector<SlotScan> parts(std::min(reads_whole_ ? whole_threads_max : threads_max, pieces));
    std::vector<std::thread> threads;
    threads.reserve(parts.size());
    try {
      for (std::size_t i = 1; i < parts.size(); ++i)
        threads.emplace_back([this, &part = parts[i]] { scan_pieces(part, nullptr); });
    } catch (const std::exception&) {  // fewer are slower, no more
    }
    scan_pieces(parts[0], &options_.progress);
    for (std::thread& thread : threads) thread.join();
    if (failure_) std::rethrow_exception(failure_);
    if (!cancelled_ && options_.progress) cancelled_ = !options_.progress(done_, geometry_.slots);
    if (cancelled_) throw Cancelled("opening the disk tier was cancelled");
    return merged(parts);
  }

 private:
  using Buffer = std::vector<HeaderBlock, OnHugePages<HeaderBlock>>;

  void scan_pieces(SlotScan& part, const std::function<bool(std::size_t, std::size_t)>* progress) {
    try {
      Buffer buffer(reads_whole_ ? piece_bytes / disk_page_bytes : 1);
      while (!cancelled_) {
        const std::uint64_t first = next_.fetch_add(step_);
        if (first >= geometry_.slots) return;
        const std::uint64_t end = std::min<std::uint64_t>(first + step_, geometry_.slots);
        scan_piece(first, end, buffer, part);
        done_ += end - first;
        if (progress && *progress && !(*progress)(done_, geometry_.slots)) cancelled_ = true;
      }
    } catch (...) {  // no memory, or whatever progress throws
      const std::lock_guard lock(mutex_);
      failure_ = std::current_exception();
      cancelled_ = true;
    }
  }

  void scan_piece(std::uint64_t first, std::uint64_t end, Buffer& buffer, SlotScan& part) {
    while (first < end) {
      const std::uint64_t in_file = geometry_.slots_per_file - first % geometry_.slots_per_file;
      const std::uint64_t count = std::min(end - first, in_file);
      const auto slot = static_cast<SlotIndex>(first);
      if (reads_whole_ && volume_.read_whole(slot, count, buffer[0].bytes.data()) == 0) {
        for (std::uint64_t i = 0; i < count; ++i)
          look_at(slot + static_cast<SlotIndex>(i),
                  buffer[i * geometry_.slot_bytes / disk_page_bytes], part);
      } else {  // one by one, to see which of them cannot be read
        for (std::uint64_t i = 0; i < count; ++i)
          read_and_look_at(slot + static_cast<SlotIndex>(i), buffer[0], part);
      }
      first += count;
    }
  }

  void read_and_look_at(SlotIndex slot, HeaderBlock& block, SlotScan& part) {
    const int error = volume_.read(slot, block, nullptr, 0);
    if (error == 0) return look_at(slot, block, part);
    const DiskOutcome outcome = error == ENODATA ? DiskOutcome::truncated : DiskOutcome::io_error;
    ++part.headers[static_cast<std::size_t>(outcome)];
    if (error == EIO) part.unreadable.push_back(slot);
  }

  void look_at(SlotIndex slot, const HeaderBlock& block, SlotScan& part) {
    SlotHeader header;
    DiskOutcome outcome = decode(block, header);
    if (outcome == DiskOutcome::ok || outcome == DiskOutcome::torn) {
      if (header.tier != volume_.tier()) {
        outcome = DiskOutcome::foreign_tier;
      } else {
        part.last_generation = std::max(part.last_generation, header.generation);
        if (outcome == DiskOutcome::ok) outcome = fit(slot, header);
      }
    }
    ++part.headers[static_cast<std::size_t>(outcome)];
    if (outcome != DiskOutcome::ok) return;
    part.found.push_back({.slot = slot,
                          .group = header.group,
                          .generation = header.generation,
                          .payload_bytes = header.payload_bytes,
                          .manifest = header.manifest,
                          .key = header.key});
  }

  [[nodiscard]] DiskOutcome fit(SlotIndex slot, const SlotHeader& header) const {
    if (header.slot != slot) return DiskOutcome::misplaced;
    if (header.payload_bytes == 0 || header.payload_bytes > geometry_.block_bytes)
      return DiskOutcome::other_size;
    return header.key.size == options_.key_bytes ? DiskOutcome::ok : DiskOutcome::other_key;
  }

  static SlotScan merged(const std::vector<SlotScan>& parts) {
    SlotScan all;
    std::vector<Ranked> found;
    for (const SlotScan& part : parts) {
      for (const FoundSlot& slot : part.found) found.push_back({sum_of(slot), &slot});
      all.unreadable.insert(all.unreadable.end(), part.unreadable.begin(), part.unreadable.end());
      for (std::size_t i = 0; i < all.headers.size(); ++i) all.headers[i] += part.headers[i];
      all.last_generation = std::max(all.last_generation, part.last_generation);
    }
    std::sort(found.begin(), found.end(), is_before);
    const auto latest = std::unique(
        found.begin(), found.end(),
        [](const Ranked& a, const Ranked& b) { return what(*a.slot) == what(*b.slot); });
    all.superseded = static_cast<std::uint64_t>(found.end() - latest);
    found.erase(latest, found.end());
    for (Ranked& one : found) one.rank = one.slot->generation;
    std::sort(found.begin(), found.end(),
              [](const Ranked& a, const Ranked& b) { return a.rank < b.rank; });
    all.found.reserve(found.size());
    for (const Ranked& one : found) all.found.push_back(*one.slot);
    return all;
  }

  Volume& volume_;
  const DiskGeometry& geometry_;
  const DiskOptions& options_;
  const bool reads_whole_;
  const std::uint64_t step_;
  std::atomic<std::uint64_t> next_{0};
  std::atomic<std::size_t> done_{0};
  std::atomic<bool> cancelled_{false};
  std::mutex mutex_;
  std::exception_ptr failure_;
};

}  // namespace

SlotScan scan_slots(Volume& volume, const DiskOptions& options) {
  return Scanner(volume, options).run();
}

}  // namespace kvmem::detail
