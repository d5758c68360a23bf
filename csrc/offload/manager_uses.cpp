// Which transfers may run side by side, on either side of the copy.
#include <optional>
#include <unordered_set>

#include "offload/manager.hpp"

namespace kvmem {

namespace {

// An offload reads the device's blocks and writes the host's, a restore the other way round.
Access device_access(const TransferJob& job) {
  return job.kind == TransferKind::offload ? Access::read : Access::write;
}
Access host_access(const TransferJob& job) {
  return job.kind == TransferKind::offload ? Access::write : Access::read;
}

template <class Id>
std::optional<Id> first_shared(const std::vector<Id>& wanted, const std::vector<Id>& used) {
  const std::unordered_set<Id> all(wanted.begin(), wanted.end());
  for (const Id id : used) {
    if (all.contains(id)) return id;
  }
  return std::nullopt;
}

template <class Id>
[[noreturn]] void throw_busy(const char* what, Id id, const TransferJob& other) {
  throw Busy(text(what, " ", id, " is in use by unfinished transfer ", other.id),
             static_cast<std::int64_t>(id), other.id);
}

}  // namespace

void Manager::begin_uses(TransferJob& job) noexcept {
  job.uses_blocks = true;
  device_uses_.begin(job.device_blocks, device_access(job));
  host_uses_.begin(job.host_slots, host_access(job));
}

void Manager::end_uses(TransferJob& job) noexcept {
  job.uses_blocks = false;
  device_uses_.end(job.device_blocks, device_access(job));
  host_uses_.end(job.host_slots, host_access(job));
}

void Manager::expect_free(const TransferJob& job) const {
  if (!device_uses_.conflicts(job.device_blocks, device_access(job)) &&
      !host_uses_.conflicts(job.host_slots, host_access(job))) {
    return;
  }
  const bool restores = job.kind == TransferKind::restore;
  // Only those that `after` names itself: one in between may be cancelled, and then orders nothing.
  const CopyJob::Jobs before = job.behind();
  for (const auto& [id, other] : active_) {
    if (!other->uses_blocks) continue;  // just ending
    const bool ordered = std::ranges::find(before, other) != before.end();
    const bool other_restores = other->kind == TransferKind::restore;
    if (!ordered && (restores || other_restores)) {
      if (const auto block = first_shared(job.device_blocks, other->device_blocks))
        throw_busy("device block", *block, *other);
    }
    // A restore's source must have been observed complete; order on the device is not enough.
    if (restores ? !other_restores : !ordered) {
      if (const auto slot = first_shared(job.host_slots, other->host_slots))
        throw_busy("host slot", *slot, *other);
    }
  }
}

}  // namespace kvmem
