// Which transfers may run side by side, on either side of the copy.
#include <algorithm>
#include <optional>
#include <unordered_set>

#include "base/check.hpp"
#include "offload/manager.hpp"

namespace kvmem {

namespace {

// An offload reads the device's blocks and writes the host's, a restore the other way round.
Access device_access(TransferKind kind) {
  return kind == TransferKind::offload ? Access::read : Access::write;
}
Access host_access(TransferKind kind) {
  return kind == TransferKind::offload ? Access::write : Access::read;
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
  device_uses_.begin(job.device_blocks, device_access(job.kind));
  host_uses_.begin(job.host_slots, host_access(job.kind));
}

void Manager::end_uses(TransferJob& job) noexcept {
  job.uses_blocks = false;
  device_uses_.end(job.device_blocks, device_access(job.kind));
  host_uses_.end(job.host_slots, host_access(job.kind));
}

void Manager::expect_free(TransferKind kind, const std::vector<BlockId>& device_blocks,
                          const std::vector<SlotIndex>& host_slots, const CopyJob::Jobs& before,
                          const BlockClaim* own_claim) const {
  if (!device_uses_.conflicts(device_blocks, device_access(kind)) &&
      !host_uses_.conflicts(host_slots, host_access(kind))) {
    return;
  }
  const bool restores = kind == TransferKind::restore;
  // Only those that `after` names itself: one in between may be cancelled, and then orders nothing.
  for (const auto& [id, other] : active_) {
    if (!other->uses_blocks) continue;  // just ending
    const bool ordered = std::ranges::find(before, other) != before.end();
    const bool other_restores = other->kind == TransferKind::restore;
    if (!ordered && (restores || other_restores)) {
      if (const auto block = first_shared(device_blocks, other->device_blocks))
        throw_busy("device block", *block, *other);
    }
    // A restore's source must have been observed complete; order on the device is not enough.
    if (restores ? !other_restores : !ordered) {
      if (const auto slot = first_shared(host_slots, other->host_slots))
        throw_busy("host slot", *slot, *other);
    }
  }
  for (const BlockClaim* const other : claims_) {
    if (other == own_claim || (!restores && other->kind_ != TransferKind::restore)) continue;
    const auto taken = std::ranges::find_if(
        device_blocks, [&](BlockId block) { return other->blocks_.contains(block); });
    if (taken != device_blocks.end())
      throw Busy(text("device block ", *taken, " is claimed for a transfer to come"), *taken, 0);
  }
}

// ---- claims ----

std::shared_ptr<BlockClaim> Manager::claim(TransferKind kind, const std::vector<BlockId>& blocks,
                                           const After& after) {
  const auto pass = enter();
  layout()->expect_blocks(blocks, true);
  std::shared_ptr<BlockClaim> claim(new BlockClaim(shared_from_this(), kind, blocks));
  const auto begin = [&] {
    const std::lock_guard lock(mutex_);
    if (gate_.closed()) throw Closed("the manager is closed");
    expect_free(kind, blocks, {}, after.transfers, nullptr);
    claims_.push_back(claim.get());
    device_uses_.begin(blocks, device_access(kind));
  };
  try {
    begin();
  } catch (const Busy&) {  // see accept()
    runtime_->recycle().reap_in_turn();
    runtime_->device().progress().bump();
    begin();
  }
  return claim;
}

void Manager::expect_claimable(TransferKind kind, const std::vector<BlockId>& blocks,
                               const After& after) {
  const auto pass = enter();
  const auto ask = [&] {
    const std::lock_guard lock(mutex_);
    expect_free(kind, blocks, {}, after.transfers, nullptr);
  };
  try {
    ask();
  } catch (const Busy&) {  // see accept()
    runtime_->recycle().reap_in_turn();
    ask();
  }
}

BlockClaim::~BlockClaim() {
  if (manager_->mark_.must_leak()) return;
  {
    const std::lock_guard lock(manager_->mutex_);
    // Not there where it found its blocks busy: it has none then that count.
    if (std::erase(manager_->claims_, this) == 0) return;
    manager_->device_uses_.end(blocks_, device_access(kind_));
  }
  manager_->runtime_->device().progress().bump_for_waiters();  // drain() waits for claims too
}

BlockClaim::Aside::Aside(BlockClaim* claim, const TransferJob& job)
    : claim_(claim), blocks_(job.device_blocks) {
  if (claim_ == nullptr) return;
  KVMEM_INVARIANT(
      claim_->manager_ == job.manager && claim_->kind_ == job.kind &&
      std::ranges::all_of(blocks_, [&](BlockId block) { return claim_->blocks_.contains(block); }));
  claim_->manager_->device_uses_.end(blocks_, device_access(claim_->kind_));
}

BlockClaim::Aside::~Aside() {
  if (claim_ != nullptr)
    claim_->manager_->device_uses_.begin(blocks_, device_access(claim_->kind_));
}

}  // namespace kvmem
