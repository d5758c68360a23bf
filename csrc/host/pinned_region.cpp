#include "host/pinned_region.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <numeric>
#include <thread>
#include <utility>

#include "base/check.hpp"
#include "base/proc_file.hpp"
#include "base/signals.hpp"
#include "device/host_memory.hpp"
#include "host/attached_memory.hpp"
#include "host/budget.hpp"
#include "host/numa.hpp"
#include "host/page_touch.hpp"

namespace kvmem {

namespace {

constexpr std::size_t transparent_huge_page_bytes = std::size_t{2} << 20;
constexpr std::size_t most_mapped_bytes = std::size_t{1} << 62;  // keeps round_up() exact
constexpr std::size_t most_slot_bytes_to_pin = std::size_t{64}
                                               << 30;  // registrations fail at 512 GiB

std::atomic<std::uint64_t> leaked_bytes{0};
std::atomic<std::uint32_t> leaving{0};  // regions that another thread lets go
constexpr std::chrono::seconds patience_with_leaving{30};

std::size_t system_page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

std::uint64_t meminfo(const std::string& key) {
  return number_of_key("/proc/meminfo", key).value_or(0);
}

std::size_t reserved_page_bytes() {
  const std::size_t bytes = meminfo("Hugepagesize:") * 1024;
  return bytes > 0 ? bytes : transparent_huge_page_bytes;
}

// madvise() accepts the wish for huge pages also where the administrator has turned them off.
bool transparent_huge_pages_allowed(bool shared) {
  std::ifstream file(
      text("/sys/kernel/mm/transparent_hugepage/", shared ? "shmem_enabled" : "enabled"));
  std::string word;
  while (file >> word) {
    if (word.front() == '[') return word != "[never]" && word != "[deny]";
  }
  return false;
}

[[noreturn]] void refuse(const char* what, const char* bound, std::size_t bytes, int why) {
  Shortage shortage;
  shortage.bound = text(bound, " (", std::strerror(why), ")");
  shortage.wanted = bytes;
  throw CapacityError(what, shortage);
}

[[noreturn]] void refuse_reserved_pages(std::size_t pages) {
  Shortage shortage;
  shortage.bound = "HugePages_Free";
  shortage.wanted = pages;
  shortage.free = meminfo("HugePages_Free:");
  shortage.largest = meminfo("HugePages_Total:");
  shortage.held = shortage.largest - std::min(shortage.largest, shortage.free);
  throw CapacityError(text("not enough reserved huge pages of ", reserved_page_bytes(), " bytes"),
                      shortage);
}

// Sealed before anybody else can see it: no holder of the descriptor can shrink the file under a
// mapping.
int create_memfd(std::size_t bytes, bool reserved_pages) {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | (reserved_pages ? MFD_HUGETLB : 0U);
  const int memfd = memfd_create("kvmem", flags);
  if (memfd < 0 && reserved_pages) refuse_reserved_pages(bytes / reserved_page_bytes());
  if (memfd < 0) refuse("cannot create shared memory", "memfd_create", bytes, errno);
  if (ftruncate(memfd, static_cast<off_t>(bytes)) != 0 ||
      fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int why = errno;
    close(memfd);
    refuse("cannot size shared memory", "memfd size", bytes, why);
  }
  return memfd;
}

// What a region leaves to be undone.
struct Remains {
  std::byte* data;
  std::size_t bytes;
  int memfd;
  std::shared_ptr<Device> device;  // null: nothing is pinned
  std::size_t chunk_bytes, pinned_bytes;
  ProcessMark mark;

