// The memory that the fake knows of, by address. Not thread-safe: the state's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace kvmem::fake {

struct Region {
  std::uintptr_t base = 0;
  std::size_t bytes = 0;
  int device = 0;  // whose it is, or who registered it
  bool read_only = false;
  bool ours = false;  // the runtime allocated it
  bool gone = false;  // it was seen not to be there any more

  [[nodiscard]] bool holds(std::uintptr_t at, std::size_t size) const noexcept {
    return at >= base && size <= bytes && at - base <= bytes - size;
  }
};

// Regions that do not overlap.
class Regions {
 public:
  void add(const Region& region) { by_base_.insert_or_assign(region.base, region); }
  void remove(const void* base) { by_base_.erase(reinterpret_cast<std::uintptr_t>(base)); }
  void clear() { by_base_.clear(); }

  // That begins there, or null.
  [[nodiscard]] const Region* at(const void* base) const {
    const auto found = by_base_.find(reinterpret_cast<std::uintptr_t>(base));
    return found != by_base_.end() ? &found->second : nullptr;
  }
  // That holds the byte, or null.
  [[nodiscard]] const Region* of(std::uintptr_t address) const {
    auto next = by_base_.upper_bound(address);
    if (next == by_base_.begin()) return nullptr;
    const Region& region = std::prev(next)->second;
    return region.holds(address, 1) ? &region : nullptr;
  }
  // One of them, another each time; null where there is none.
  [[nodiscard]] Region* next() {
    auto found = by_base_.upper_bound(latest_);
    if (found == by_base_.end()) found = by_base_.begin();
    if (found == by_base_.end()) return nullptr;
    latest_ = found->first;
    return &found->second;
  }
  [[nodiscard]] bool any_in(std::uintptr_t base, std::size_t bytes) const {
    if (of(base) != nullptr) return true;
    const auto next = by_base_.lower_bound(base);
    return next != by_base_.end() && next->first - base < bytes;
  }
  template <class Counts>
  [[nodiscard]] std::size_t bytes(Counts&& counts) const {
    std::size_t sum = 0;
    for (const auto& [base, region] : by_base_) sum += counts(region) ? region.bytes : 0;
    return sum;
  }

 private:
  std::map<std::uintptr_t, Region> by_base_;
  std::uintptr_t latest_ = 0;
};

struct Memory {
  Regions pinned;  // registered, or allocated as pinned
  Regions device;  // allocated, or declared by a test
  Regions staged;  // declared: may be copied without being registered

  void clear() {
    pinned.clear();
    device.clear();
    staged.clear();
  }
};

}  // namespace kvmem::fake
