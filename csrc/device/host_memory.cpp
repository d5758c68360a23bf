#include "device/host_memory.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/check.hpp"
#include "base/proc_file.hpp"
#include "base/types.hpp"

namespace kvmem {

namespace {

// "key: number kB" of a file of /proc; zero where the kernel does not say.
std::uint64_t bytes_in(const char* file, const char* key) {
  return number_of_key(file, key).value_or(0) << 10;
}

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

std::uint64_t machine_memory_bytes() { return bytes_in("/proc/meminfo", "MemTotal:"); }

void* map_memory(std::size_t bytes) {
  KVMEM_EXPECTS(bytes > 0, "zero bytes of memory");
  const std::uint64_t available = bytes_in("/proc/meminfo", "MemAvailable:");
  const Shortage shortage{"MemAvailable bytes", bytes, available, available, 0, 0};
  // Linux maps more than there is and kills the process later. Zero: this kernel does not say.
  if (available > 0 && bytes > available) throw CapacityError("cannot map memory", shortage);
  const std::size_t mapped = round_up(bytes, page_bytes());
  void* const base =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    throw CapacityError(text("cannot map memory: ", std::strerror(errno)), shortage);
  }
  madvise(base, mapped, MADV_HUGEPAGE);  // best effort: copies are much faster on huge pages
  return base;
}

void* map_addresses(std::size_t bytes) {
  KVMEM_EXPECTS(bytes > 0, "zero bytes of memory");
  constexpr std::size_t most_bytes = std::size_t{1} << 47;  // keeps round_up() exact
  const Shortage shortage{"bytes of address space", bytes, most_bytes, most_bytes, 0, 0};
  if (bytes > most_bytes) throw CapacityError("cannot map addresses", shortage);
  void* const base = mmap(nullptr, round_up(bytes, page_bytes()), PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED)
    throw CapacityError(text("cannot map addresses: ", std::strerror(errno)), shortage);
  return base;
}

void unmap_memory(void* base, std::size_t bytes) noexcept {
  munmap(base, round_up(bytes, page_bytes()));
}

void lock_memory(void* base, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  KVMEM_EXPECTS(bytes > 0 && bytes % page_bytes() == 0 && address % page_bytes() == 0,
                "only whole pages can be locked, not ", bytes, " bytes at ", base);
  if (mlock(base, bytes) == 0) return;
  const std::string why = std::strerror(errno);
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::uint64_t locked = bytes_in("/proc/self/status", "VmLck:");
  const std::uint64_t free = limit.rlim_cur > locked ? limit.rlim_cur - locked : 0;
  throw CapacityError(text("cannot lock memory: ", why),
                      Shortage{"RLIMIT_MEMLOCK", bytes, free, limit.rlim_cur, locked, 0});
}

void unlock_memory(void* base, std::size_t bytes) noexcept { munlock(base, bytes); }

}  // namespace kvmem