  // False: some of it may still be pinned.
  bool unpin() const noexcept {
    bool gone = true;
    for (std::size_t done = 0; done < pinned_bytes && !mark.must_leak(); done += chunk_bytes) {
      gone &= device->unpin(data + done, std::min(chunk_bytes, pinned_bytes - done));
    }
    return gone;
  }
  void let_go() const noexcept {
    // The driver knows it by its addresses, and who gets them next would be taken for pinned.
    if (!unpin())
      leaked_bytes += bytes;
    else if (!mark.must_leak())
      unmap();
  }
  void unmap() const noexcept {
    if (data != nullptr) munmap(data, bytes);
    if (memfd >= 0) close(memfd);
  }
  [[nodiscard]] bool let_go_elsewhere() const noexcept {
    const SignalsBlocked blocked;
    ++leaving;
    try {
      std::thread([all = *this] {
        all.device->adopt_thread();
        all.let_go();
        --leaving;
      }).detach();
      return true;
    } catch (...) {  // no thread, or no memory for one
      --leaving;
      return false;
    }
  }
};

// Memory that is being let go elsewhere is not missing, only late. In a forked child it never
// comes.
void expect_memory_soon_for(std::size_t bytes) {
  const auto limit = std::chrono::steady_clock::now() + patience_with_leaving;
  while (true) {
    const bool may_come = leaving.load() > 0 && std::chrono::steady_clock::now() < limit;
    try {
      return expect_memory_for(bytes);
    } catch (const CapacityError&) {
      if (!may_come) throw;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

PinnedRegion PinnedRegion::map(std::size_t bytes, const RegionOptions& options) {
  KVMEM_EXPECTS(bytes > 0, "a region of zero bytes");
  if (options.numa_node) expect_numa_node(*options.numa_node);
  if (bytes > most_mapped_bytes) refuse("cannot map memory", "address space", bytes, ENOMEM);
  if (!options.has_bytes) {
    KVMEM_EXPECTS(options.hugepages != HugePages::required && !options.shared && !options.attach,
                  "a device without bytes has neither huge pages nor shared memory");
    PinnedRegion region;
    region.data_ = static_cast<std::byte*>(map_addresses(bytes));
    region.facts_.bytes = round_up(bytes, system_page_bytes());
    return region;
  }
  if (options.attach) return map_attached(bytes, *options.attach);
  if (options.hugepages != HugePages::never) {
    // No budget: reserved pages are taken already, so MemAvailable says nothing about them.
    try {
      return map_pages(bytes, options, reserved_page_bytes(), true);
    } catch (const CapacityError&) {
      if (options.hugepages == HugePages::required) throw;
    }
  }
  expect_memory_soon_for(bytes);
  return map_pages(bytes, options, system_page_bytes(), false);
}

PinnedRegion PinnedRegion::map_pages(std::size_t bytes, const RegionOptions& options,
                                     std::size_t page_bytes, bool reserved_pages) {
  PinnedRegion region;  // from here on its destructor cleans up
  const std::size_t length = round_up(bytes, page_bytes);
  region.facts_.page_bytes = page_bytes;
  if (options.shared) region.facts_.memfd = create_memfd(length, reserved_pages);
  region.reserve_addresses(length, reserved_pages);
  region.advise(options.shared, reserved_pages);
  region.place(options);
  const auto started = std::chrono::steady_clock::now();
  touch_pages({.base = region.data_,
               .bytes = length,
               .page_bytes = page_bytes,
               .memfd = region.facts_.memfd,
               .threads = options.touch_threads},
              options.progress);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
  region.facts_.touch_seconds = took.count();
  return region;
}

// Of no budget, placed and touched already: what is there belongs to whoever made it.
PinnedRegion PinnedRegion::map_attached(std::size_t bytes, int descriptor) {
  PinnedRegion region;
  const AttachedMemory memory = attach_memory(descriptor, bytes);
  region.facts_.memfd = memory.memfd;
  region.facts_.page_bytes = memory.page_bytes;
  const bool reserved_pages = memory.page_bytes > system_page_bytes();
  region.reserve_addresses(memory.bytes, reserved_pages);
  region.advise(true, reserved_pages);
  return region;
}

void PinnedRegion::place(const RegionOptions& options) {
  if (options.numa_node) {
    bind_to_numa_node(data_, facts_.bytes, *options.numa_node);
    facts_.numa_node = options.numa_node;
  } else if (options.preferred_node &&
             try_prefer_numa_node(data_, facts_.bytes, *options.preferred_node)) {
    facts_.numa_node = options.preferred_node;
  }
}

void PinnedRegion::reserve_addresses(std::size_t length, bool reserved_pages) {
  const bool shared = facts_.memfd >= 0;
  // The kernel aligns files and reserved pages by itself. Private memory is mapped too long and
  // trimmed, so that its huge pages start with the first slot.
  const bool trims = !shared && !reserved_pages && length >= transparent_huge_page_bytes;
  const std::size_t mapped = length + (trims ? transparent_huge_page_bytes : 0);
  int flags = shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  if (reserved_pages && !shared) flags |= MAP_HUGETLB;
  void* const raw = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, flags, facts_.memfd, 0);
  if (raw == MAP_FAILED) {
    if (reserved_pages) refuse_reserved_pages(length / facts_.page_bytes);
    refuse("cannot map memory", "address space", length, errno);
  }
  data_ = static_cast<std::byte*>(raw);
  facts_.bytes = length;
  if (!trims) return;
  const auto address = reinterpret_cast<std::uintptr_t>(raw);
  const std::size_t head = round_up(address, transparent_huge_page_bytes) - address;
  const std::size_t tail = transparent_huge_page_bytes - head;
  if (head > 0) munmap(data_, head);
  data_ += head;
  if (tail > 0) munmap(data_ + length, tail);
}

void PinnedRegion::advise(bool shared, bool reserved_pages) {
  if (!reserved_pages) {
    facts_.transparent_huge_pages =
        madvise(data_, facts_.bytes, MADV_HUGEPAGE) == 0 && transparent_huge_pages_allowed(shared);
  }
  // A child must not share our pages copy-on-write: our next write would move us to a new page,
  // away from the one that a copy goes to. Reserved pages cannot be wiped on fork; there the child
  // has no mapping at all. Nor has it one of shared memory: nothing is copied on write there, but
  // through a view that it inherited it would write to slots that are somebody else's by then.
  if (shared || madvise(data_, facts_.bytes, MADV_WIPEONFORK) != 0) {
    madvise(data_, facts_.bytes, MADV_DONTFORK);
  }
}

PinnedRegion::PinnedRegion(PinnedRegion&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      facts_(std::exchange(other.facts_, {})),
      pinned_by_(std::move(other.pinned_by_)),
      pin_chunk_bytes_(other.pin_chunk_bytes_),
      pinned_bytes_(other.pinned_bytes_.exchange(0)),
      leaked_(other.leaked_),
      mark_(other.mark_) {}

PinnedRegion::~PinnedRegion() {
  if (leaked_ || mark_.must_leak()) return;
  const Remains remains{data_,         facts_.bytes, facts_.memfd, pinned_by_, pin_chunk_bytes_,
                        pinned_bytes_, mark_};
  const bool takes_long = pinned_bytes_ > 0 && pinned_by_->info().calls_block;
  if (!takes_long || !remains.let_go_elsewhere()) remains.let_go();
}

void PinnedRegion::pin(std::shared_ptr<Device> device, std::size_t slot_bytes) {
  start_pinning(std::move(device), bytes_a_pin(slot_bytes));
  try {
    while (pin_next()) {
    }
  } catch (...) {
    unpin();
    throw;
  }
}

void PinnedRegion::start_pinning(std::shared_ptr<Device> device, std::size_t chunk_bytes) {
  KVMEM_EXPECTS(!pinned_by_, "the region is pinned already");
  pinned_by_ = std::move(device);
  pin_chunk_bytes_ = chunk_bytes;
}

bool PinnedRegion::pin_next() {
  const std::size_t done = pinned_bytes_;
  if (done == facts_.bytes) return false;
  const std::size_t bytes = std::min(pin_chunk_bytes_, facts_.bytes - done);
  pinned_by_->pin(data_ + done, bytes);
  pinned_bytes_ = done + bytes;
  return true;
}

void PinnedRegion::unpin() noexcept {
  const std::shared_ptr<Device> device = std::move(pinned_by_);
  const Remains pinned{data_, 0, -1, device, pin_chunk_bytes_, pinned_bytes_.exchange(0), mark_};
  if (!pinned.unpin()) leak();
}

RegionFacts PinnedRegion::facts() const noexcept {
  RegionFacts facts = facts_;
  facts.pinned_bytes = pinned_bytes();
  facts.pinned = facts.bytes > 0 && facts.pinned_bytes == facts.bytes;
  return facts;
}

void PinnedRegion::leak() noexcept {
  if (!std::exchange(leaked_, true)) leaked_bytes += facts_.bytes;
}

std::size_t PinnedRegion::bytes_a_pin(std::size_t slot_bytes, std::size_t most_bytes) {
  KVMEM_EXPECTS(slot_bytes > 0 && slot_bytes <= most_slot_bytes_to_pin, "slot_bytes ", slot_bytes,
                " cannot be pinned: it must be from 1 to ", most_slot_bytes_to_pin);
  const std::size_t step = std::lcm(slot_bytes, system_page_bytes());
  return std::max(step, std::min(most_bytes, most_bytes_a_pin) / step * step);
}

std::uint64_t leaked_region_bytes() noexcept { return leaked_bytes; }

}  // namespace kvmem
