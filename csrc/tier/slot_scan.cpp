#include "tier/slot_scan.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <tuple>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "base/signals.hpp"

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
        last_page_(geometry_.slot_bytes / disk_page_bytes - 1),
        step_(
            std::min<std::uint64_t>(std::max<std::uint64_t>(piece_bytes / geometry_.slot_bytes, 64),
                                    geometry_.slots_per_file)) {}

  SlotScan run() {
    const std::size_t pieces = (geometry_.slots + step_ - 1) / step_;
    std::vector<SlotScan> parts(std::min(reads_whole_ ? whole_threads_max : threads_max, pieces));
    std::vector<std::thread> threads;
    threads.reserve(parts.size());
    try {
      const SignalsBlocked blocked;  // not of this thread, which calls progress
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
      Buffer buffer(reads_whole_ ? std::min<std::uint64_t>(piece_bytes / disk_page_bytes,
                                                           geometry_.slots * (last_page_ + 1))
                                 : 3);
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
      if (!reads_whole_ || !scan_whole(slot, count, buffer, part))
        scan_headers(slot, static_cast<SlotIndex>(first + count), buffer, part);
      first += count;
    }
  }

  // False: something there cannot be read.
  bool scan_whole(SlotIndex slot, std::size_t count, Buffer& buffer, SlotScan& part) {
    const std::size_t pages = last_page_ + 1;
    if (volume_.read_pages(slot, 0, count * pages, buffer.data()) != 0) return false;
    for (std::size_t first = 0; first < count * pages; first += pages, ++slot)
      look_at(slot, buffer[first], part,
              [&](std::uint64_t page) { return compare(buffer[first], buffer[first + page]); });
    return true;
  }

  // The last page of a slot and the first of the next lie behind one another: one read for both.
  void scan_headers(SlotIndex slot, SlotIndex end, Buffer& pages, SlotScan& part) {
    bool has_header = false;  // in pages[0]
    for (; slot < end; ++slot) {
      if (!has_header) {
        const DiskOutcome outcome = read_page(slot, 0, pages[0], part);
        if (outcome != DiskOutcome::ok) {
          ++part.headers[static_cast<std::size_t>(outcome)];
          continue;
        }
      }
      const std::size_t count = slot + 1 < end ? 2 : 1;
      const bool has_last = volume_.read_pages(slot, last_page_, count, &pages[1]) == 0;
      look_at(slot, pages[0], part, [&](std::uint64_t page) {
        if (!has_last || page != last_page_) {
          const DiskOutcome outcome = read_page(slot, page, pages[1], part);
          if (outcome != DiskOutcome::ok) return outcome;
        }
        return compare(pages[0], pages[1]);
      });
      has_header = has_last && count == 2;
      if (has_header) pages[0] = pages[2];
    }
  }

  // A write that ended left the same page at both ends of what it wrote.
  static DiskOutcome compare(const HeaderBlock& in_front, const HeaderBlock& behind) {
    return in_front == behind ? DiskOutcome::ok : DiskOutcome::torn;
  }

  DiskOutcome read_page(SlotIndex slot, std::uint64_t page, HeaderBlock& block, SlotScan& part) {
    const DiskOutcome outcome = outcome_of(volume_.read_pages(slot, page, 1, &block));
    if (outcome == DiskOutcome::io_error) part.unreadable.push_back(slot);
    return outcome;
  }

  // `behind(page)`: ok if the same header is there, at that page of the slot.
  template <class Behind>
  void look_at(SlotIndex slot, const HeaderBlock& block, SlotScan& part, const Behind& behind) {
    SlotHeader header;
    DiskOutcome outcome = decode(block, header);
    if (outcome == DiskOutcome::ok && header.tier != volume_.tier())
      outcome = DiskOutcome::foreign_tier;
    if (header.tier == volume_.tier())  // of an erasure too
      part.last_generation = std::max(part.last_generation, header.generation);
    if (outcome == DiskOutcome::ok) outcome = fit(slot, header);
    if (outcome == DiskOutcome::ok)
      outcome = behind(1 + round_up(header.payload_bytes, disk_page_bytes) / disk_page_bytes);
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
    std::vector<Ranked> latest;
    latest.reserve(found.size());
    for (const Ranked& one : found) {
      if (latest.empty() || what(*latest.back().slot) != what(*one.slot))
        latest.push_back(one);
      else
        all.superseded.push_back(*one.slot);
    }
    for (Ranked& one : latest) one.rank = one.slot->generation;
    std::sort(latest.begin(), latest.end(),
              [](const Ranked& a, const Ranked& b) { return a.rank < b.rank; });
    all.found.reserve(latest.size());
    for (const Ranked& one : latest) all.found.push_back(*one.slot);
    return all;
  }

  Volume& volume_;
  const DiskGeometry& geometry_;
  const DiskOptions& options_;
  const bool reads_whole_;
  const std::uint64_t last_page_;  // of a slot
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
