// What the files that bind the cache share. With the GIL.
#pragma once

#include "bindings/bind.hpp"
#include "bindings/keys_argument.hpp"
#include "cache/cache.hpp"

namespace kvmem::bindings {

// With a transfer go the events that it ran behind, and its cache if it was the last to hold it.
template <>
[[nodiscard]] inline bool may_wait_at_its_end(const CacheTransfer& transfer) noexcept {
  const auto& cache = transfer.job().cache;
  return calls_block(*cache->runtime()) || cache.use_count() == 1;
}

// A copy of the keys, for calls that let go of the GIL: whoever has the list may change it then.
class OwnKeys {
 public:
  explicit OwnKeys(const KeysArgument& given) : key_bytes_(given.key_bytes()) {
    for (const std::byte* const key : given.pointers())
      bytes_.insert(bytes_.end(), key, key + key_bytes_);
    for (std::size_t i = 0; i < given.pointers().size(); ++i)
      pointers_.push_back(bytes_.data() + i * key_bytes_);
  }
  [[nodiscard]] KeyPointers pointers() const noexcept { return pointers_; }
  [[nodiscard]] std::size_t key_bytes() const noexcept { return key_bytes_; }

 private:
  std::size_t key_bytes_;
  std::vector<std::byte> bytes_;
  std::vector<const std::byte*> pointers_;
};

// A sequence, of a cache with one group; else a dict of them by group. What it lacks has none.
[[nodiscard]] Cache::Blocks blocks_argument(const Cache& cache, const py::object& blocks,
                                            std::size_t keys);
// Now, before any waiting. With the GIL released: marking a stream is a device call.
[[nodiscard]] After taken_order(const Cache& cache, const Ordered& order);

// `values`: all of them, by name; kvmem/cache.py sees to that.
[[nodiscard]] CacheOptions cache_options(const py::dict& values);
[[nodiscard]] py::dict cache_stats(const Cache& cache);
[[nodiscard]] py::object owner_counts(const std::optional<OwnerCounts>& counts);
void bind_cache_reports(py::module_& module);
void bind_cache_transfer(py::module_& module);
using CacheClass = py::class_<Cache, Shared<Cache>>;
void bind_stores(py::module_& module, CacheClass& cache);

}  // namespace kvmem::bindings
