// What the files that bind the cache share. With the GIL.
#pragma once

#include "bindings/bind.hpp"
#include "cache/cache.hpp"

namespace kvmem::bindings {

// With a transfer go the events that it ran behind, and its cache if it was the last to hold it.
template <>
[[nodiscard]] inline bool may_wait_at_its_end(const CacheTransfer& transfer) noexcept {
  const auto& cache = transfer.job().cache;
  return calls_block(*cache->runtime()) || cache.use_count() == 1;
}

// `values`: all of them, by name; kvmem/cache.py sees to that.
[[nodiscard]] CacheOptions cache_options(const py::dict& values);
[[nodiscard]] py::dict cache_stats(const Cache& cache);
[[nodiscard]] py::object owner_counts(const std::optional<OwnerCounts>& counts);
void bind_cache_reports(py::module_& module);
void bind_cache_transfer(py::module_& module);

}  // namespace kvmem::bindings
