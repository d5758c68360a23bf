#include "fakes/copy_checks.hpp"

#include <algorithm>

namespace kvmem::fake {

namespace {

std::uintptr_t address_of(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }

}  // namespace

Error CopyChecks::look_at(const CopyDescriptors& batch, SourceAccess access, std::size_t& failed) {
  for (std::size_t i = 0; i < batch.count; ++i) {
    const Side target = side_of(batch.targets[i], batch.sizes[i]);
    const Side source = side_of(batch.sources[i], batch.sizes[i]);
    if (i == 0) {
      target_ = target;
      source_ = source;
    }
    failed = i;
    if (!look_at_side("writes", batch.targets[i], batch.sizes[i], target) ||
        !look_at_side("reads", batch.sources[i], batch.sizes[i], source)) {
      return cuda::invalid_value;
    }
    if (target.read_only) {  // the write would crash this process
      report_once(Rule::read_only, "a copy into memory registered as read-only, at ",
                  static_cast<const void*>(batch.targets[i]));
      return cuda::invalid_value;
    }
  }
  if (access == SourceAccess::any && state_.checker.enabled(Rule::early_source))
    look_for_early_sources(batch);
  return cuda::success;
}

Direction CopyChecks::direction(cuda::MemcpyKind kind) const noexcept {
  const bool to_host = target_.place == Place::pinned || target_.place == Place::staged ||
                       (target_.place == Place::unknown && source_.place == Place::device) ||
                       (target_.place == Place::unknown && source_.place == Place::unknown &&
                        kind == cuda::device_to_host);
  return to_host ? Direction::to_host : Direction::to_device;
}

CopyChecks::Side CopyChecks::side_of(const std::byte* at, std::size_t bytes) const {
  const std::uintptr_t address = address_of(at);
  if (const Region* const pinned = state_.memory.pinned.of(address))
    return {Place::pinned, pinned->holds(address, bytes), pinned->read_only};
  if (const Region* const device = state_.memory.device.of(address))
    return {Place::device, device->holds(address, bytes), false};
  if (const Region* const staged = state_.memory.staged.of(address))
    return {Place::staged, staged->holds(address, bytes), false};
  return {};
}

// False: the runtime would refuse it.
bool CopyChecks::look_at_side(const char* verb, const std::byte* at, std::size_t bytes,
                              const Side& side) {
  if (side.holds) return true;
  if (side.place == Place::device) return false;
  const void* const where = at;
  if (side.place == Place::pinned) {
    const Region& region = *state_.memory.pinned.of(address_of(at));
    if (state_.memory.pinned.of(region.base + region.bytes) != nullptr) {
      report_once(Rule::straddles, "it ", verb, " ", bytes, " bytes at ", where,
                  ", in more than one registration");
      return true;
    }
  }
  report_once(Rule::unregistered_host, "it ", verb, " ", bytes, " bytes at ", where,
              ", not all of which are memory that is registered or of a device");
  return true;
}

void CopyChecks::look_for_early_sources(const CopyDescriptors& batch) {
  std::uintptr_t first = UINTPTR_MAX, last = 0;
  for (std::size_t i = 0; i < batch.count; ++i) {
    first = std::min(first, address_of(batch.sources[i]));
    last = std::max(last, address_of(batch.sources[i]) + batch.sizes[i]);
  }
  // Most often nothing is written anywhere near.
  if (!model_.may_write(reinterpret_cast<const void*>(first), last - first)) return;
  for (std::size_t i = 0; i < batch.count; ++i) {
    if (!model_.may_write(batch.sources[i], batch.sizes[i])) continue;
    report_once(Rule::early_source, "its source at ", static_cast<const void*>(batch.sources[i]),
                " may be read at any time, and is still being written");
    return;
  }
}

}  // namespace kvmem::fake
